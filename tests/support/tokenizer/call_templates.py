"""Chat templates that write the calls of a message in different ways, or refuse some."""

# The forms in which templates write a message's calls: Qwen3's, DeepSeek-V3's, and one that writes none.
CALLS_AS_OBJECTS = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}
{%- endif %}{% endfor %}{% endfor %}"""
CALLS_AS_TEXT = """\
{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% else %}{% for call in m.tool_calls %}
{{- 'call ' + call.function.arguments }}{% endfor %}{% endif %}{% endfor %}"""
# gpt-oss writes only the first call, and reasoning or content; Llama 3 refuses several calls; Mistral long ids.
ONE_CALL = """\
{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{{- m.content or m.thinking }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
SINGLE_CALLS = """\
{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('several') }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
SHORT_IDS = """\
{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ call.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}{% endfor %}"""
CALLS_AS_PYTHON = (
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
)
# Qwen3-Coder's and DeepSeek-V3.2's form: an element for each argument.
CALLS_BY_ARGUMENT = """\
{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"""
