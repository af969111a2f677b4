"""A chat template with all that Gemma 3's does: no role for the system, strict turns, content as text or as parts."""

GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- set ns = namespace(prefix='', turns=messages) -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- set ns.prefix = (system if system is string else system[0].text) ~ '\\n\\n' -%}
    {%- set ns.turns = messages[1:] -%}
{%- endif -%}
{%- for turn in ns.turns -%}
    {%- if (loop.index0 % 2 == 0) != (turn.role == 'user') -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ '<start_of_turn>' ~ ('model' if turn.role == 'assistant' else turn.role) ~ '\\n' }}
    {{- ns.prefix if loop.first else '' }}
    {%- if turn.content is string -%}
        {{ turn.content | trim }}
    {%- elif turn.content is iterable -%}
        {%- for part in turn.content -%}
            {{ '<start_of_image>' if part.type == 'image' else part.text | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
