"""A scrape over a real socket matches what has happened to the replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.exchange_peer import Row, make_end
from tests.support.tokenizer_service import Service, read_rest, run_tokenizer_service

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS


async def scrape(path: Path) -> dict[str, float]:
    """The replica's samples by name, followed by the value of their label."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    families = text_string_to_metric_families(page.partition("\r\n\r\n")[2])
    samples = [sample for family in families if family.name.startswith("lockstep_") for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


async def answer_after(service: Service, num_resumes: int) -> None:
    """Let a request end after the cell reports this many resumes."""
    call, submit = await service.begin(tokenizer_pb2.GenerateRequest(text="The fox"))
    end = make_end(submit.handle, MAX_TOKENS, 1, num_resumes=num_resumes)
    service.peer.send(Row(submit.handle, 0, [70]), ends=[end])
    await read_rest(call)


async def test_lost_links_and_the_fate_of_their_requests_are_counted(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    async with run_tokenizer_service(
        model_dir, tmp_path, exact_fingerprint="a", metrics_listen=f"unix:{path}"
    ) as service:
        await service.link()
        await answer_after(service, num_resumes=2)
        call, _ = await service.begin(tokenizer_pb2.GenerateRequest(text="The fox"))
        service.peer.cell_info.exact_fingerprint = "b"
        service.peer.end_stream()
        service.peer.attach()
        submit = await service.peer.submits.get()
        service.peer.send(ends=[make_end(submit.handle, MAX_TOKENS, 0, num_resumes=submit.num_earlier_resumes)])
        await read_rest(call)

        assert await scrape(path) == {
            "lockstep_scheduler_linked": 1,
            "lockstep_scheduler_links_lost_total": 1,
            "lockstep_requests_resubmitted_total": 1,
            "lockstep_poison_requests_total": 0,
            "lockstep_resumes_total true": 2,
            "lockstep_resumes_total false": 1,
        }
