"""The terminal clients' shared flags, and the request they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.cli.clients.key_flag import add_key_flag
from services.cli.clients.running_cells import Target, find_target
from services.cli.tls_flags import add_trust_flags

DEFAULT_TARGET = "127.0.0.1:50051"


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for everything but the prompt. The server chooses what is not given."""
    add_call_flags(parser)
    _add_sampling_flags(parser.add_argument_group("sampling"))
    _add_end_flags(parser.add_argument_group("length and stopping"))
    _add_form_flags(parser.add_argument_group("structured output"))


def add_call_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every call has, whatever it asks for."""
    parser.add_argument(
        "--target",
        metavar="ADDRESS",
        help=f"the tokenizer (default: that of the cell running on this machine, else {DEFAULT_TARGET})",
    )
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--priority", choices=("high", "normal", "low"), help="how urgent the request is")
    parser.add_argument(
        "--determinism",
        choices=("exact", "ordinary"),
        help="exact: the answer depends only on model, prompt and flags; refused where that cannot be guaranteed",
    )
    parser.add_argument("--cache-salt", default="", metavar="TEXT", help="share cached prefixes with equal salts only")
    add_key_flag(parser)
    add_trust_flags(parser)


def find_tokenizer(args: argparse.Namespace) -> Target:
    """The tokenizer that these flags name, or that of a running cell."""
    return find_target(args.target, lambda cell: cell.address, DEFAULT_TARGET)


def priority_of(args: argparse.Namespace) -> str | None:
    """The priority that these flags name, by its name in messages."""
    return None if args.priority is None else f"PRIORITY_{args.priority.upper()}"


def determinism_of(args: argparse.Namespace) -> str | None:
    """The determinism that these flags name, by its name in messages."""
    return None if args.determinism is None else f"DETERMINISM_{args.determinism.upper()}"


def request_from(args: argparse.Namespace) -> tokenizer_pb2.GenerateRequest:
    """The request that these flags describe, without a prompt."""
    sampling = common_pb2.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias),
        min_tokens=args.min_tokens,
        ignore_eos=args.ignore_eos,
        stop_token_ids=args.stop_token_id,
    )
    return tokenizer_pb2.GenerateRequest(
        sampling=sampling,
        stop=args.stop,
        include_stop=args.include_stop,
        bad_words=args.bad_word,
        structured_output=args.structured_output,
        priority=priority_of(args),
        determinism=determinism_of(args),
        cache_salt=args.cache_salt,
    )


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; at most 2")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that sum to P")
    group.add_argument("--top-k", type=_unsigned(32), metavar="K", help="sample from the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the top probability")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="penalize tokens already in prompt or answer; 1 is off"
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="penalize tokens already in the answer; 0 is off"
    )
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, per occurrence")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to a token's logit; may be repeated",
    )
    group.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="text never to write; may be repeated"
    )
    group.add_argument("--seed", type=_unsigned(64), metavar="N", help="make sampling repeatable")


def _add_end_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=_unsigned(32), metavar="N", help="maximum number of tokens of the answer")
    group.add_argument("--min-tokens", type=_unsigned(32), metavar="N", help="minimum number of tokens of the answer")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    group.add_argument(
        "--stop-token-id", type=_unsigned(32), action="append", default=[], metavar="ID", help="the same for a token"
    )
    group.add_argument("--include-stop", action="store_true", help="keep the stop string or stop token in the answer")
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def _add_form_flags(group: argparse._ArgumentGroup) -> None:
    forms = group.add_mutually_exclusive_group()
    for name, metavar, parse, help_text in (
        ("--json-schema", "FILE", _form("json_schema", _read), "a JSON value that matches this schema"),
        ("--grammar", "FILE", _form("grammar", _read), "a text that matches this Lark or GBNF grammar"),
        ("--regex", "REGEX", _form("regex", str), "a text that this regular expression matches as a whole"),
    ):
        forms.add_argument(name, dest="structured_output", type=parse, metavar=metavar, help=help_text)


def _form(field: str, read: Callable[[str], str]) -> Callable[[str], tokenizer_pb2.StructuredOutput]:
    def parse(text: str) -> tokenizer_pb2.StructuredOutput:
        form = tokenizer_pb2.StructuredOutput()
        setattr(form, field, read(text))
        return form

    return parse


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return _unsigned(32)(token_id), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a token id and a number") from error


def _unsigned(bits: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value < 2**bits:
            raise argparse.ArgumentTypeError(f"{text} is not an unsigned {bits}-bit number")
        return value

    parse.__name__ = "number"
    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value
