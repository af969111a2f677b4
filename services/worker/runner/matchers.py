"""Makes grammar matchers, even if the tokenizer is unusable."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.worker.sampling.sampling_state import GrammarMatcher
from shared.model_files.model_dir import ModelDirectoryError

if TYPE_CHECKING:
    from services.worker.sampling.grammar import GrammarCompiler

logger = logging.getLogger(__name__)


class GrammarMatchers:
    """Makes matchers for one model; reads its tokenizer for the first one."""

    def __init__(self, model_dir: Path, logits_width: int, eos_token_ids: Sequence[int]) -> None:
        self._model_dir = model_dir
        self._logits_width = logits_width
        self._eos_token_ids = eos_token_ids
        self._compiler: GrammarCompiler | None = None

    def make(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of `grammar`.

        If the tokenizer cannot be read, the matcher only lets the text end: raising would fail the whole step.
        """
        try:
            return self._get_compiler().matcher(grammar)
        except ModelDirectoryError as error:
            logger.error("no grammar can be followed", extra={"error": str(error)})
            return _FailedMatcher(self._logits_width, self._eos_token_ids)

    def _get_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            # Loads the library only in workers that need it.
            from services.worker.sampling.grammar import GrammarCompiler  # noqa: PLC0415

            self._compiler = GrammarCompiler(self._model_dir, self._logits_width, self._eos_token_ids)
        return self._compiler


class _FailedMatcher:
    has_failed = True

    def __init__(self, logits_width: int, eos_token_ids: Sequence[int]) -> None:
        self._mask = np.zeros(logits_width, np.bool_)
        self._mask[list(eos_token_ids)] = True

    def mask(self) -> npt.NDArray[np.bool_]:
        return self._mask

    def advance(self, token_id: int) -> None:
        pass

    def prepare(self) -> None:
        pass
