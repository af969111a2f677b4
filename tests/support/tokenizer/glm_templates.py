"""Chat templates of the shape of GLM-4.7's and GLM-5.2's: no line break anywhere between markup and text."""

from __future__ import annotations

_TOOLS = """\
[gMASK]<sop>
{%- if effort %}<|system|>Reasoning Effort: {{ effort }}{% endif %}
{%- if tools %}<|system|>
# Tools

You may call functions, whose signatures are within <tools></tools> XML tags:
<tools>
{% for tool in tools %}{{ (tool.function if bare_tools else tool) | tojson(ensure_ascii=False) }}
{% endfor %}</tools>

For each call, write the function name and arguments in this XML format:
<tool_call>{name}<arg_key>{key-1}</arg_key><arg_value>{value-1}</arg_value>...</tool_call>
{%- endif %}"""
_MESSAGES = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'system' %}<|system|>{{ m.content }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}<|assistant|>
{%- set content, thoughts = m.content or '', m.reasoning_content if m.reasoning_content is string else '' %}
{%- if not thoughts and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if thoughts and (loop.index0 > last.user or (clear_thinking is defined and not clear_thinking)) %}
{{- '<think>' + thoughts.strip() + '</think>' }}
{%- else %}{{ no_thoughts }}{% endif %}
{{- content.strip() }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '<tool_call>' + call.name }}
{%- for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- no_thoughts if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}"""

GLM_47 = "{%- set effort, bare_tools, no_thoughts = none, false, '</think>' %}" + _TOOLS + _MESSAGES
GLM_52 = (
    "{%- set effort = 'High' if reasoning_effort == 'high' else 'Max' %}"
    "{%- set bare_tools, no_thoughts = true, '<think></think>' %}" + _TOOLS + _MESSAGES
)
