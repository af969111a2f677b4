"""What a step costs on the wire."""

from __future__ import annotations

import pytest

from lockstep.internal.v1 import worker_pb2
from services.scheduler.batch import StepKind
from services.scheduler.worker_client import decode_result, encode_step
from tests.support.engine_driver import EngineDriver


def test_a_pure_decode_step_of_32_rows_is_a_few_bytes() -> None:
    driver = EngineDriver(num_blocks=200)
    for handle in range(32):
        driver.submit(handle, [handle, 1, 2], max_tokens=60)
    sizes = []
    while driver.sent:
        step = driver.sent[0]
        batch = step.batch
        if batch.kind is StepKind.DECODE and len(batch.row_slots) == 32 and not batch.append_slots.size:
            sizes.append(encode_step(step).ByteSize())
        driver.step()
    assert len(sizes) > 20
    # Epoch, step id and kind: no token, no table, no row travels again.
    assert max(sizes) == 6


def test_a_block_that_opens_costs_eight_bytes_and_two_headers() -> None:
    driver = EngineDriver()
    driver.submit(1, list(range(16)), max_tokens=3)
    driver.step()
    message = encode_step(driver.sent[0])
    assert (len(message.append_slots), len(message.append_block_ids)) == (4, 4)
    assert message.ByteSize() == 6 + 2 * (2 + 4)


def test_a_result_with_a_torn_column_is_no_result() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        decode_result(worker_pb2.StepResult(epoch=1, step_id=1, token_ids=b"\0\0\0"))
