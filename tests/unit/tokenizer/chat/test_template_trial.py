from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.template_features import find_features
from services.tokenizer.chat.template_renderer import TemplateRenderer
from services.tokenizer.chat.template_rendering import render_template
from services.tokenizer.trial_limits import wall_clock_s
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.system.processes import ROOT, module_environment
from tests.support.tokenizer.call_templates import (
    CALLS_AS_OBJECTS,
    CALLS_AS_PYTHON,
    CALLS_AS_TEXT,
    CALLS_BY_ARGUMENT,
    ONE_CALL,
    SHORT_IDS,
    SINGLE_CALLS,
)

# A template that never ends.
PARENT = """
from services.tokenizer.chat.template_renderer import TemplateRenderer
source = "{% for i in range(10 ** 4) %}{% for j in range(10 ** 5) %}{% endfor %}{% endfor %}"
TemplateRenderer({source: False}, {}, cpu_s=600).try_template(source)
"""

NO_CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def features_of(source: str) -> TemplateFeatures:
    """What a trial finds, without a process of its own."""
    return find_features(lambda fields: render_template(source, {"bos_token": "<s>"}, fields), None)


def attempt(source: str, timeout_s: float = 60.0) -> TemplateFeatures:
    with closing(TemplateRenderer({source: False}, {"bos_token": "<s>"}, cpu_s=timeout_s)) as renderer:
        return renderer.try_template(source)


@pytest.mark.parametrize(
    ("source", "features"),
    [
        (CALLS_AS_OBJECTS, TemplateFeatures(takes_tools=True)),
        (CALLS_AS_TEXT, TemplateFeatures(arguments_are_text=True, empty_content_is_none=True, content_is_apart=True)),
        (ONE_CALL, TemplateFeatures(one_call_per_message=True, content_is_reasoning=True)),
        (SINGLE_CALLS, TemplateFeatures(one_call_per_message=True)),
        (SHORT_IDS, TemplateFeatures(ids_are_short=True)),
        (CALLS_AS_PYTHON, TemplateFeatures(arguments_are_text=True, loses_content=True)),
        (CALLS_BY_ARGUMENT, TemplateFeatures(arguments_have_names=True)),
        (NO_CALLS, TemplateFeatures(loses_calls=True)),
        ("{{ bos_token }}{{ raise_exception('no tools') if tools else '' }}", TemplateFeatures(loses_calls=True)),
    ],
)
def test_a_trial_finds_out_how_a_template_takes_tools(source: str, features: TemplateFeatures) -> None:
    assert features_of(source) == features


def test_a_template_may_need_a_system_message() -> None:
    needy = "{{ raise_exception('who am I?') if messages[0].role != 'system' }}"
    assert features_of(needy + CALLS_AS_TEXT) == features_of(CALLS_AS_TEXT)
    assert features_of("{{ messages[1].content }}") == TemplateFeatures(system_comes_first=True, loses_calls=True)


@pytest.mark.parametrize(
    "source",
    [
        # As gpt-oss' leaves it out, Qwen3.5's refuses it, and Gemma's wants turns to alternate.
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
        "{% for m in messages[messages[0].role == 'system':] %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_may_want_the_system_first(source: str) -> None:
    assert features_of(source) == TemplateFeatures(system_comes_first=True, loses_calls=True)


def test_a_process_finds_the_same() -> None:
    assert attempt(CALLS_AS_TEXT) == features_of(CALLS_AS_TEXT)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ unclosed", TemplateSyntaxError),
        ("{{ messages[5].content }}", UndefinedError),
        ("{{ raise_exception('never') }}", TemplateError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{% set _ = messages[0].update({'role': 'x'}) %}", SecurityError),
        ("{{ 1 / 0 }}", ZeroDivisionError),
        ("{% include '/etc/passwd' %}", TypeError),
        ("{{ 'a' * messages[0].content | length * 10 ** 6 }}", ValueError),
    ],
)
def test_a_template_may_fail_on_a_plain_message(source: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        features_of(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ ('%0' ~ 2 * 10 ** 9 ~ 'd') | format(1) }}", "{{ 'a' * 10 ** 10 }}"],
)
def test_a_template_that_fails_on_a_plain_message_is_refused(source: str) -> None:
    with pytest.raises(ModelDirectoryError, match="plain message"):
        attempt(source)


LOOP = "{{% for _ in range(99999) %}}{}{{% endfor %}}"
ENDLESS = LOOP.format(LOOP.format(LOOP.format("")))


@pytest.mark.parametrize("source", [ENDLESS, "{{ 9 ** (9 ** 9) }}"])
def test_a_template_that_does_not_end_is_refused_in_time(source: str) -> None:
    with pytest.raises(ModelDirectoryError, match="more than 1 s of CPU time"):
        attempt(source, timeout_s=1.0)


HOG = "{% set ns = namespace(a=['x']) %}{% for _ in range(64) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        HOG,
        # Jinja computes constants while it compiles, and goes on without those that fail.
        "{% if messages | length > 9 %}{% set x = 'a' * 3000000000 %}{% endif %}plain",
        # Only with a call, where other failures mean that the template takes none.
        "{% if messages | length > 2 %}" + HOG + "{% endif %}plain",
    ],
    ids=["rendered", "compiled", "with a call"],
)
def test_a_template_that_uses_too_much_memory_is_refused(source: str) -> None:
    with pytest.raises(ModelDirectoryError, match="more than 256 MiB of memory"):
        attempt(source)


@pytest.mark.process
def test_a_trial_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, env=module_environment()) as parent:
        while len(trials := psutil.Process(parent.pid).children(recursive=True)) < 2:
            assert parent.poll() is None
        parent.kill()
    assert psutil.wait_procs(trials, timeout=60)[1] == []


def test_a_trial_may_wait_for_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It stops itself before it starts, like a process that a busy machine does not schedule.
    pids, interpreter = tmp_path / "pids", tmp_path / "python"
    os.mkfifo(pids)
    interpreter.write_text(f'#!/bin/sh\necho $$ > {pids}\nkill -STOP $$\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(attempt, f"{NO_CALLS} {tmp_path}", 2.0)
        pid = int(pids.read_text())
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        os.kill(pid, signal.SIGCONT)
        assert trial.result() == TemplateFeatures(loses_calls=True)
    # Only a process that hangs takes longer.
    assert wall_clock_s(2.0) >= 60.0
