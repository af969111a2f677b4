"""Chat templates of all kinds of families, by name. Those of Llama 3.1, gpt-oss and Qwen3.6 imitate what matters.

The published ones are read by `tests/writers/test_published_templates.py`.
"""

from __future__ import annotations

from services.tokenizer.chat.deepseek_v32_template import DEEPSEEK_V32_TEMPLATE
from services.tokenizer.chat.generic_tools_template import with_generic_tools
from tests.support.models.tiny_tokenizer import CHATML
from tests.support.models.tool_caller import TEMPLATE as TOOL_CALLER
from tests.support.tokenizer.call_templates import CALLS_AS_OBJECTS, CALLS_AS_TEXT, ONE_CALL, SHORT_IDS
from tests.support.tokenizer.gemma_template import GEMMA_TEMPLATE
from tests.support.tokenizer.glm_templates import GLM_47, GLM_52
from tests.support.tokenizer.kimi_templates import KIMI_K2, KIMI_K2_THINKING, KIMI_K25
from tests.support.tokenizer.vision_templates import MAGISTRAL_SMALL, MISTRAL_SMALL, QWEN3_VL, QWEN3_VL_THINKING

# As Llama 3.1's: one system message, and calls without what is said before them.
CALLS_ALONE = """\
{%- if messages[0].role == 'system' -%}{%- set system, rest = messages[0].content, messages[1:] -%}
{%- else -%}{%- set system, rest = '', messages -%}{%- endif -%}
<s>{{ system }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in rest -%}
<{{ m.role }}>
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call') }}{%- endif -%}
{{ m.tool_calls[0].function | tojson }}
{%- else -%}{{ m.content }}{%- endif -%}
{%- endfor -%}
"""
# As gpt-oss's: only the first message may instruct, and results have their functions' names.
FIRST_ALONE = """\
{%- if messages[0].role == 'system' -%}<|developer|>{{ messages[0].content }}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' -%}
{%- if m.content -%}<|final|>{{ m.content }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor -%}
{%- elif m.role == 'tool' -%}<|{{ m.name }}|>{{ m.content }}
{%- endif -%}
{%- endfor -%}
"""
# As Qwen3.6's: a system message elsewhere is refused.
SYSTEM_FIRST = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system first') }}{%- endif -%}
<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] -%}{{ call.function | tojson }}{%- endfor -%}
{%- endfor -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}
"""
TEMPLATES = {
    "calls as objects": CALLS_AS_OBJECTS,
    "calls as text": CALLS_AS_TEXT,
    "one call": ONE_CALL,
    "short ids": SHORT_IDS,
    "GLM 4.7": GLM_47,
    "GLM 5.2": GLM_52,
    "Kimi K2": KIMI_K2,
    "Kimi K2 Thinking": KIMI_K2_THINKING,
    "Kimi K2.5": KIMI_K25,
    "Mistral Small": MISTRAL_SMALL,
    "Magistral Small": MAGISTRAL_SMALL,
    "Qwen3-VL": QWEN3_VL,
    "Qwen3-VL Thinking": QWEN3_VL_THINKING,
    "Gemma 3": GEMMA_TEMPLATE,
    "DeepSeek V3.2": DEEPSEEK_V32_TEMPLATE,
    "tool caller": TOOL_CALLER,
    "calls alone": CALLS_ALONE,
    "first alone": FIRST_ALONE,
    "system first": SYSTEM_FIRST,
    "Gemma 3 with generic tools": with_generic_tools(GEMMA_TEMPLATE, "system"),
    "ChatML with generic tools": with_generic_tools(CHATML, "system"),
    "ChatML with generic tools of the user": with_generic_tools(CHATML, "user"),
}
