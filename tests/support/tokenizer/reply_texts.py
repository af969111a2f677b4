"""Replies as the families write them, with strings that are hostile to whoever reads them."""

from __future__ import annotations

from services.tokenizer.chat.conversation import Tool

FIND = Tool("find")
LOOK = Tool("look", "", {"type": "object", "properties": {"a": {"type": "string"}, "b": {}, "n": {"type": "number"}}})

# As a model writes them into a string of JSON.
HOSTILE_STRINGS = (
    "plain",
    "\\ud83d",
    "\\ude00\\ud83d",
    "\\ud83d\\ude00",
    "a\nb\r\tc",
    '\\"quoted\\"',
    "back\\slash \\q \\u12",
    "</think><think>",
    "<|tool_call_end|><|tool_calls_section_end|><|tool_call_begin|>",
    "\x01\x1f\x7f",
    "é😀 漢字",
)
HOSTILE_VALUES = ("NaN", "-Infinity", "1e999", "-0.10", "12345678901234567890", "null", "true", "[]", '{"c": [1.50]}')


THINK_MARKERS = {
    "hermes": ("<think>", "</think>"),
    "generic": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "deepseek_v32": ("<think>", "</think>"),
    "glm4": ("<think>", "</think>"),
    "kimi_k2": ("<think>", "</think>"),
    "qwen3_coder": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


def reply_text(name: str, reasoning: str, text: str, calls: list[str]) -> str:
    """A whole reply of the family; parts that are empty are left out."""
    if name == "harmony":
        messages = [("analysis", reasoning), ("commentary" if calls else "final", text)]
        parts = [f"<|channel|>{channel}<|message|>{part}<|end|>" for channel, part in messages if part]
        return "<|start|>assistant".join([*parts, *calls])
    begin, end = THINK_MARKERS.get(name, ("", ""))
    thoughts = f"{begin}{reasoning}{end}" if reasoning and begin else ""
    return thoughts + text + (";" if name == "llama3_json" else "\n").join(calls)


def call_text(name: str, string: str, value: str) -> str:  # noqa: PLR0911 - one for each family
    """A call of `LOOK` in the family's own markup; `string` and `value` are as a model writes them in JSON."""
    arguments = f'{{"a": "{string}", "n": {value}}}'
    match name:
        case "hermes" | "generic":
            return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "look", "parameters": {arguments}}}'
        case "deepseek_v3":
            return (
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{arguments}"
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            )
        case "harmony":
            return f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{arguments}<|call|>"
        case "kimi_k2":
            return (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
                f"{arguments}<|tool_call_end|><|tool_calls_section_end|>"
            )
        case "mistral":
            return f"[TOOL_CALLS]look[ARGS]{arguments}"
        case "qwen3_coder":
            return (
                f"<tool_call>\n<function=look>\n<parameter=a>\n{string}\n</parameter>\n"
                f"<parameter=n>\n{value}\n</parameter>\n</function>\n</tool_call>"
            )
        case "deepseek_v32":
            return (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
                f'<｜DSML｜parameter name="a" string="true">{string}</｜DSML｜parameter>\n'
                f'<｜DSML｜parameter name="n" string="false">{value}</｜DSML｜parameter>\n'
                "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
            )
        case _:
            return (
                f"<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>{string}</arg_value>\n"
                f"<arg_key>n</arg_key>\n<arg_value>{value}</arg_value>\n"
                f'<arg_key>b</arg_key>\n<arg_value>"{string}"</arg_value>\n</tool_call>'
            )
