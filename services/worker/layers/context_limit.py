"""How long the sequences are that a model is loaded for."""

from __future__ import annotations

from dataclasses import dataclass

from shared.model_files.model_dir import ModelDirectoryError


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """A limit on the context of a model."""

    num_tokens: int | None = None
    """None means the model's own context."""
    may_exceed_model: bool = False
    """Whether a model with a shorter context of its own is served with that; otherwise it is refused."""

    def context_of(self, own_length: int) -> int:
        """The context that is served of a model whose own context is `own_length`, in tokens.

        Raises:
            ModelDirectoryError: the model's own context is shorter than the limit.
        """
        if self.num_tokens is None:
            return own_length
        if self.num_tokens > own_length and not self.may_exceed_model:
            raise ModelDirectoryError(
                f"--max-model-len {self.num_tokens} is above the model's own context of {own_length} tokens"
            )
        return min(self.num_tokens, own_length)


NO_LIMIT = ContextLimit()
