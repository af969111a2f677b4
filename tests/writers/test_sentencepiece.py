"""What llama.cpp's converter writes of SentencePiece's vocabularies with tokens of a publisher's own, such as runs of
spaces: texts have the ids that llama.cpp's library gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.worker.weights.gguf_import.conversion import convert
from shared.model_files.model_dir import TOKENIZER, TOKENIZER_CONFIG
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.writers.jobs import run_jobs
from tests.support.writers.llama_cpp import call_library, run_converter

pytestmark = pytest.mark.writers

SPACE = "\u2581"
VOCABULARY_SIZE = 330
# Runs of all lengths, as Gemma's; of some, as code models'; and of lengths that no two shorter runs make.
RUNS = {"all": range(2, 32), "powers": (2, 4, 8, 16), "gaps": (3, 7, 12)}
SYMBOLS = ["<b>", "</b>", "[tool]", "==", "\n\n", "\t\t"]
WORDS = ["hello", "world", "def", "return", "a", "b", "naïve", "x", "if", "for"]
PIECES = [*WORDS, *SYMBOLS, *(" " * length for length in range(1, 10)), "\n", "\t", "=", "é", "0", "你"]


@dataclass(frozen=True)
class Case:
    """A vocabulary.

    Attributes:
        architecture: The model's: Gemma's has no space before a text.
        runs: The lengths of its runs, by name.
        listed: Whether tokenizer_config.json has its tokens, which the converter then writes with spaces.
    """

    architecture: str
    runs: str
    listed: bool

    def __str__(self) -> str:
        return f"{self.architecture}-{self.runs}-{'listed' if self.listed else 'unlisted'}"

    @property
    def symbols(self) -> list[str]:
        return [*(SPACE * length for length in RUNS[self.runs]), *SYMBOLS]

    @property
    def has_prefix(self) -> bool:
        return self.architecture == "LlamaForCausalLM"


CASES = [
    Case(architecture, runs, listed)
    for architecture in ("LlamaForCausalLM", "Gemma3ForCausalLM")
    for runs in RUNS
    for listed in (True, False)
]


def trainer_options(case: Case) -> dict[str, Any]:
    draw = Random(1)
    return {
        "corpus": [" ".join(draw.choices(WORDS, k=12)) for _ in range(400)],
        "user_defined_symbols": case.symbols,
        "vocab_size": VOCABULARY_SIZE,
        "byte_fallback": True,
        "add_dummy_prefix": case.has_prefix,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "minloglevel": 5,
    }


def write_checkpoint(case: Case, directory: Path, model: bytes) -> None:
    [values, *_] = SMALL_CONFIGS[case.architecture].values()
    more = {} if case.has_prefix else {"query_pre_attn_scalar": values["head_dim"]}
    values = {**values, **more, "vocab_size": VOCABULARY_SIZE}
    write_small_model(build_model(case.architecture, values), directory)
    (directory / TOKENIZER).unlink()
    (directory / "tokenizer.model").write_bytes(model)
    # After <unk>, <s> and </s>.
    listed = {str(number): {"content": text, "special": False} for number, text in enumerate(case.symbols, start=3)}
    config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": listed if case.listed else {}}
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(config))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Case, Path]:
    """The converter's file of every case."""
    directory = tmp_path_factory.mktemp("vocabularies")
    models = {case: directory / f"{case}.model" for case in CASES}
    trained = run_jobs(
        "writers/llama_cpp", "vocabulary.py", [(path, None, trainer_options(case)) for case, path in models.items()]
    )
    assert trained == [None] * len(CASES)
    for case, model in models.items():
        write_checkpoint(case, directory / str(case), model.read_bytes())
    paths = {case: directory / f"{case}.gguf" for case in CASES}
    assert run_converter([(directory / str(case), path, []) for case, path in paths.items()]) == [None] * len(CASES)
    return paths


def make_texts(case: Case) -> list[str]:
    draw = Random(1)
    runs = [each * length for each in (" ", "\n", "\t") for length in range(1, 100)]
    around = [f"{start}{' ' * length}{end}" for start in ("a", "") for end in ("b", "") for length in range(1, 40)]
    texts = [*runs, *around, *("".join(draw.choices(PIECES, k=draw.randrange(1, 30))) for _ in range(500))]
    # The file then says of no symbol that it is one. llama.cpp merges some of characters that are no pieces, which
    # tokenizer.json cannot say; SentencePiece finds all.
    return texts if case.listed else [text for text in texts if not set(text) & set("=\n\t")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_have_llama_cpps_ids(files: Mapping[Case, Path], case: Case, tmp_path: Path) -> None:
    convert(files[case], tmp_path / "model")
    tokenizer, texts = Tokenizer.from_file(str(tmp_path / "model" / TOKENIZER)), make_texts(case)
    theirs = call_library("tokens", str(files[case]), text=json.dumps(texts))
    ours = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []
