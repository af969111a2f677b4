"""The demo's model says something to whoever greets it, with the sampling that `make run` gives it.

Sets of instructions round differently, and so do ranks that share a layer: an answer that ends with one set may not end
with another.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.worker.ops.native.isa import available_isas
from tests.support.cells.cell import start_cell
from tests.support.system.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]

GREETINGS = ("Say hi to me", "Hello", "Hi there!")
MAX_TOKENS = 256


# Every set of instructions that this machine has, and three ranks with the best: the model has nine heads.
CELLS = [
    *(pytest.param((f"--worker.native-isa={isa.value}",), id=isa.value) for isa in available_isas()),
    pytest.param(("--tp=3", "--worker.num-threads=1"), id="three ranks"),
]


@pytest.mark.parametrize("flags", CELLS)
def test_a_greeting_gets_an_answer_with_an_end(real_model: Path, flags: tuple[str, ...]) -> None:
    found = re.search(r"--override-generation-config='(.*)'", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    sampling = f"--override-generation-config={found[1]}"
    with start_cell(real_model, sampling, *flags) as cell, cell.stub() as stub:
        for greeting in GREETINGS:
            message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=greeting)
            request = tokenizer_pb2.GenerateRequest(
                chat=tokenizer_pb2.Chat(messages=[message]), sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS)
            )
            [choice] = stub.Complete(tokenizer_pb2.CompleteRequest(request=request)).choices
            assert choice.finish.reason == common_pb2.FINISH_REASON_EOS, choice.text
            assert len(re.findall("[a-z]{2,}", choice.text.lower())) > 2, choice.text
