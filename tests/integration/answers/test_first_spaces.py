"""Through real services, an answer is what its tokens add to the prompt, on a tokenizer of Llama 2's kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.v1 import tokenizer_pb2
from shared.model_files.model_dir import TOKENIZER
from tests.support.cells.cell import REFERENCE
from tests.support.cells.split_cell import run_split_cell
from tests.support.clients.client import connect
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.tokenizer.many_tokenizers import llama_2_decoder, with_byte_tokens

PIECES = ["▁", "▁yes", "▁no", "y", "es", "▁blue", "."]


@pytest.mark.slow
async def test_the_first_space_is_kept(tmp_path: Path) -> None:
    model_dir = tmp_path / "llama-2"
    write_tiny_llama(model_dir, changes={"num_hidden_layers": 2})
    tokenizer = with_byte_tokens(llama_2_decoder(), PIECES)
    tokenizer.save(str(model_dir / TOKENIZER))
    texts = [" yes", " no", "yes"]
    sampling = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 8}
    request = tokenizer_pb2.GenerateRequest(
        text="The sky is", structured_output={"choices": {"texts": texts}}, sampling=sampling
    )
    with run_split_cell(model_dir, REFERENCE) as cell:
        await cell.wait_until_serving("tokenizer")
        async with connect(cell) as client:
            chosen = (await client.generate_choices(request)).texts
            request.echo = True
            echoed = (await client.generate_choices(request)).texts
            whole = await client.tokenizer.Complete(tokenizer_pb2.CompleteRequest(request=request))
            request.stop.append(" ")
            stopped = (await client.generate_choices(request)).texts
    assert set(chosen) <= set(texts)
    assert any(text.startswith(" ") for text in chosen)
    assert echoed == ["The sky is" + text for text in chosen]
    assert [choice.text for choice in whole.choices] == echoed
    assert stopped == ["The sky is" + ("" if text.startswith(" ") else text) for text in chosen]
