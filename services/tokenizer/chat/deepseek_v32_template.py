"""A chat template for DeepSeek-V3.2, which was published with a program instead of one.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, "chat" and "thinking" modes; the latter is chosen by
the variable `thinking` or `enable_thinking`. Tools are in the first system message, as there.
"""

DEEPSEEK_V32_TEMPLATE = r"""
{%- set thinks = thinking if thinking is defined else enable_thinking if enable_thinking is defined else false -%}
{%- set dsml = '｜DSML｜' -%}
{%- macro list_tools() -%}
{{ '\n\n## Tools\n' -}}
{{ 'You have access to a set of tools you can use to answer the user\'s question.\n' -}}
{{ 'You can invoke functions by writing a "<' ~ dsml ~ 'function_calls>" block like the following as part of your ' -}}
{{ 'reply to the user:\n<' ~ dsml ~ 'function_calls>\n<' ~ dsml ~ 'invoke name="$FUNCTION_NAME">\n' -}}
{{ '<' ~ dsml ~ 'parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</' ~ dsml ~ 'parameter>\n' -}}
{{ '...\n</' ~ dsml ~ 'invoke>\n<' ~ dsml ~ 'invoke name="$FUNCTION_NAME2">\n...\n</' ~ dsml ~ 'invoke>\n' -}}
{{ '</' ~ dsml ~ 'function_calls>\n' -}}
{{ 'String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects ' -}}
{{ 'should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" ' -}}
{{ 'for other types (numbers, booleans, arrays, objects).\n' -}}
{{ 'If the thinking_mode is enabled, then after function results you should strongly consider outputting a ' -}}
{{ 'thinking block. Here is an example:\n<' ~ dsml ~ 'function_calls>\n...\n</' ~ dsml ~ 'function_calls>\n' -}}
{{ '<function_results>\n...\n</function_results>\n<think>...thinking about results</think>\n' -}}
{{ 'Here are the functions available in JSONSchema format:\n<functions>\n' -}}
{%- for tool in tools -%}
{{ tool.function | tojson }}
{{- '' if loop.last else '\n' -}}
{%- endfor -%}
{{ '\n</functions>\n' -}}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1, calls=0, results=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{ bos_token -}}
{%- if tools and messages[0].role != 'system' -%}{{ list_tools() }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{ message.content -}}
{%- if tools and loop.first -%}{{ list_tools() }}{%- endif -%}
{%- elif message.role == 'user' -%}
{{ '<｜User｜>' ~ message.content ~ '<｜Assistant｜>' -}}
{{ '<think>' if thinks and loop.index0 == ns.last_user else '</think>' -}}
{%- elif message.role == 'assistant' -%}
{%- set ns.calls = (message.tool_calls or []) | length -%}
{%- set ns.results = 0 -%}
{%- if thinks and loop.index0 > ns.last_user -%}{{ (message.reasoning_content or '') ~ '</think>' }}{%- endif -%}
{{ message.content or '' -}}
{%- if message.tool_calls -%}
{{ '\n\n<' ~ dsml ~ 'function_calls>\n' -}}
{%- for call in message.tool_calls -%}
{{ '<' ~ dsml ~ 'invoke name="' ~ call.function.name ~ '">\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{ '<' ~ dsml ~ 'parameter name="' ~ name ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
{{ (value if value is string else value | tojson) ~ '</' ~ dsml ~ 'parameter>' -}}
{{ '' if loop.last else '\n' -}}
{%- endfor -%}
{{ '\n</' ~ dsml ~ 'invoke>' ~ ('' if loop.last else '\n') -}}
{%- endfor -%}
{{ '\n</' ~ dsml ~ 'function_calls>' -}}
{%- endif -%}
{{ '<｜end▁of▁sentence｜>' -}}
{%- elif message.role == 'tool' -%}
{%- set ns.results = ns.results + 1 -%}
{%- if ns.results > ns.calls -%}{{ raise_exception('A tool message answers no tool call.') }}{%- endif -%}
{{ '\n\n<function_results>' if ns.results == 1 else '' -}}
{{ '\n<result>' ~ message.content ~ '</result>' -}}
{%- if ns.results == ns.calls -%}
{{ '\n</function_results>\n\n' -}}
{{ '<think>' if thinks and loop.index0 >= ns.last_user else '</think>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""
