"""`lockstep pull`: a model from a hub into its library's cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from services.cli.extras import missing_packages
from services.cli.hub.model_name import parse_model_name
from shared.flag_parser import FlagParser


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(
        prog="lockstep pull",
        description="Download a model and print its directory. Files that are there already are kept. "
        "Takes the weights in safetensors, the tokenizer and the chat templates, and checks the hub's "
        "hashes; of Kimi's vocabulary it makes a tokenizer.json. The variables of huggingface_hub apply: "
        "HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY, HF_HOME, HF_HUB_CACHE.",
    )
    parser.add_argument("model", metavar="ORG/NAME[@REVISION]", help="a branch, a tag or a commit of a model")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--without-weights", action="store_true", help="take no weights: a tokenizer needs none")
    part.add_argument(
        "--wait",
        action="store_true",
        help="only wait until another run has put ORG/NAME@COMMIT into the cache",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    name = parse_model_name(args.model)
    if name is None:
        parser.error("a model's name is ORG/NAME or ORG/NAME@REVISION")
    if args.wait and not re.fullmatch("[0-9a-f]{40}", name.revision or ""):
        parser.error("--wait needs a commit: ORG/NAME@COMMIT, with 40 hexadecimal digits")
    if problem := missing_packages("pull", ["pull"]):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    # Imported here because it takes a second, and may not be installed.
    from services.cli.hub.model_hub import HubError, fetch_model, wait_for_model  # noqa: PLC0415

    try:
        print(wait_for_model(name) if args.wait else fetch_model(name, with_weights=not args.without_weights))
    except HubError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
