"""Chat templates as models that see images have them: of Mistral Small 3.2, Magistral Small and Qwen3-VL, abridged.

Their texts of system messages and of tools are shortened; the branches and what they write are the publishers'.
"""

from __future__ import annotations

_MISTRAL_BLOCKS = """
{%- macro blocks(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for block in content -%}
            {%- if block['type'] == 'text' -%}{{ block['text'] }}
            {%- elif block['type'] in ['image', 'image_url'] -%}[IMG]
            {%- else -%}{{ raise_exception('Only text and image chunks are supported in message content.') }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""

MISTRAL_SMALL = (
    _MISTRAL_BLOCKS
    + """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
    {{- '[SYSTEM_PROMPT]' + blocks(messages[0]['content']) + '[/SYSTEM_PROMPT]' -}}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {{- '[SYSTEM_PROMPT]You are Mistral Small 3.[/SYSTEM_PROMPT]' -}}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST]' + blocks(message['content']) + '[/INST]' -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- if message['content'] -%}{{- blocks(message['content']) -}}{%- endif -%}
        {%- for tool in message.get('tool_calls') or [] -%}
            {%- if not tool.id or tool.id | length != 9 -%}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}
            {%- endif -%}
            {%- set arguments = tool['function']['arguments'] -%}
            {%- set arguments = arguments if arguments is string else arguments | tojson -%}
            {{- '[TOOL_CALLS]' + tool['function']['name'] + '[CALL_ID]' + tool['id'] + '[ARGS]' + arguments -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message['role'] == 'tool' -%}
        {%- if not message.tool_call_id or message.tool_call_id | length != 9 -%}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') -}}
        {%- endif -%}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + (message['content'] | string) -}}
        {{- '[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception('Only user, assistant, system and tool roles are supported!') -}}
    {%- endif -%}
{%- endfor -%}
"""
)

MAGISTRAL_SMALL = MISTRAL_SMALL.replace(
    "You are Mistral Small 3.", "First draft your thinking process: [THINK]Your thoughts[/THINK]Then answer."
)

QWEN3_VL = """
{%- macro blocks(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for block in content -%}
            {%- if 'image' in block or 'image_url' in block or block.type == 'image' -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'video' in block -%}<|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in block -%}{{ block.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- blocks(messages[0].content) + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
    {{- '<args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + blocks(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + blocks(message.content) + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + blocks(message.content) }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + blocks(message.content) + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

_REPLY = "'<|im_start|>assistant\n' }}{%- endif %}"
QWEN3_VL_THINKING = QWEN3_VL.replace(_REPLY, "'<|im_start|>assistant\n<think>\n' }}{%- endif %}")
