"""The requests of the serving stages: prompts of random tokens, and how long each answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Below every vocabulary here, also that of the small tokenizer that random weights come with.
_FIRST_TOKEN, _END_TOKEN = 10, 400


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose answer does not end before it has `num_output_tokens`."""

    prompt: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt) + self.num_output_tokens


def draw_requests(count: int, lengths: tuple[int, int], *, seed: int) -> list[Request]:
    """Draw requests; prompts and answers have `lengths[0]` to `lengths[1]` tokens."""
    random = Random(seed)
    return [
        Request(
            [random.randrange(_FIRST_TOKEN, _END_TOKEN) for _ in range(random.randint(*lengths))],
            random.randint(*lengths),
        )
        for _ in range(count)
    ]


def num_output_tokens(requests: Sequence[Request]) -> int:
    """Of all answers."""
    return sum(request.num_output_tokens for request in requests)
