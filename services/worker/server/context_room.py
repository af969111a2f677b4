"""How much of the context served the KV cache of a group holds: what a first start needs, and what is said of it."""

from __future__ import annotations

import logging
from typing import Protocol

from services.worker.runner.cache_room import CacheRoom

logger = logging.getLogger(__name__)


class _Facts(Protocol):
    @property
    def context_length(self) -> int: ...


class Runner(Protocol):
    """What is asked of a `ModelRunner`."""

    @property
    def facts(self) -> _Facts:
        """What is known of the model."""

    def how_to_hold(self, num_tokens: int) -> str:
        """The setting with which the KV cache would hold so many tokens."""


class ContextRoom:
    """Compares each epoch's room with the context, and says so when it changes.

    A context that the settings name must fit when the cell starts for the first time. Later a group may come back with
    less, since others use a GPU too: then only requests that do not fit end, and the context stays.
    """

    def __init__(self, max_model_len: int | None) -> None:
        """`max_model_len` is the context that the settings name; None if it is the model's own."""
        self._max_model_len = max_model_len
        self._num_tokens: int | None = None
        """The room last compared, in tokens; None before the first."""

    def find_fault(self, runner: Runner, room: CacheRoom, block_size: int, *, is_first_start: bool) -> str | None:
        """Compare the room of an epoch; why the group must not begin with it, if so.

        Args:
            runner: The group's.
            room: What all its processes have.
            block_size: Tokens of a block.
            is_first_start: See `AttachRequest`.
        """
        num_tokens, context = room.num_blocks * block_size, runner.facts.context_length
        before, self._num_tokens = self._num_tokens, num_tokens
        if num_tokens >= context or before == num_tokens:
            return None
        how = runner.how_to_hold(context)
        if self._max_model_len is not None and is_first_start and before is None:
            return (
                f"--max-model-len {context} does not fit: the KV cache holds {num_tokens} tokens, so that is the "
                f"largest; the worker's {how} would hold {context}"
            )
        logger.info(
            "the KV cache holds less than the context",
            extra={"request_tokens": num_tokens, "context_length": context, "whole_context": how},
        )
        return None
