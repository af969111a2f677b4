"""Evaluations with EleutherAI's harness, by its model `local-completions`, on tasks of our own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "tasks"
MAX_DIFFERENCE = 1e-3


def evaluate(cell: Any, task: str, **model_args: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Evaluate a task; returns its metrics, and its samples in order."""
    model = {
        "model": cell.model,
        "base_url": f"{cell.base_url}/completions",
        "tokenizer": cell.model_dir,
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    # The tasks name their data by paths relative to it.
    with contextlib.chdir(TASKS):
        results = lm_eval.simple_evaluate(
            "local-completions", model_args=model | model_args, tasks=[task], task_manager=tasks, bootstrap_iters=0
        )
    assert results is not None
    samples: list[dict[str, Any]] = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return results["results"][task], samples


def assert_close(found: float, expected: float) -> None:
    """Fails if a log-likelihood differs."""
    assert abs(found - expected) <= MAX_DIFFERENCE, (found, expected)


def compare_answers(cell: Any, expected_answers: Any, **model_args: Any) -> None:
    """Fails if the log-likelihood of an answer is not the expected one."""
    metrics, samples = evaluate(cell, "local_questions", **model_args)
    found = [
        (context, continuation, value)
        for sample in samples
        for (context, continuation), [(value, _)] in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    assert [pair[:2] for pair in found] == [tuple(pair[:2]) for pair in expected_answers]
    for pair, expected in zip(found, expected_answers, strict=True):
        assert_close(pair[2], expected[2])
    assert 0 <= metrics["acc,none"] <= 1


def check_log_likelihoods_of_answers(reference: Any, expected_answers: Any) -> None:
    """Each answer has the log-likelihood that `transformers` finds."""
    compare_answers(reference, expected_answers)


def check_log_likelihoods_however_they_are_asked_for(cell: Any, expected_answers: Any) -> None:
    """They are the same in batches, at the same time, and for texts instead of tokens."""
    for sending in ({"batch_size": 8}, {"num_concurrent": 4}, {"tokenized_requests": False}):
        compare_answers(cell, expected_answers, **sending)


def check_log_likelihoods_of_texts(reference: Any, expected_texts: Any) -> None:
    """Each text has the log-likelihood that `transformers` finds."""
    metrics, samples = evaluate(reference, "local_texts")
    found = [(sample["target"], sample["resps"][0][0]) for sample in samples]
    assert [text for text, _ in found] == [text for text, _ in expected_texts]
    for (_, value), (_, expected) in zip(found, expected_texts, strict=True):
        assert_close(value, expected)
    assert metrics["bits_per_byte,none"] > 0


def check_greedy_answers(cell: Any) -> None:
    """Answers that are generated end where the task says, and are the same in any batch."""
    _, one_by_one = evaluate(cell, "local_answers")
    _, together = evaluate(cell, "local_answers", batch_size=4)
    answers = [sample["resps"][0][0] for sample in one_by_one]
    assert any(answers)
    assert not any("\n" in answer for answer in answers)
    assert answers == [sample["resps"][0][0] for sample in together]
