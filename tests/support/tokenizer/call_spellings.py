"""How models write calls, and nearly write them, in the markup of each family; and what they only quote.

`FAMILIES` has every parser, so that a new one comes with its spellings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CITY = '{"city": "Aix", "days": 3}'
# What means that there are no arguments.
NOTHINGS = ("null", "None", "", " ", "{}", "```json\n```", "```\nnull\n```", "```json\n{}\n```", '"{}"', '""', '"null"')

# Arguments of `get_weather` that are strings.
TEXTS = ("city", "unit")

# A call, from its name and what is written for its arguments.
_Call = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Family:
    """The markup of a family's calls."""

    call: _Call
    """A call whose arguments are an object of JSON."""
    unclosed: tuple[str, ...]
    """What the calls end with, each of which may be missing at the end of a reply; the last one first."""
    listed: Callable[[str], str] | None = None
    """A tag around a list of calls in JSON; None where it has none."""
    pairs: Callable[[str, dict[str, str]], str] | None = None
    """A call whose arguments are written one by one; None where they are not."""
    quote: str = ""
    """Markup that a value which is text may quote: a call's tags, of which none closes a value."""
    argument: str = ""
    """What is before an argument's value."""
    omitted: tuple[str, ...] = ()
    """Tags inside of a call whose arguments are written one by one, each of which may be missing everywhere."""
    answer: str = ""
    """What opens an answer's text."""


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def _deepseek_v3(name: str, arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _kimi(name: str, arguments: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def _mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _glm(name: str, arguments: str) -> str:
    return f"<tool_call>{name}\n{arguments}\n</tool_call>"


def _glm_pairs(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{pairs}\n</tool_call>"


def _qwen(name: str, arguments: str) -> str:
    return f"<tool_call>\n<function={name}>\n{arguments}\n</function>\n</tool_call>"


def _qwen_pairs(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _dsml(name: str, arguments: str) -> str:
    invoke = f'<｜DSML｜invoke name="{name}">\n{arguments}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"


def _dsml_pairs(name: str, values: dict[str, str]) -> str:
    tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    # As the model does, by the schema.
    pairs = [tag.format(key, str(key in TEXTS).lower(), value) for key, value in values.items()]
    return _dsml(name, "\n".join(pairs))


FAMILIES: dict[str, Family | None] = {
    # Its replies are text.
    "none": None,
    "hermes": Family(_hermes, ("\n</tool_call>",), lambda calls: f"<tool_call>\n{calls}\n</tool_call>"),
    "llama3_json": Family(_llama3, (), lambda calls: calls),
    "deepseek_v3": Family(
        _deepseek_v3,
        ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"),
        lambda calls: f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Family(
        _dsml,
        ("\n</｜DSML｜function_calls>", "\n</｜DSML｜invoke>"),
        lambda calls: f"<｜DSML｜function_calls>\n{calls}\n</｜DSML｜function_calls>",
        _dsml_pairs,
        quote='<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        argument='<｜DSML｜parameter name="{}" string="true">',
        omitted=("</｜DSML｜parameter>", "\n</｜DSML｜invoke>", "\n</｜DSML｜function_calls>"),
    ),
    "harmony": Family(_harmony, ("<|call|>",), answer="<|channel|>final<|message|>"),
    "kimi_k2": Family(
        _kimi,
        ("<|tool_calls_section_end|>", "<|tool_call_end|>"),
        lambda calls: f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
    ),
    "glm4": Family(
        _glm,
        ("\n</tool_call>",),
        lambda calls: f"<tool_call>{calls}\n</tool_call>",
        _glm_pairs,
        quote="<tool_call>f\n</tool_call>",
        argument="<arg_key>{}</arg_key>\n<arg_value>",
        omitted=("</arg_value>", "</arg_key>", "<arg_value>", "\n</tool_call>"),
    ),
    "qwen3_coder": Family(
        _qwen,
        ("\n</tool_call>", "\n</function>"),
        lambda calls: f"<tool_call>\n{calls}\n</tool_call>",
        _qwen_pairs,
        quote="<tool_call>\n<function=f>\n</function>\n</tool_call>",
        argument="<parameter={}>\n",
        omitted=("\n</parameter>", "</function>\n", "\n</tool_call>", "<tool_call>\n"),
    ),
    "mistral": Family(_mistral, (), lambda calls: f"[TOOL_CALLS]{calls}"),
    # Tags as Hermes has them.
    "generic": Family(_hermes, ("\n</tool_call>",), lambda calls: f"<tool_call>\n{calls}\n</tool_call>"),
}

# A spelling: its label, the reply, and the calls in it with their arguments.
Spelling = tuple[str, str, list[tuple[str, str]]]


def calls(name: str) -> Iterator[Spelling]:
    """Replies of a family that make calls."""
    family = FAMILIES[name]
    if family is None:
        return
    call, weather = family.call, [("get_weather", CITY)]
    for number, nothing in enumerate(NOTHINGS):
        yield f"nothing {number}", call("get_time", nothing), [("get_time", "{}")]
    yield "fenced arguments", call("get_weather", f"```json\n{CITY}\n```"), weather
    yield "arguments in a string", call("get_weather", '"{\\"city\\": \\"Aix\\", \\"days\\": 3}"'), weather
    yield "one brace too many", call("get_weather", CITY + "}"), weather
    python = "{'city': 'Aix', 'hourly': True, 'at': [None, 'it\\'s \"x\"']}"
    spelled = '{"city": "Aix", "hourly": true, "at": [null, "it\'s \\"x\\""]}'
    yield "python's spelling", call("get_weather", python), [("get_weather", spelled)]
    commas = '{"city": "Aix,]", "at": [1, [2, ], {"a": {},\n},],\n}'
    spelled = '{"city": "Aix,]", "at": [1, [2], {"a": {}}]}'
    yield "trailing commas", call("get_weather", commas), [("get_weather", spelled)]
    yield "trailing commas in a string", call("get_weather", json.dumps(commas)), [("get_weather", spelled)]
    yield "functions.", call("functions.get_weather", CITY), weather
    yield "functions.functions.", call("functions.functions.get_weather", CITY), weather
    whole = call("get_weather", CITY)
    for number in range(1, len(family.unclosed) + 1):
        for missing in family.unclosed[:number]:
            whole = whole.removesuffix(missing)
        yield f"without the last {number} closing tags", whole, weather
        whole = call("get_weather", CITY)
    several = [("get_time", "{}"), ("get_weather", CITY)]
    yield "one after the other", call("get_time", "{}") + call("get_weather", CITY), several
    yield from _listed(family, weather, several)
    yield from _pairs(family)
    yield from _special(name, weather)


def _listed(family: Family, weather: list[tuple[str, str]], several: list[tuple[str, str]]) -> Iterator[Spelling]:
    if family.listed is None:
        return
    one, other = '{"name": "get_time", "arguments": null}', f'{{"name": "get_weather", "arguments": {CITY}}}'
    yield "a list", family.listed(f"[{one}, {other}]"), several
    yield "several", family.listed(f"{one}\n{other}"), several
    yield "several with commas", family.listed(f"{one}, {other}"), several
    yield "a list with a comma at its end", family.listed(f"[{one}, {other}, ]"), several
    yield "commas at the ends of calls", family.listed('[{"name": "get_time", "arguments": {},},]'), [several[0]]
    yield "a fence", family.listed(f"```json\n{other}\n```"), weather
    yield "a fenced list", family.listed(f"```json\n[{one},\n{other}]\n```"), several
    yield "a call's brace too many", family.listed(other + "}"), weather
    yield "without arguments", family.listed('{"name": "get_time"}'), [("get_time", "{}")]
    yield "python's spelling of a call", family.listed("{'name': 'get_time', 'arguments': None}"), [("get_time", "{}")]


def _pairs(family: Family) -> Iterator[Spelling]:
    if family.pairs is None:
        return
    for written, read in (("True", "true"), ("False", "false"), ("None", "null"), ("true", "true")):
        text = family.pairs("get_weather", {"hourly": written})
        yield f"{written} as a value", text, [("get_weather", f'{{"hourly": {read}}}')]
    values = {"tags": "['a', \"it's\", {'b': None}]", "extra": "{'x': (1)}", "city": "True", "at": "None"}
    read = '{"tags": ["a", "it\'s", {"b": null}], "extra": "{\'x\': (1)}", "city": "True", "at": "None"}'
    listed = "[1, {'a': 2,}, ]"
    text = family.pairs("get_weather", {"tags": listed, "at": listed})
    yield "trailing commas in values", text, [("get_weather", f'{{"tags": [1, {{"a": 2}}], "at": "{listed}"}}')]
    yield from _omissions(family)
    yield "python's lists", family.pairs("get_weather", values), [("get_weather", read)]
    text = family.pairs("get_weather", {"city": "Aix"})
    for number in range(1, len(family.unclosed) + 1):
        for missing in family.unclosed[:number]:
            text = text.removesuffix(missing)
        yield f"pairs without the last {number} closing tags", text, [("get_weather", '{"city": "Aix"}')]
        text = family.pairs("get_weather", {"city": "Aix"})


def _omissions(family: Family) -> Iterator[Spelling]:
    """Calls in which tags are missing, and such as look like that."""
    assert family.pairs is not None
    values = {"city": "Aix", "days": "3", "unit": "a\nb", "at": "x", "hourly": "true"}
    read = [("get_weather", '{"city": "Aix", "days": 3, "unit": "a\\nb", "at": "x", "hourly": true}')]
    whole = family.pairs("get_weather", values)
    for tag in family.omitted:
        text = whole.replace(tag, "")
        yield f"without any {tag}", text, read
        if text.count("get_weather"):
            yield f"twice without any {tag}", f"{text}\n{text}", read * 2
    closing = family.omitted[0]
    for number in range(whole.count(closing)):
        parts = whole.split(closing)
        text = closing.join(parts[: number + 1]) + closing.join(["", *parts[number + 1 :]]).removeprefix(closing)
        yield f"without {closing} number {number}", text, read
    for tag in family.omitted[1:]:
        yield f"without {closing} and {tag}", whole.replace(closing, "").replace(tag, ""), read
    end = whole[whole.rindex("true") + len("true") :]
    for label, quoted in (
        ("a quoted call", f"See\n{family.quote}\nand so on."),
        ("several quoted calls", f"{family.quote}\n{family.quote}"),
        ("quoted ends", f"a{end.replace(closing, '')}\nb"),
        ("an argument that there is not", f"a\n{family.argument.format('other')}b"),
        ("an argument that the call has", f"a\n{family.argument.format('city')}b"),
    ):
        yield label, family.pairs("get_weather", {"city": quoted}), [("get_weather", json.dumps({"city": quoted}))]


def _special(name: str, weather: list[tuple[str, str]]) -> Iterator[Spelling]:
    """What one family alone has."""
    if name == "harmony":
        for header in (
            "<|channel|>analysis to=functions.get_weather<|channel|>commentary",
            "<|start|>assistant<|channel|>commentary to=functions.get_weather<|channel|>commentary json",
            "<|channel|>commentaryto=functions.get_weather",
            "<|start|>assistantto=functions.get_weather<|channel|>commentary",
            "to=functions.get_weather<|channel|>commentary <|constrain|>json",
            "<|channel|>commentary to=get_weather <|constrain|>json",
        ):
            yield header, f"{header}<|message|>{CITY}<|call|>", weather
    elif name == "llama3_json":
        yield "after the tag", f"<|python_tag|>{_llama3('get_weather', CITY)}", weather
    elif name == "generic":
        bare = f'{{"name": "get_weather", "arguments": {CITY}}}'
        yield "bare", bare, weather
        yield "a bare list", f"\n[{bare}, {bare}]", weather * 2
        yield "in a fence", f"```json\n{bare}\n```", weather
    elif name == "kimi_k2":
        text = _kimi("get_time", "").replace("<|tool_call_argument_begin|>", "")
        yield "an id alone", text, [("get_time", "{}")]
    elif name == "deepseek_v3":
        for arguments in ("{}", "", "null", "```json\n```", "```json\n\n```", "```json\n{}\n```", "```json\nnull\n```"):
            text = _deepseek_v3("function", f"get_time\n{arguments}")
            yield f"V3's form: {arguments}", text, [("get_time", "{}")]
        yield "a name alone", _deepseek_v3("get_time", "").replace("<｜tool▁sep｜>", ""), [("get_time", "{}")]
    elif name == "mistral":
        yield "without [ARGS]", f"[TOOL_CALLS]get_weather{CITY}", weather
        yield "a name alone", "[TOOL_CALLS]get_time", [("get_time", "{}")]


def texts(name: str) -> Iterator[tuple[str, str, str]]:
    """Replies of a family that are text: a label, the reply, and its text."""
    family = FAMILIES[name]
    if family is None:
        for other in filter(None, FAMILIES.values()):
            text = other.call("get_time", "{}")
            yield f"{text}", text, text
        return
    whole = family.call("get_weather", CITY)
    before = family.answer
    for label, text in (
        ("in a code fence", f"Write:\n```\n{whole}\n```\nThat is all."),
        ("in a code fence with a word", f"Write:\n\n~~~xml\n{whole}\n~~~"),
        ("in a long fence", f"So:\n````\n```\n{whole}\n```\n{whole}\n````\nDone."),
        ("in code", f"Write `{whole.replace(chr(10), ' ')}` to call it."),
        *((f"a quoted tag {tag}", f"The tag {tag} begins it, and `{tag}` too.") for tag in _tags(name)),
    ):
        yield label, before + text, text
    unknown = family.call("made_up", "{}")
    yield "an unknown tool", unknown, unknown
    if family.pairs is not None:
        unknown = family.pairs("made_up", {"a": "1"})
        yield "an unknown tool with pairs", unknown, unknown
    if family.listed is not None:
        unknown = family.listed('[{"name": "made_up", "arguments": {}}]')
        yield "a list of unknown tools", unknown, unknown
        empty = family.listed("[]")
        yield "an empty list", empty, empty


def _tags(name: str) -> tuple[str, ...]:
    return {
        "hermes": ("<tool_call>",),
        "generic": ("<tool_call>", '{"name"'),
        "glm4": ("<tool_call>", "<arg_key>"),
        "qwen3_coder": ("<tool_call>", "<function=get_time>"),
        "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
        "deepseek_v32": ("<｜DSML｜function_calls>",),
        "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        "mistral": ("[TOOL_CALLS]",),
        "llama3_json": ("<|python_tag|>", "{"),
        "harmony": (),
    }[name]
