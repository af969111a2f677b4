"""How many steps a waiting request may have to wait for others."""

from __future__ import annotations


def max_steps_to_admission(num_ahead: int, context_length: int, token_budget: int, num_save_points: int = 0) -> int:
    """An upper bound on the steps sent between a request turning aged and the step that admits it, for one tenant.

    Let A be the sequences ahead of it, L the context length, and c = ceil(L / B) + s the steps it takes to compute the
    longest prompt with the token budget B if chunks end at s points where states are saved. The bound is
    |A| * L * (2c - 1):

    - While an aged request waits, only aged ones that arrived before it are admitted; others that are preempted are
      queued after it. So every step works for A only. That holds while it waits for a state that a step in flight
      saves, too: nothing passes what has aged, and only a step that works for A saves one.
    - A row is a token that is kept (or several, with drafts), or one wasted by overlap; both count against max_tokens.
      So at most |A| * L steps have a row.
    - A step without a row gives its whole budget to the prompt that began first, which takes at most c - 1 such steps
      before its last chunk, which has a row. In mixed steps a decode that needs its blocks may end it early. Then
      either that step has a row, or every decode is preempted or sits out, and a step with a row comes before another
      prompt can be ended that way. So each step with a row accounts for at most two begun prompts: 2 * (c - 1) steps
      without a row.
    - Once A is gone, all blocks and slots are free, and the request is next.

    It relies on an aged sequence never being preempted for a higher class (`WaitingQueue.is_aged`). When an epoch ends,
    the count starts over. It bounds steps, not time: the steps must return, and the delay gate must be open.

    Args:
        num_ahead: Sequences that held a slot when the request turned aged, plus unfinished ones that arrived before it,
            including those resubmitted later.
        token_budget: `StepBudget.max_prompt_tokens`.
        num_save_points: The most states that are saved while one prompt is computed: one each interval, and two more
            (see `StateSaves`).
    """
    num_chunks = -(-context_length // token_budget) + num_save_points
    return num_ahead * context_length * (2 * num_chunks - 1)
