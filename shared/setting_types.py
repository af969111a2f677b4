"""Types of settings: what a value means, and which ones are refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_settings import NoDecode

from shared.network.addresses import check_address, is_local
from shared.units import parse_count

# Lower-case DNS labels; a longer name leaves no room for the role's. Source: SPIFFE-ID, section 2.1; RFC 1035, 2.3.4.
_TRUST_DOMAIN = re.compile(r"(?=.{1,240}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")

_INSECURE_FLAGS = {"cell_listen": "--insecure-cell-bind", "http_listen": "--insecure-http-bind"}


def check_local_address(address: str) -> str:
    """Return an address unchanged if only this machine can reach it.

    Raises:
        ValueError: it is no address, or neither a unix socket nor loopback.
    """
    if is_local(check_address(address)):
        return address
    raise ValueError("only this machine may connect: use a unix socket or loopback")


def check_listen_address(address: str, info: ValidationInfo) -> str:
    """Return an address of a server unchanged: with TLS any, without only a local one.

    Raises:
        ValueError: it is no address, or must be local and is not.
    """
    # The settings of TLS are checked before this one.
    if is_local(check_address(address)) or info.data.get("tls_cert") is not None:
        return address
    flag = _INSECURE_FLAGS.get(info.field_name or "", "--insecure-bind")
    raise ValueError(
        "without TLS only this machine may connect: use a unix socket or loopback, give --tls-cert and the three "
        f"beside it, or, on a network that is trusted, {flag}={address}"
    )


def check_trust_domain(name: str) -> str:
    """Return a trust domain unchanged.

    Raises:
        ValueError: it is no DNS name in lower case.
    """
    if _TRUST_DOMAIN.fullmatch(name):
        return name
    raise ValueError("must be a DNS name in lower case, such as cell.example.org")


def read_max_model_len(value: object) -> object:
    """Read a number of tokens, as a text such as 8k too; return anything else unchanged, and the text `auto`.

    Raises:
        ValueError: the text is neither, or the number is below 2.
    """
    count = parse_count(value) if isinstance(value, str) and value != "auto" else value
    if type(count) is int and count < 2:
        raise ValueError(f"{count} is below 2: a prompt and its completion have a token each")
    return count


def split_list(value: object) -> object:
    """Split a comma-separated text; return anything else unchanged."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def check_json_object(value: object) -> object:
    """Return the text of a JSON object unchanged, and an object as its text.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    try:
        is_object = isinstance(json.loads(value), dict)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not is_object:
        raise ValueError('must be a JSON object, such as {"name": 1}')
    return value


Address = Annotated[str, AfterValidator(check_address)]


ListenAddress = Annotated[str, AfterValidator(check_listen_address)]


LocalAddress = Annotated[str, AfterValidator(check_local_address)]


# `A,B` on the command line and in the environment.
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_list)]


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(split_list)]


JsonObjectText = Annotated[str, BeforeValidator(check_json_object)]


MaxModelLen = Annotated[Literal["auto"] | int, BeforeValidator(read_max_model_len)]


MAX_MODEL_LEN_DESCRIPTION = (
    "Most tokens of a prompt and its completion together: 8192, 8k (8000) or 8K (8192). auto is the model's own "
    "context, of which a request gets what the KV cache holds; a number must fit into both. All workers of a cell have "
    "the same. LongRoPE takes its long factors if it is above the original context."
)


# How a worker proposes draft tokens.
DraftProposerName = Literal["none", "ngram", "mtp", "model"]
