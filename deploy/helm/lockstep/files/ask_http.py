"""Asks a cell for one completion, or vector, over HTTP, as `helm test` does, and prints it.

It needs the standard library alone, and connects to an address while it expects the name in the cell's certificate,
which need not have that address.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
import sys
import time
from pathlib import Path

# What a cell answers while it has no room, or no workers.
RETRIED = (429, 503)
PERIOD_S = 1.0
ATTEMPT_S = 60.0


def main() -> int:
    """Ask until there is an answer; returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a cell for one completion over HTTP.")
    parser.add_argument("prompt")
    parser.add_argument("--target", required=True, help="HOST:PORT of the HTTP port")
    parser.add_argument("--host", help="what the request says that it is for, instead of --target")
    parser.add_argument("--embed", action="store_true", help="ask for the prompt's vector")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until it asks no more")
    parser.add_argument("--tls-ca", help="file of the authority to trust; without it there is no TLS")
    parser.add_argument("--server-name", help="name that the certificate must have, instead of --target's")
    parser.add_argument("--tls-cert", help="file of the certificate that it shows")
    parser.add_argument("--tls-key", help="file of its key")
    parser.add_argument("--key-file", type=Path, help="file with the key that it sends")
    args = parser.parse_args()
    deadline = time.monotonic() + args.timeout
    while True:
        try:
            status, body = ask(args)
        except (OSError, http.client.HTTPException) as error:
            status, body = 0, str(error)
        if status == http.client.OK:
            answer = json.loads(body)
            told = answer["data"][0]["embedding"] if args.embed else answer["choices"][0]["text"]
            sys.stdout.write(f"{told}\n")
            return 0
        if (status and status not in RETRIED) or time.monotonic() >= deadline:
            sys.stderr.write(f"error: {status or 'no answer'}: {body}\n")
            return 1
        time.sleep(PERIOD_S)


def ask(args: argparse.Namespace) -> tuple[int, str]:
    """Send the request once; returns the status and the body."""
    host, _, port = args.target.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.sock = socket.create_connection((host, int(port)), ATTEMPT_S)
    try:
        if args.tls_ca:
            context = ssl.create_default_context(cafile=args.tls_ca)
            if args.tls_cert:
                context.load_cert_chain(args.tls_cert, args.tls_key)
            connection.sock = context.wrap_socket(connection.sock, server_hostname=args.server_name or host)
        path, asked = "/v1/completions", {"prompt": args.prompt, "max_tokens": args.max_tokens}
        if args.embed:
            path, asked = "/v1/embeddings", {"input": args.prompt}
        body = json.dumps(asked)
        headers = {"Content-Type": "application/json", "Host": args.host or args.target}
        if args.key_file:
            headers["Authorization"] = f"Bearer {args.key_file.read_text(encoding='ascii').strip()}"
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
