"""The interface of every inference library measured on a CPU, and the loads on it.

Needs only numpy, since the peers' drivers run in separate virtual environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.bench.parts.tokens import PromptSource

_NUM_WARM_UP_TOKENS = 8
# A single request is short, so the best of several is taken.
_NUM_SINGLES = 2


@dataclass(frozen=True, slots=True)
class Loads:
    """What one repeat measures.

    Attributes:
        requests: The numbers of simultaneous requests, each a load.
        num_prompt_tokens: Of each of these requests.
        num_output_tokens: Of each of these requests.
        num_prefill_tokens: The prompt of a further load: one request with one output token. 0 leaves it out.
    """

    requests: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefill_tokens: int = 0

    @property
    def max_num_seqs(self) -> int:
        """The most requests at a time."""
        return max(self.requests)

    @property
    def max_num_tokens(self) -> int:
        """The longest sequence."""
        return max(self.num_prompt_tokens + self.num_output_tokens, self.num_prefill_tokens + 1)


class Engine(Protocol):
    """A library with a model loaded."""

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """Generate exactly this many tokens for each prompt, greedily, starting all at once.

        Returns:
            The seconds that it took, prefill included.
        """


class Generate:
    """Runs loads on engines; of several engines, which are one library with different settings, the best counts.

    Attributes:
        num_tokens: Those of all sequences so far, whose keys and values an engine that reuses no memory has kept.
    """

    def __init__(self, engines: Sequence[Engine], loads: Loads) -> None:
        self._engines = engines
        self._loads = loads
        self.num_tokens = 0
        self._prompts = PromptSource(loads.num_prompt_tokens)
        self._long_prompts = PromptSource(loads.num_prefill_tokens, seed=2)
        self._run(min(_NUM_WARM_UP_TOKENS, loads.num_output_tokens))

    def run(self) -> dict[str, float]:
        """Run every load once; returns output tokens per second by the number of requests, and `prefill_ms`."""
        return self._run(self._loads.num_output_tokens)

    def _run(self, num_output_tokens: int) -> dict[str, float]:
        figures = {
            str(count): count * num_output_tokens / self._best_s(self._prompts, count, num_output_tokens)
            for count in self._loads.requests
        }
        if self._loads.num_prefill_tokens:
            figures["prefill_ms"] = self._best_s(self._long_prompts, 1, 1) * 1e3
        return figures

    def _best_s(self, source: PromptSource, count: int, num_output_tokens: int) -> float:
        num_tries = _NUM_SINGLES if count == 1 else 1
        self.num_tokens += num_tries * count * (source.num_tokens + num_output_tokens)
        return min(
            engine.generate(source.take(count), num_output_tokens) for engine in self._engines for _ in range(num_tries)
        )


def generate_with(
    make_engines: Callable[..., Sequence[Engine]],
) -> Callable[..., Generate]:
    """The scenario of a library: its arguments are `loads` as a dict, and those of `make_engines` after `loads`."""

    def make(*, loads: Mapping[str, Any], **arguments: Any) -> Generate:
        parsed = Loads(**{**loads, "requests": tuple(loads["requests"])})
        return Generate(make_engines(parsed, **arguments), parsed)

    return make
