"""What a GGUF file's publisher recommends for sampling: in the file, or else on the model's card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.worker.weights.gguf_import.publisher_sampling import publisher_sampling

SMOLLM2 = {"general.organization": "HuggingFaceTB", "general.basename": "smollm2", "tokenizer.chat_template": "x"}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        (SMOLLM2, {"do_sample": True, "temperature": 0.2, "top_p": 0.9}),
        # A base model has no template, and its card recommends nothing.
        ({"general.organization": "HuggingFaceTB", "general.basename": "smollm2"}, {}),
        ({**SMOLLM2, "general.organization": "Somebody"}, {}),
        (
            {
                "general.sampling.temp": float(np.float32(0.7)),
                "general.sampling.top_p": float(np.float32(0.8)),
                "general.sampling.top_k": 20,
                "general.sampling.min_p": 0.0,
                "general.sampling.penalty_repeat": float(np.float32(1.05)),
            },
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "min_p": 0.0,
                "repetition_penalty": 1.05,
            },
        ),
        # What the file says comes first, and as a whole.
        ({**SMOLLM2, "general.sampling.temp": 0.0}, {"do_sample": False, "temperature": 0.0}),
    ],
)
def test_the_file_comes_before_the_card(metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    assert publisher_sampling(metadata) == expected
