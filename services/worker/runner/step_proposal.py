"""What a worker proposes for its steps, where nobody has set it: its device decides how much at once pays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProposal:
    """Most tokens of prompts in a step, and whether decodes are computed with them."""

    num_prompt_tokens: int
    mixes: bool


# A GPU computes so many tokens in a fraction of a second, and no faster with fewer.
_GPU_STEPS = StepProposal(16384, mixes=False)
# A CPU is busy with 512 tokens, which take it as long as a GPU takes for all of the above: whatever is decoded waits
# for a step, so it is a part of each, and none has more.
_CPU_STEPS = StepProposal(512, mixes=True)


def propose_steps(device_type: str) -> StepProposal:
    """What suits a device, named as torch does."""
    return _CPU_STEPS if device_type == "cpu" else _GPU_STEPS
