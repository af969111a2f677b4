"""Greedy tokens through all three services against `transformers`' `generate`, on the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.v1 import tokenizer_pb2
from tests.support.cells.cell import Cell
from tests.support.clients.client import Client, chat, chat_request, connect, text_request, token_request

NUM_TOKENS = 32
MAX_LOGIT_GAP = 1e-3
MAX_DIFFERENCES = 2

TEXTS = [
    "Hello",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,",
    "Water boils at 100 degrees Celsius, which is 212 degrees",
    "La capitale de l'Allemagne est",
    "El sol sale por el este y se pone por el",
    "Der schnelle braune Fuchs springt über den",
    "日本の首都は",
    "中国的长城是",
    "Москва — столица",
    "Η πρωτεύουσα της Ελλάδας είναι",  # noqa: RUF001 - it is Greek
    "القاهرة هي عاصمة",
    "Emoji: 😀😃😄 and more 🎉🎊",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "SELECT name, age FROM users WHERE age >",
    '{"name": "Alice", "age": 30, "city":',
    "<html>\n<head>\n<title>Welcome</title>\n</head>\n<body>",
    "import numpy as np\n\ndef softmax(x):\n",
    "fn main() {\n    let v: Vec<i32> = (0..10).collect();\n",
    "The derivative of x^2 is 2x. The derivative of x^3 is",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients:\n- 2 eggs\n- 1 cup of flour\n-",
    "   leading spaces and\ttabs\n\n\nand newlines",
    "Q: What is the largest planet?\nA:",
    "To be, or not to be, that is the question:",
    "Breaking news: scientists have discovered",
    "A",
    "The mitochondria is the powerhouse of the cell. " * 12,
    "In the beginning the Universe was created. This has made a lot of people very angry. " * 25,
    " ".join(str(number) for number in range(400)),
]

CHATS = [
    [("user", "What is the capital of Italy?")],
    [("user", "Write a haiku about autumn.")],
    [("system", "You answer in one word."), ("user", "What colour is the sky?")],
    [("user", "Translate to French: good morning")],
    [("user", "My name is Bob."), ("assistant", "Nice to meet you, Bob!"), ("user", "What is my name?")],
    [("user", "Write a Python function that reverses a string.")],
    [
        ("system", "You are a pirate."),
        ("user", "Hi!"),
        ("assistant", "Arr, matey!"),
        ("user", "Where is the treasure?"),
    ],
    [("user", "¿Cuál es la capital de España? 🇪🇸")],
    [("user", "Explain gravity to a child."), ("assistant", "Things fall down."), ("user", "Why?")],
    [("user", "List three fruits.\n\nUse bullets.")],
]


class Reference:
    """The real model in `transformers`, float32."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def generate(self, prompt: list[int]) -> list[int]:
        """The greedy completion, including the end-of-sequence token."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
            )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def is_greedy(self, prompt: list[int], completion: list[int]) -> bool:
        """Whether `generate` would return this completion, checked in one forward pass."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        is_whole = len(completion) == NUM_TOKENS or completion[-1] == self.tokenizer.eos_token_id
        best: list[int] = logits.argmax(-1).tolist()
        return is_whole and best == completion

    def best_two(self, prefix: list[int]) -> tuple[list[int], float]:
        """The two likeliest next tokens and the gap between their logits."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prefix])).logits[0, -1]
        best = logits.topk(2)
        return best.indices.tolist(), float(best.values[0] - best.values[1])


@pytest.fixture(scope="module")
def reference(float32_model: Path) -> Iterator[Reference]:
    num_threads = torch.get_num_threads()
    # Threads that spin while waiting for each other take cores from parallel tests.
    torch.set_num_threads(1)
    yield Reference(float32_model)
    torch.set_num_threads(num_threads)


async def count_differences(client: Client, reference: Reference, prompt: list[int], ours: list[int]) -> int:
    """Count differences to the reference, continuing from its tokens after each tie; any other difference fails."""
    expected = reference.generate(prompt)
    done, num_differences = 0, 0
    while ours != expected[done:]:
        rest = expected[done:]
        at = next(i for i, (a, b) in enumerate(zip([*ours, None], [*rest, None], strict=False)) if a != b)
        prefix = prompt + expected[: done + at]
        best, gap = reference.best_two(prefix)
        assert gap < MAX_LOGIT_GAP, f"after {len(prefix)} tokens: ours {ours[at : at + 1]}, two best {best}, gap {gap}"
        assert ours[at] in best
        num_differences += 1
        done += at + 1
        if done == len(expected):
            break
        request = token_request(prompt + expected[:done], max_tokens=len(expected) - done)
        ours = (await client.generate(request)).token_ids
    return num_differences


# `generate` takes seconds per prompt, so it runs for the first; for all others one pass checks the result.
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.proof)])
async def test_greedy_tokens_equal_those_of_generate(real_cell: Cell, reference: Reference, every: int) -> None:
    async with connect(real_cell) as client:
        prompts = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
        prompts += [render(reference, messages) for messages in CHATS]
        requests = [text_request(text, max_tokens=NUM_TOKENS) for text in TEXTS]
        requests += [chat_request(*messages, max_tokens=NUM_TOKENS) for messages in CHATS]
        completions = await client.generate_all(requests[::every])
        num_differences = 0
        for number, (prompt, completion) in enumerate(zip(prompts[::every], completions, strict=True)):
            assert completion.accepted.num_prompt_tokens == len(prompt)
            if number and reference.is_greedy(prompt, completion.token_ids):
                continue
            num_differences += await count_differences(client, reference, prompt, completion.token_ids)
    assert len(completions) >= 40 / every
    assert num_differences <= MAX_DIFFERENCES


async def test_prompts_are_encoded_as_by_transformers(real_cell: Cell, reference: Reference) -> None:
    async with connect(real_cell) as client:
        for text in TEXTS:
            response = await client.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
            assert list(response.token_ids) == reference.tokenizer(text)["input_ids"]
            request = tokenizer_pb2.DetokenizeRequest(token_ids=response.token_ids)
            assert (await client.tokenizer.Detokenize(request)).text == text
        for messages in CHATS:
            rendered = await client.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat(*messages)))
            assert list(rendered.token_ids) == render(reference, messages)


def render(reference: Reference, messages: list[tuple[str, str]]) -> list[int]:
    as_dicts: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
    encoded = reference.tokenizer.apply_chat_template(as_dicts, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
