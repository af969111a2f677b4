"""What reading messages costs, each in its own process: `python -m tests.support.clients.message_costs SIZE EVERY`.

Prints a JSON list: for every `EVERY`th message of `SIZE` bytes its name, the peak bytes that parsing it takes and that
reading it takes, and the CPU seconds for half its size and for all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from services.scheduler.server.direct_clients import resolve_request
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.request.checks import check_request
from services.tokenizer.text_size import check_text
from shared.errors import ServiceError
from shared.ids import RequestHandle
from shared.network.field_counts import check_num_fields
from shared.network.message_reader import MAX_UNCOUNTED_BYTES
from shared.request.limits import ModelLimits
from tests.support.clients.many_fields import Make, many, methods
from tests.support.tokenizer.body_costs import measured

# As a large model's.
LIMITS = ModelLimits(context_length=1_000_000, logits_width=150_000, num_pool_tokens=1_000_000)
_check = partial(check_request, model_name="m", limits=LIMITS)
# What is done with a message before it waits for anything; by the method's name.
CHECKS: dict[str, Callable[[Any], object]] = {
    "/lockstep.v1.TokenizerService/Generate": _check,
    "/lockstep.v1.TokenizerService/Complete": lambda message: _check(message.request),
    "/lockstep.v1.TokenizerService/RenderChat": lambda message: check_chat(message.chat),
    "/lockstep.v1.TokenizerService/Tokenize": lambda message: check_text(message.text),
    "/lockstep.v1.SchedulerService/Generate": lambda message: resolve_request(RequestHandle(1), message, LIMITS),
}


def all_messages() -> list[tuple[str, Descriptor, str, Make]]:
    """A method, its message, what that has many of, and what makes such a message."""
    return [(method, kind, *each) for method, kind in methods().items() for each in many(kind)]


def read(method: str, kind: Descriptor, data: bytes) -> None:
    """Count, parse and check a message, as the services do."""
    try:
        if len(data) > MAX_UNCOUNTED_BYTES:
            check_num_fields(data, kind)
        message = GetMessageClass(kind).FromString(data)
        CHECKS.get(method, lambda _: None)(message)
    except ServiceError:
        return


def main(size: int, every: int) -> None:
    """Measure, and print."""
    sampled = all_messages()[::every]
    sys.stdout.write(json.dumps([_costs(*each, size) for each in sampled]))


def _costs(method: str, kind: Descriptor, name: str, make: Make, size: int) -> dict[str, Any]:
    half, whole = make(size // 2), make(size)
    parsed, _ = measured(lambda: GetMessageClass(kind).FromString(whole))
    # What disturbs a measurement disturbs one of them.
    taken = [measured(lambda: read(method, kind, whole)) for _ in range(2)]
    half_s = max(measured(lambda: read(method, kind, half))[1] for _ in range(2))
    whole_s = min(cpu_s for _, cpu_s in taken)
    return {"name": f"{method}: {name}", "parsed": parsed, "read": taken[0][0], "half_s": half_s, "whole_s": whole_s}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
