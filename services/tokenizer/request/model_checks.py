"""What a model's files do not allow, found and told at start instead of with each request that it concerns."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from shared.grammar import GrammarLibrary
from shared.model_dir import ModelDirectoryError, eos_token_ids, vocabulary_size

logger = logging.getLogger(__name__)

# Tokens that a log line names.
_MAX_NAMED = 8


def warn_of_unknown_tokens(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Warn where the tokenizer knows tokens that the model has no embedding of.

    Raises:
        ModelDirectoryError: the model's configuration is missing or malformed.
    """
    size = vocabulary_size(model_dir)
    if size is None:
        return
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    unknown = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= size)
    if unknown:
        logger.warning(
            "the tokenizer knows tokens that the model does not: texts and chats that need one are refused",
            extra={
                "vocab_size": size,
                "num_unknown": len(unknown),
                "unknown": ", ".join(f"{token_id} {token}" for token_id, token in unknown[:_MAX_NAMED]),
            },
        )


def can_compile_grammars(model_dir: Path) -> bool:
    """Whether the grammar library knows this kind of tokenizer; a warning says why it does not.

    Raises:
        ModelDirectoryError: an EOS token is one that the model does not know, or a configuration is malformed.
    """
    eos_ids, size = eos_token_ids(model_dir), vocabulary_size(model_dir)
    try:
        GrammarLibrary(model_dir, eos_ids, size)
    except ModelDirectoryError as error:
        logger.warning(
            "no grammar can be compiled for this tokenizer: structured output, and tools that must be called, are "
            "refused",
            extra={"error": str(error)},
        )
        return False
    return True
