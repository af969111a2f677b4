"""Which part of a JSON schema the library refuses, and what it accepts of it.

Compiles the schema many times: only where a hostile one may use up time.
"""

from __future__ import annotations

import bisect
import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.tokenizer.json.json_schema import HeldSchema, held_schema
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import SchemaPlace, draft_of, subschemas

# The library's reason for refusing a schema; empty if it accepts it.
ProblemOf = Callable[[JsonValue], str]

# The search only makes a message better.
_MAX_SEARCH_CPU_S = 0.5

# The library's wording, and the keywords that cause it.
_RELAXABLE = (
    (re.compile(r'"oneOf" is supported only where'), ("oneOf",)),
    (re.compile(r"min/maxProperties only supported"), ("minProperties", "maxProperties")),
    (re.compile(r"patternProperty regexes"), ("patternProperties",)),
    (re.compile(r"Unable to determine if regex is empty"), ("pattern", "format")),
)


def place_of_problem(schema: JsonValue, problem_of: ProblemOf) -> str:
    """The pointer to the innermost schema without which the library's reason would be another one."""
    problem = problem_of(schema)
    place = SchemaPlace(schema, "#", draft_of(schema, 2020))
    deadline = time.process_time() + _MAX_SEARCH_CPU_S

    def matter(places: Sequence[SchemaPlace]) -> bool:
        return time.process_time() < deadline and problem_of(_without(schema, places)) != problem

    while True:
        places = list(subschemas(place))
        if not matter(places):
            return place.pointer
        # The first ones that matter together: the last of them does, even if another one has the same problem.
        count = bisect.bisect_left(range(len(places)), True, lo=1, key=lambda number: matter(places[:number]))
        place = places[count - 1]


def relaxed_schema(schema: JsonValue, problem_of: ProblemOf) -> HeldSchema:
    """What can be held of a schema.

    Raises:
        GrammarError: the schema is malformed, or has values that cannot be held.
    """
    held = held_schema(schema, is_strict=False)
    relaxed, not_held = held.schema, list(held.not_held)
    for _ in range(2 * len(_RELAXABLE)):
        problem = problem_of(relaxed)
        known = next(((wording, keywords) for wording, keywords in _RELAXABLE if wording.search(problem)), None)
        if known is None:
            break
        culprits = _culprits(relaxed, *known, problem_of)
        relaxed, pointers = _relax(relaxed, known[1], culprits)
        not_held += pointers
    return HeldSchema(relaxed, tuple(not_held))


def _culprits(
    schema: JsonValue, wording: re.Pattern[str], keywords: Sequence[str], problem_of: ProblemOf
) -> Sequence[int]:
    """The numbers of the sites of `keywords` each of which causes the problem alone; all sites, if none does."""
    everything = range(len(list(_sites(schema, keywords))))

    def among(numbers: Sequence[int]) -> list[int]:
        others = [number for number in everything if number not in numbers]
        if not numbers or not wording.search(problem_of(_relax(schema, keywords, others)[0])):
            return []
        if len(numbers) == 1:
            return list(numbers)
        half = len(numbers) // 2
        return among(numbers[:half]) + among(numbers[half:])

    return among(everything) or everything


def _relax(schema: JsonValue, keywords: Sequence[str], numbers: Sequence[int]) -> tuple[JsonValue, list[str]]:
    """A copy without these sites of `keywords`, and the pointers to them; one of several for `oneOf`."""
    relaxed = copy.deepcopy(schema)
    sites = list(_sites(relaxed, keywords))
    pointers = []
    for node, keyword, pointer in (sites[number] for number in numbers):
        pointers.append(f"{pointer}/{keyword}")
        if keyword != "oneOf":
            del node[keyword]
        elif "anyOf" not in node:
            entries = [("anyOf" if name == "oneOf" else name, value) for name, value in node.items()]
            node.clear()
            node.update(entries)
        else:
            all_of = node.get("allOf")
            options: JsonObject = {"anyOf": node.pop("oneOf")}
            node["allOf"] = [*(all_of if isinstance(all_of, list) else ()), options]
    return relaxed, pointers


def _sites(schema: JsonValue, keywords: Sequence[str]) -> Iterator[tuple[JsonObject, str, str]]:
    places = [SchemaPlace(schema, "#", 2020)]
    while places:
        place = places.pop()
        places += reversed(list(subschemas(place)))
        if isinstance(place.node, dict):
            for keyword in keywords:
                if keyword in place.node:
                    yield place.node, keyword, place.pointer


def _without(schema: JsonValue, places: Sequence[SchemaPlace]) -> JsonValue:
    """A copy with `true` in these places."""
    changed = copy.deepcopy(schema)
    for place in places:
        node: Any = changed
        for step in place.steps[:-1]:
            node = node[step]
        node[place.steps[-1]] = True
    return changed
