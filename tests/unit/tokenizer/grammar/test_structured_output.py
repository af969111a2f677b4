"""Grammars are tried in separate processes: their limits, and the errors for refused grammars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.grammar import structured_output
from services.tokenizer.grammar.grammar_child import TrialLimits
from services.tokenizer.grammar.grammar_source import FormOptions
from services.tokenizer.grammar.structured_output import CompiledForm, FormCompiler
from shared.errors import InvalidRequestError, QueueFullError, Violation
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import module_environment, running_children

MIB = 2**20
LIMITS = TrialLimits(cpu_s=2.0, memory_bytes=1024 * MIB)
YES_NO = tokenizer_pb2.StructuredOutput(grammar='start: "yes" | "no"')
# Takes ten seconds and 400 MiB.
EXPENSIVE = tokenizer_pb2.StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}')
# An orphan must not outlive its parent, whatever it is doing.
PARENT = """
import asyncio, sys
from pathlib import Path
from lockstep.v1 import tokenizer_pb2
from services.tokenizer.grammar.grammar_child import TrialLimits
from services.tokenizer.grammar.structured_output import FormCompiler

async def main():
    compiler = FormCompiler(Path(sys.argv[1]), TrialLimits(60.0, 2**30))
    await compiler.compile(tokenizer_pb2.StructuredOutput(grammar='start: "a"'))
    form = tokenizer_pb2.StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}')
    trial = asyncio.create_task(compiler.compile(form))
    await asyncio.sleep(0)
    print("busy", flush=True)
    await trial

asyncio.run(main())
"""

Form = tokenizer_pb2.StructuredOutput


@contextmanager
def compiler_for(model_dir: Path, limits: TrialLimits = LIMITS) -> Iterator[FormCompiler]:
    """The compiler of forms for the model in a directory."""
    compiler = FormCompiler(model_dir, limits)
    try:
        yield compiler
    finally:
        compiler.close()


def children() -> list[psutil.Process]:
    """The processes that try grammars."""
    return list(running_children())


def wait_for_end(child: psutil.Process) -> None:
    """Wait until a process has ended, and leave it to the event loop to reap it."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def pass_time(monkeypatch: pytest.MonkeyPatch, passed_s: float) -> None:
    """Advance the event loop's clock."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed_s)


async def violation_of(compiler: FormCompiler, form: Form, *, field: str = "structured_output") -> Violation:
    """The violation with which a form is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        await compiler.compile(form, field=field)
    (violation,) = caught.value.violations
    return violation


@pytest.mark.parametrize(
    "form",
    [
        Form(json_schema='{"type": "integer"}'),
        Form(regex="[a-z]+"),
        YES_NO,
        Form(grammar='root ::= "yes" | "no"'),
        Form(grammar="start: <|im_start|> /[a-z]*/ <|im_end|>"),
        Form(choices=Form.Choices(texts=["a", "ab"])),
        Form(choices=Form.Choices(texts=["<|im_end|>", "<|im_start|>x"])),
        Form(json_object=True),
    ],
    ids=lambda form: form.WhichOneof("form"),
)
async def test_a_form_becomes_a_grammar(model_dir: Path, form: Form) -> None:
    with compiler_for(model_dir) as compiler:
        grammar = (await compiler.compile(form)).grammar
        assert len(grammar) > 10
        assert (await compiler.compile(form)).grammar == grammar


@pytest.mark.parametrize(
    ("form", "field", "reason", "text"),
    [
        (Form(), "", "OUT_OF_RANGE", "one of json_schema, regex, grammar, choices and json_object"),
        (Form(json_object=False), ".json_object", "OUT_OF_RANGE", "true"),
        (Form(regex=""), ".regex", "OUT_OF_RANGE", "empty"),
        (Form(choices=Form.Choices()), ".choices", "OUT_OF_RANGE", "1 to 1024 texts"),
        (Form(choices=Form.Choices(texts=["a", ""])), ".choices", "OUT_OF_RANGE", "none of them empty"),
        (Form(choices=Form.Choices(texts=["a"] * 1025)), ".choices", "OUT_OF_RANGE", "1 to 1024"),
        (Form(json_schema=" " * (512 * 1024 + 1)), ".json_schema", "OUT_OF_RANGE", "at most 524288 bytes"),
        (Form(grammar="start: other"), ".grammar", "GRAMMAR_INVALID", 'unknown name: "…"'),
        (Form(grammar='start: "a"\nb: "c'), ".grammar", "GRAMMAR_INVALID", "line 2, column 6: lexer error"),
        (
            Form(grammar="start: a\na: <think>"),
            ".grammar",
            "GRAMMAR_INVALID",
            "line 2, column 4: unknown special token",
        ),
        (
            Form(regex="a(?=b)"),
            ".regex",
            "GRAMMAR_INVALID",
            "look-around, including look-ahead and look-behind, is not",
        ),
        (Form(grammar='start: s\ns: s s | "a"'), ".grammar", "GRAMMAR_TOO_COMPLEX", "items"),
    ],
)
async def test_an_unsupported_form_is_refused_with_the_reason(
    model_dir: Path, form: Form, field: str, reason: str, text: str
) -> None:
    with compiler_for(model_dir) as compiler:
        violation = await violation_of(compiler, form)
    assert (violation.field, violation.reason) == (f"structured_output{field}", reason)
    assert text in violation.description


async def test_an_error_about_a_grammar_is_bounded_in_length(model_dir: Path) -> None:
    with compiler_for(model_dir) as compiler:
        violation = await violation_of(compiler, Form(grammar="start: " + "y-" * 5_000))
        reference = await violation_of(compiler, Form(json_schema=json.dumps({"$ref": "#/" + "y-" * 5_000})))
        name = await violation_of(compiler, Form(json_schema=json.dumps({"properties": {"y-" * 5_000: {"type": "x"}}})))
    assert violation.reason == "GRAMMAR_INVALID"
    assert len(violation.description) == 500
    assert reference.description == "a reference leads nowhere, at #"
    assert len(name.description) < 300


@pytest.mark.parametrize(
    ("schema", "description"),
    [
        ({"properties": {"limit": {"type": "text"}}}, "Invalid type: …, at #/properties/limit"),
        ({"properties": {"address": {"not": {}}}}, '"not" is not supported, at #/properties/address/not'),
        ({"items": {"pattern": "(?=secret)"}}, "look-ahead is not supported, at character 1, at #/items/pattern"),
    ],
)
async def test_a_refused_schema_is_reported_with_the_place_and_nothing_of_our_grammar(
    model_dir: Path, schema: object, description: str
) -> None:
    with compiler_for(model_dir) as compiler:
        violation = await violation_of(compiler, Form(json_schema=json.dumps(schema)))
    assert violation == Violation("structured_output.json_schema", "GRAMMAR_INVALID", description)


async def test_what_a_form_does_not_hold_is_told_unless_it_is_strict(model_dir: Path) -> None:
    form = Form(json_schema='{"items": {"uniqueItems": true, "type": "array"}}')
    relaxed = FormOptions(is_strict=False)
    with compiler_for(model_dir) as compiler:
        for _ in range(2):
            assert (await compiler.compile(form, options=relaxed)).not_held == ("#/items/uniqueItems",)
            assert (await violation_of(compiler, form)).reason == "GRAMMAR_INVALID"
        assert (await compiler.compile(YES_NO, options=relaxed)).not_held == ()
        many = {"anyOf": [{"not": {"const": number}} for number in range(200)]}
        assert len((await compiler.compile(Form(json_schema=json.dumps(many)), options=relaxed)).not_held) == 100


async def test_compact_json_is_another_grammar(model_dir: Path) -> None:
    form = Form(json_object=True)
    with compiler_for(model_dir) as compiler:
        compact = await compiler.compile(form, options=FormOptions(is_compact=True))
        assert compact != await compiler.compile(form)


async def test_a_grammar_of_our_own_is_refused_about_what_it_was_made_for(model_dir: Path) -> None:
    with compiler_for(model_dir) as compiler:
        assert (await compiler.compile_reply('start: "a"', field="chat.tools")).grammar == 'start: "a"'
        with pytest.raises(InvalidRequestError) as caught:
            await compiler.compile_reply('start: %json {"type": "text"}', field="chat.tools")
    assert caught.value.violations == (Violation("chat.tools", "GRAMMAR_INVALID", "Invalid type: …"),)


async def test_a_violation_names_the_given_field(model_dir: Path) -> None:
    with compiler_for(model_dir) as compiler:
        violation = await violation_of(compiler, Form(grammar="?"), field="chat.tools[1]")
    assert violation.field == "chat.tools[1].grammar"


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (TrialLimits(cpu_s=0.2, memory_bytes=1024 * MIB), "0.2 s of CPU time"),
        (TrialLimits(cpu_s=60.0, memory_bytes=256 * MIB), "256 MiB of memory"),
    ],
)
async def test_a_grammar_that_costs_too_much_is_abandoned_and_the_next_one_compiles(
    model_dir: Path, limits: TrialLimits, text: str
) -> None:
    with compiler_for(model_dir, limits) as compiler:
        violation = await violation_of(compiler, EXPENSIVE)
        assert violation.reason == "GRAMMAR_TOO_COMPLEX"
        assert text in violation.description
        # The time to start a new process does not count.
        assert "yes" in (await compiler.compile(YES_NO)).grammar


async def test_concurrent_hostile_grammars_do_not_affect_others(model_dir: Path) -> None:
    hostile = [Form(grammar=f'start: s "{number}"\ns: s s | "a"') for number in range(4)]
    hostile += [
        Form(json_schema=f'{{"type": "integer", "multipleOf": 999983, "title": "{number}"}}') for number in range(4)
    ]
    hostile += [Form(regex="(" * number) for number in range(1, 30)]
    good = [Form(regex=f"good{number}") for number in range(20)]
    with compiler_for(model_dir, TrialLimits(cpu_s=0.3, memory_bytes=1024 * MIB)) as compiler:
        refused = asyncio.gather(*(violation_of(compiler, form) for form in hostile))
        grammars = await asyncio.gather(*(compiler.compile(form) for form in good))
        assert all(f"good{number}" in form.grammar for number, form in enumerate(grammars))
        reasons = [violation.reason for violation in await refused]
    assert reasons == ["GRAMMAR_TOO_COMPLEX"] * 8 + ["GRAMMAR_INVALID"] * 29


async def test_a_form_is_tried_only_once(model_dir: Path) -> None:
    bad = Form(regex="(")
    with compiler_for(model_dir) as compiler:
        grammar, violation = await compiler.compile(YES_NO), await violation_of(compiler, bad)
    # There are no processes left to try anything.
    assert await compiler.compile(YES_NO) == grammar
    assert await violation_of(compiler, bad) == violation


def test_a_process_without_cpu_time_has_a_minute_and_its_grammar_may_be_tried_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = children()

    async def try_without_processor(compiler: FormCompiler) -> None:
        await compiler.compile(YES_NO)
        (child,) = [child for child in children() if child not in others]
        # As on a machine that is busy with other work.
        child.suspend()
        trial = asyncio.ensure_future(compiler.compile(Form(regex="[a-c]")))
        await asyncio.sleep(0)
        pass_time(monkeypatch, 30.0)
        await asyncio.sleep(0)
        child.resume()
        assert "[a-c]" in (await trial).grammar
        child.suspend()
        refused = asyncio.ensure_future(violation_of(compiler, Form(regex="[d-f]")))
        await asyncio.sleep(0)
        pass_time(monkeypatch, 61.0)
        assert (await refused).description == "it takes more than 60 s"
        assert "[d-f]" in (await compiler.compile(Form(regex="[d-f]"))).grammar

    # Not uvloop, whose clock cannot be patched.
    with compiler_for(model_dir) as compiler, asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(try_without_processor(compiler))


async def test_forgotten_forms_are_compiled_again(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_MAX_REMEMBERED", 2)
    with compiler_for(model_dir) as compiler:
        for _ in range(2):
            for letter in "abcd":
                assert f"/{letter}/" in (await compiler.compile(Form(regex=letter))).grammar
    assert len(compiler._outcomes._key_to_outcome) == 2


async def test_requests_beyond_the_queue_limit_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_MAX_WAITING", 3)
    with compiler_for(model_dir) as compiler:
        trials = [asyncio.ensure_future(compiler.compile(Form(regex=f"r{number}"))) for number in range(10)]
        results = await asyncio.gather(*trials, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        # Two are being tried, three are waiting.
        assert len(refused) == 5
        assert all(error.retry_delay_s for error in refused)
        assert sum(isinstance(result, CompiledForm) for result in results) == 5
        assert "yes" in (await compiler.compile(YES_NO)).grammar


async def test_a_cancelled_request_ends_its_process(model_dir: Path) -> None:
    others = children()
    with compiler_for(model_dir, TrialLimits(cpu_s=60.0, memory_bytes=1024 * MIB)) as compiler:
        await compiler.compile(YES_NO)
        (child,) = [child for child in children() if child not in others]
        trial = asyncio.ensure_future(compiler.compile(EXPENSIVE))
        await asyncio.sleep(0)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        await asyncio.to_thread(wait_for_end, child)
        assert "b" in (await compiler.compile(Form(regex="b"))).grammar


async def test_a_process_killed_while_idle_is_replaced(model_dir: Path) -> None:
    others = children()
    with compiler_for(model_dir) as compiler:
        await compiler.compile(YES_NO)
        (child,) = [child for child in children() if child not in others]
        child.kill()
        await asyncio.to_thread(wait_for_end, child)
        assert "b" in (await compiler.compile(Form(regex="b"))).grammar


async def test_processes_are_started_when_needed_and_kept(model_dir: Path) -> None:
    # Processes of other tests may still be running.
    others = children()
    with compiler_for(model_dir) as compiler:
        for letter in "abc":
            await compiler.compile(Form(regex=letter))
        assert len([child for child in children() if child not in others]) == 1


@pytest.mark.process
def test_a_process_dies_with_its_parent(model_dir: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(model_dir)]
    env = module_environment()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"busy\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=PATIENCE_S)[1] == []


async def test_a_process_that_fails_to_start_is_not_blamed_on_the_request(tmp_path: Path) -> None:
    with compiler_for(tmp_path) as compiler, pytest.raises(RuntimeError, match="ended with 1"):
        await compiler.compile(YES_NO)


async def test_a_trial_process_leaves_its_end_to_the_tokenizer(model_dir: Path) -> None:
    others = children()
    with compiler_for(model_dir) as compiler:
        await compiler.compile(YES_NO)
        [child] = [child for child in children() if child not in others]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        await compiler.compile(Form(grammar='start: "no"'))
        assert [child for child in children() if child not in others] == [child]
