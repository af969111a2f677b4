"""Log-likelihoods of texts by `transformers`, as an evaluation harness defines them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class LogLikelihoods:
    """A model in `transformers`, in float32."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def of_continuation(self, context: str, continuation: str) -> float:
        """That of a text after a context; its tokens are those that the context's end does not share."""
        whole = self._tokenizer(context + continuation)["input_ids"]
        return self._sum(whole, len(self._tokenizer(context)["input_ids"]))

    def of_text(self, text: str) -> float:
        """That of a whole text, after the token that begins texts."""
        return self._sum([self._tokenizer.bos_token_id, *self._tokenizer(text)["input_ids"]], 1)

    def _sum(self, token_ids: Sequence[int], num_given: int) -> float:
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)
        return sum(float(logprobs[at - 1, token_ids[at]]) for at in range(num_given, len(token_ids)))
