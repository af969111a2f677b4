"""How many functions and source files a request passes through: `python -m tests.support.tables.step_path`.

A cell of a tiny model on the `reference` backend runs in one process, in which every call of a function of `services`
or `shared` is noted with the service that has called it (`profiled_cell.py`). Each service's calls are cut where it
passes a boundary itself, so that the numbers do not depend on which of two services was faster. What is called in every
one of `_NUM_RUNS` equal requests counts, once, however often it is called.

It does not see generated protos, libraries and C++, nor functions that a service calls in other processes (none for a
prompt of text). Requests of one token show the whole way, over gRPC and over HTTP, with a prefill as their step. Of
longer answers a step is what each service calls from one forward pass to the next one: the next step is planned and
sent ahead meanwhile, so its parts have no order.

`--root DIR` profiles another checkout, whose services start as these do, with its stubs in `protos`; `--list` also
prints the functions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_environment, python_command

_NUM_RUNS = 3

# All that is known of the services' insides. Names of other revisions are alternatives here.
_QUEUED = re.compile(r"services/scheduler/core/\S+ Scheduler\.add(_sequence)?")
_PLANNED = re.compile(r"services/scheduler/core/\S+ Scheduler\.(plan|schedule)")
_FORWARD = re.compile(r"services/worker/models/\S+ \w+\.forward")
_RETURNED = re.compile(r"services/scheduler/core/\S+ Scheduler\.postprocess")

# Comprehensions, whose frames Python 3.12 has no more.
_INLINED = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr|module)>$")

# The steps of a long answer that are compared: not the first ones, before which there is no draft, nor the last one.
_STEPS = {"tokens": slice(3, -3), "draftable tokens": slice(7, -2)}
_STEP_NAMES = {"tokens": "decode", "draftable tokens": "drafted step"}

_Event = tuple[str, str, str]
_Parts = Sequence[Sequence[_Event]]


@dataclass(frozen=True)
class Touched:
    """What one stretch touches: functions, each as its file and its qualified name."""

    functions: frozenset[str]

    @property
    def files(self) -> frozenset[str]:
        """The files that have them."""
        return frozenset(function.split(" ")[0] for function in self.functions)


def measure(root: Path = ROOT) -> dict[str, Touched]:
    """What the stretches of requests touch in a cell of the checkout `root`, by their names.

    Raises:
        LookupError: a boundary was not passed, so its name has changed; the message says which one.
    """
    name_to_runs = defaultdict(list)
    for name, parts in _record(root):
        name_to_runs[name].append(parts)
    touched: dict[str, Touched] = {}
    for name, runs in name_to_runs.items():
        # The first one meets what is made once.
        for stretch, functions in _intersect([dict(_split(name, parts)) for parts in runs[1:]]).items():
            touched[stretch] = Touched(functions)
    return touched


def _record(root: Path) -> Iterator[tuple[str, _Parts]]:
    """Run all requests, each first once more; gives their names and parts, as `profiled_cell` describes them."""
    with tempfile.TemporaryDirectory(prefix="lockstep-path-") as temp_dir:
        plans = [
            _plan_cell(Path(temp_dir, "plain"), ["one token", "one token over HTTP", "tokens"], is_drafting=False),
            _plan_cell(Path(temp_dir, "drafting"), ["draftable tokens"], is_drafting=True),
        ]
        cell = Path(__file__).with_name("profiled_cell.py")
        environment = module_environment(root) | {"TMPDIR": temp_dir}
        run = subprocess.run(
            python_command(str(cell), str(root)),
            input="\n".join(plans),
            env=environment,
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
    for line in run.stdout.splitlines():
        answered = json.loads(line)
        yield answered["name"], answered["parts"]


def _plan_cell(folder: Path, names: Iterable[str], *, is_drafting: bool) -> str:
    model_dir = write_tiny_llama(folder / "model", changes={"num_hidden_layers": 2})
    flags = ["--ops-backend=reference"]
    if is_drafting:
        flags.append("--draft-proposer=ngram")
        _make_monotonous(model_dir)
    requests = [name for name in names for _ in range(_NUM_RUNS + 1)]
    plan = {"model_dir": str(model_dir), "folder": str(folder), "worker_flags": flags, "requests": requests}
    return json.dumps(plan)


def _make_monotonous(model_dir: Path) -> None:
    """Give all tokens the same logit, so that the likeliest one is always the first one, and drafts are right."""
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"].zero_()
    save_file(weights, path, metadata={"format": "pt"})


def _split(name: str, parts: _Parts) -> Iterator[tuple[str, frozenset[str]]]:
    """The stretches of a request, and the functions called in each."""
    if name in _STEPS:
        steps = parts[_STEPS[name]]
        for role in ("scheduler", "worker", "tokenizer"):
            in_all = frozenset.intersection(*(_called(_of(step, role)) for step in steps))
            yield f"{_STEP_NAMES[name]}: {role}", in_all
        return
    before, after = parts
    submitted, planned = _of(before, "scheduler"), _of(before, "worker")
    queued_at, planned_at = _find(submitted, "return", _QUEUED), _find(submitted, "call", _PLANNED)
    computed, returned = _of(after, "worker"), _of(after, "scheduler")
    computed_at, returned_at = _find(computed, "return", _FORWARD), _find(returned, "call", _RETURNED)
    to_queue = _called([*_of(before, "tokenizer"), *submitted[:queued_at]])
    to_text = _called([*returned[returned_at:], *_of(after, "tokenizer")])
    if name == "one token over HTTP":
        yield "HTTP to queue", to_queue
        yield "result to HTTP", to_text
        return
    yield "RPC to queue", to_queue
    yield "plan to forward", _called([*submitted[planned_at:], *planned])
    yield "forward itself", _called(computed[:computed_at])
    yield "forward to result", _called([*computed[computed_at:], *returned[:returned_at]])
    yield "result to text", to_text


def _of(events: Iterable[_Event], role: str) -> list[_Event]:
    return [event for event in events if event[0] == role]


def _called(events: Iterable[_Event]) -> frozenset[str]:
    return frozenset(function for _, event, function in events if event == "call" and not _INLINED.search(function))


def _find(events: Sequence[_Event], kind: str, boundary: re.Pattern[str]) -> int:
    for place, (_, event, function) in enumerate(events):
        if event == kind and boundary.fullmatch(function):
            return place
    raise LookupError(f"a boundary was not passed: no {kind} of {boundary.pattern}")


def _intersect(runs: Sequence[Mapping[str, frozenset[str]]]) -> dict[str, frozenset[str]]:
    return {stretch: frozenset.intersection(*(run[stretch] for run in runs)) for stretch in runs[0]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="count the functions and files that a request passes through")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose services are profiled")
    parser.add_argument("--list", action="store_true", help="print the functions of each stretch too")
    arguments = parser.parse_args()
    stretch_to_touched = measure(arguments.root.resolve())
    lines = [f"{'stretch':<26}{'functions':>10}{'files':>8}"]
    for stretch, touched in stretch_to_touched.items():
        lines.append(f"{stretch:<26}{len(touched.functions):>10}{len(touched.files):>8}")
    if arguments.list:
        for stretch, touched in stretch_to_touched.items():
            lines += ["", f"{stretch}:", *(f"  {function}" for function in sorted(touched.functions))]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
