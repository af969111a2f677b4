"""Chat templates of the shape of Kimi K2's: a call is shown by its id, and K2.5 declares tools in TypeScript."""

from __future__ import annotations

_TURN = """\
{%- macro turn(m) -%}
{%- set kind = m.role if m.role in ('user', 'assistant') else 'system' -%}
<|im_{{ kind }}|>{{ m.name or m.role }}<|im_middle|>
{%- endmacro -%}
{%- macro calls(m) -%}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
{%- endmacro -%}
"""
_JSON = "{{ tools | tojson(separators=(',', ':')) }}"
_TYPESCRIPT = f"{{%- if tools_ts_str -%}}{{{{ tools_ts_str }}}}{{%- else -%}}{_JSON}{{%- endif -%}}"
_BEGIN = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>TOOLS<|im_end|>{%- endif -%}
{%- if messages[0].role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
"""
_MESSAGES = """\
{%- for m in messages -%}
{{ turn(m) }}
{%- if m.role == 'tool' -%}
## Return of {{ m.tool_call_id }}
{{ m.content }}
{%- else -%}
THOUGHTS{{ m.content }}{{ calls(m) if m.role == 'assistant' }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>OPENING
{%- endif -%}
"""
_THOUGHTS = "{%- if m.role == 'assistant' -%}<think>{{ m.reasoning_content or '' }}</think>{%- endif -%}"


def _template(tools: str, thoughts: str = "", opening: str = "") -> str:
    messages = _MESSAGES.replace("THOUGHTS", thoughts).replace("OPENING", opening)
    return _TURN + _BEGIN.replace("TOOLS", tools) + messages


KIMI_K2 = _template(_JSON)
KIMI_K2_THINKING = _template(_JSON, _THOUGHTS)
KIMI_K25 = _template(_TYPESCRIPT, _THOUGHTS, "{{ '<think></think>' if thinking is false else '<think>' }}")
