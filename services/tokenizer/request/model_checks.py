"""Startup checks, for what would otherwise fail each request that needs it."""

from __future__ import annotations

import logging
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.text.vocabulary import Vocabulary
from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError, eos_token_ids, vocabulary_size
from shared.request.grammar import load_tokens

logger = logging.getLogger(__name__)

# The most tokens that one log line names.
_MAX_NAMED = 8


def warn_of_unknown_tokens(vocabulary: Vocabulary, model_dir: Path) -> None:
    """Warn of tokens that the model has no embedding for.

    Raises:
        ModelDirectoryError: the configuration is missing or malformed.
    """
    size = vocabulary_size(model_dir)
    if size is None:
        return
    unknown = sorted((token_id, token) for token, token_id in vocabulary.token_to_id.items() if token_id >= size)
    if unknown:
        logger.warning(
            "the tokenizer has tokens that the model does not: prompts that contain one are refused",
            extra={
                "vocab_size": size,
                "num_unknown": len(unknown),
                "unknown": ", ".join(f"{token_id} {token}" for token_id, token in unknown[:_MAX_NAMED]),
            },
        )


def can_compile_grammars(model: ModelTokenizer) -> bool:
    """Whether the library supports this kind of tokenizer; if not, a warning says why.

    Args:
        model: Has the tokenizer with which prompts are encoded, which grammars must agree with.

    Raises:
        ModelDirectoryError: an EOS token is outside the vocabulary, or a configuration is malformed.
    """
    model_dir = model.files.model_dir
    eos_ids, size = eos_token_ids(model_dir), vocabulary_size(model_dir)
    try:
        _check_tokens(model.backend, load_tokens(model.files, eos_ids, size))
    except ModelDirectoryError as error:
        logger.warning(
            "grammars cannot be compiled for this tokenizer: requests with structured output or with required tool "
            "calls are refused",
            extra={"error": str(error)},
        )
        return False
    return True


def _check_tokens(tokenizer: Tokenizer, tokens: LLTokenizer) -> None:
    """Check that no added token is another one in grammars: the tokenizer's class can number them anew.

    Those that are only its own do no harm, since grammars never allow them.
    """
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        text = tokens.decode_bytes([token_id]).decode(errors="replace")
        if text not in (token.content, f"<[{token_id}]>"):
            raise ModelDirectoryError(
                f"token {token_id} is {token.content} by the tokenizer's class, but {text} by {TOKENIZER}"
            )
