"""The tokens that other files of a model's directory add to its tokenizer.json.

The worker has no transformers, but must know the tokens that the tokenizer service has from transformers' classes:
these are the rules of `TokenizersBackend`, in plain Python.

Source: transformers 5.23, `_from_pretrained` in tokenization_utils_base.py and `TokenizersBackend.__init__` in
tokenization_utils_tokenizers.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import itemgetter
from typing import Any

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LIST, _DEPRECATED_LIST = "extra_special_tokens", "additional_special_tokens"
_LISTED = "added_tokens_decoder"

# A field of objects that are tokens.
_TYPE = "__type"
_FLAGS = ("single_word", "lstrip", "rstrip")

# A text, or an object with the fields of the library's `AddedToken`.
_Token = str | dict[str, Any]


def with_added_tokens(
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    special_tokens_map: dict[str, Any],
    added_tokens: dict[str, Any],
) -> dict[str, Any]:
    """The content of a tokenizer.json with all tokens; the same object if it has them.

    Arguments and errors are those of `tokens_to_add`.
    """
    own = tokenizer.get("added_tokens", [])
    merged = _merged(tokenizer, tokens_to_add(own, own, config, special_tokens_map, added_tokens))
    return tokenizer if merged == own else tokenizer | {"added_tokens": merged}


def tokens_to_add(
    own: Sequence[dict[str, Any]],
    present: Sequence[dict[str, Any]],
    config: dict[str, Any],
    special_tokens_map: dict[str, Any],
    added_tokens: dict[str, Any],
) -> list[dict[str, Any]]:
    """The tokens that the files add to a tokenizer, in order, with all fields of tokenizer.json but the id.

    Args:
        own: The added tokens in tokenizer.json.
        present: Those that the tokenizer has already: `own`, or none if its class builds it anew.
        config: The content of tokenizer_config.json. If it lists the added tokens, the next two are not considered.
        special_tokens_map: The content of special_tokens_map.json.
        added_tokens: The content of added_tokens.json: ids by text. Ids are given anew, in their order.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: a content is not as its file must be.
    """
    named, extra = _special_tokens(config, special_tokens_map)
    if _LISTED in config:
        listed = {int(token_id): token for token_id, token in config[_LISTED].items()}
    else:
        special = {_text_of(token) for name, token in named.items() if name in _NAMES}
        # Not those that the map lists under the deprecated name.
        special |= {_text_of(token) for token in extra} if _DEPRECATED_LIST not in special_tokens_map else set()
        listed = {
            token_id: {"content": text, "normalized": text not in special, "special": text in special}
            for text, token_id in added_tokens.items()
        } | {token["id"]: token for token in own}
    tokens: list[_Token] = [token for _, token in sorted(listed.items(), key=itemgetter(0))]
    known = {_text_of(token) for token in (*present, *tokens)}
    tokens += [token for token in (*named.values(), *extra) if _text_of(token) not in known]
    names = {_text_of(token) for token in named.values()}
    return [_complete(token, names) for token in tokens]


def special_token_texts(
    config: dict[str, Any], special_tokens_map: dict[str, Any]
) -> tuple[dict[str, str], Sequence[str]]:
    """The texts of the special tokens by name, such as `bos_token`, and of those without a name.

    Arguments and errors are those of `tokens_to_add`.
    """
    named, extra = _special_tokens(config, special_tokens_map)
    return {name: _text_of(token) for name, token in named.items()}, [_text_of(token) for token in extra]


def _special_tokens(
    config: dict[str, Any], special_tokens_map: dict[str, Any]
) -> tuple[dict[str, _Token], Sequence[_Token]]:
    """The special tokens by name, first those that every model can have, and those without a name."""
    values = dict(config)
    if _LISTED in config:
        special_tokens_map = {}
    if not values.get(_LIST) and _DEPRECATED_LIST in values:
        values[_LIST] = values.pop(_DEPRECATED_LIST)
    extra_by_name: dict[str, _Token] = {}
    if isinstance(values.get(_LIST), dict):
        extra_by_name |= values.pop(_LIST)
    for name, value in special_tokens_map.items():
        if name == _LIST and isinstance(value, dict):
            extra_by_name |= value
        elif name == _LIST and isinstance(value, list):
            values[_LIST] = [*(values.get(_LIST) or ()), *map(_as_special, value)]
        else:
            values[name] = _as_special(value)
    values.setdefault(_LIST, values.get(_DEPRECATED_LIST))
    others = [name for name in values if name.endswith("_token") and name not in _NAMES]
    named = {name: values[name] for name in (*_NAMES, *others) if _is_token(name, values.get(name))}
    if malformed := [name for name in _NAMES if name not in named and values.get(name) is not None]:
        raise TypeError(f"{malformed[0]} is no token")
    named = {name: _typed(token) for name, token in (named | extra_by_name).items()}
    return named, [_typed(token) for token in values[_LIST] or ()]


def _as_special(value: Any) -> Any:
    return value | {_TYPE: "AddedToken", "special": True} if isinstance(value, dict) else value


def _typed(token: _Token) -> _Token:
    """A special token without a type is special, whether it says so or not."""
    return {"special": True, **token} if isinstance(token, dict) and _TYPE not in token else token


def _is_token(name: str, value: object) -> bool:
    """Whether the value of a field of that name is a token: under a name of a model's own, objects can be others."""
    return isinstance(value, str) or (isinstance(value, dict) and (name in _NAMES or _TYPE in value))


def _merged(tokenizer: dict[str, Any], tokens: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json with `tokens`: those that it has are replaced, others get an id."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # pieces and their scores, in the order of their ids
        vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    merged = {token["content"]: token for token in tokenizer.get("added_tokens", ())}
    # As the library gives ids.
    next_id = max([len(vocabulary), *(token["id"] + 1 for token in merged.values())])
    for token in tokens:
        text = token["content"]
        if not text:
            continue
        token_id = merged[text]["id"] if text in merged else vocabulary.get(text, next_id)
        next_id = max(next_id, token_id + 1)
        merged[text] = {"id": token_id, **token}
    return list(merged.values())


def _text_of(token: _Token) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _complete(token: _Token, special: Container[str]) -> dict[str, Any]:
    """A token with all fields of tokenizer.json but its id; mere texts are special tokens, and so are `special`."""
    fields = {"content": token, "special": True} if isinstance(token, str) else token
    is_special = fields.get("special", False) or fields["content"] in special
    flags = {name: fields.get(name, False) for name in _FLAGS}
    normalized = fields.get("normalized", not is_special)
    return {"content": fields["content"], **flags, "normalized": normalized, "special": is_special}
