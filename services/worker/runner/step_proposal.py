"""Step sizes that a worker proposes, depending on its device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProposal:
    """Used when the scheduler has no step sizes configured."""

    num_prompt_tokens: int
    """Most prompt tokens in a step."""
    mixes: bool
    """Whether prompts and decodes share steps."""


# A GPU computes this many tokens in a fraction of a second, at its full throughput.
_GPU_STEPS = StepProposal(16384, mixes=False)
# A CPU takes as long for 512 tokens as a GPU for all of the above, and more at once would not be faster. Decodes wait
# for every step, so each step includes them and stays this small.
_CPU_STEPS = StepProposal(512, mixes=True)


def propose_steps(device_type: str) -> StepProposal:
    """Propose for a torch device type, such as "cpu" or "cuda"."""
    return _CPU_STEPS if device_type == "cpu" else _GPU_STEPS
