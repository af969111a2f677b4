"""Startup checks, for what would otherwise fail each request that needs it."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from shared.grammar import GrammarLibrary
from shared.model_dir import ModelDirectoryError, eos_token_ids, vocabulary_size

logger = logging.getLogger(__name__)

# The most tokens that one log line names.
_MAX_NAMED = 8


def warn_of_unknown_tokens(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Warn of tokens that the model has no embedding for.

    Raises:
        ModelDirectoryError: the configuration is missing or malformed.
    """
    size = vocabulary_size(model_dir)
    if size is None:
        return
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    unknown = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= size)
    if unknown:
        logger.warning(
            "the tokenizer has tokens that the model does not: prompts that contain one are refused",
            extra={
                "vocab_size": size,
                "num_unknown": len(unknown),
                "unknown": ", ".join(f"{token_id} {token}" for token_id, token in unknown[:_MAX_NAMED]),
            },
        )


def can_compile_grammars(model_dir: Path) -> bool:
    """Whether the library supports this kind of tokenizer; if not, a warning says why.

    Raises:
        ModelDirectoryError: an EOS token is outside the vocabulary, or a configuration is malformed.
    """
    eos_ids, size = eos_token_ids(model_dir), vocabulary_size(model_dir)
    try:
        GrammarLibrary(model_dir, eos_ids, size)
    except ModelDirectoryError as error:
        logger.warning(
            "grammars cannot be compiled for this tokenizer: requests with structured output or with required tool "
            "calls are refused",
            extra={"error": str(error)},
        )
        return False
    return True
