from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import pytest

from services.tokenizer.chat.chat_template import ChatTemplate, load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall, ToolMode
from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.template_features import find_features
from services.tokenizer.chat.template_rendering import render_template
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.errors import InvalidRequestError, TemplateFailedError
from shared.model_files.model_dir import ModelDirectoryError
from tests.support.models.tiny_tokenizer import CHATML, tiny_tokenizer, write_tiny_tokenizer
from tests.support.tokenizer.call_templates import CALLS_AS_OBJECTS, CALLS_AS_TEXT, CALLS_BY_ARGUMENT
from tests.support.tokenizer.chat_templates import local_template

USER = Message("user", "Hi")
SCHEMA: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = Tool("get_weather", "Tells the weather.", SCHEMA)
CALL = Message("assistant", "", (ToolCall("c1", "get_weather", {"city": "Aix"}),), reasoning="Hm.")
RESULT = Message("tool", "sunny", tool_call_id="c1", name="get_weather")


def write_config(directory: Path, **fields: object) -> None:
    """Change the directory's tokenizer configuration."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(directory: Path) -> ChatTemplate | None:
    return load_chat_template(load_tokenizer(directory), timeout_s=60.0)


def render(template: ChatTemplate | None, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    assert template is not None
    return template.render(template.fields(Conversation(messages, tools)))


def test_a_template_gets_what_transformers_provides() -> None:
    source = """\
{% for m in messages %}
    {% if loop.index0 > 0 %}
        {% break %}
    {% endif %}
    {% generation %}
{{ bos_token ~ (m | tojson) ~ (strftime_now('%Y') | length) }}
    {% endgeneration %}
{% endfor %}
{{ tools is none }}{{ add_generation_prompt }}"""
    rendered = render(local_template(source, {"bos_token": "<s>"}), Message("user", "<é>"), USER)
    assert rendered == '<s>{"role": "user", "content": "<é>"}4\nTrueTrue'


def test_a_message_has_only_the_fields_that_are_set() -> None:
    template = local_template("{{ messages | tojson }}", {})
    assert json.loads(render(template, USER, CALL, RESULT)) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            # The name under which transformers passes it to gpt-oss.
            "thinking": "Hm.",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Aix"}}}
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"},
    ]


def test_tools_are_functions_or_none() -> None:
    template = local_template("{{ tools | tojson }}", {})
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
    assert json.loads(render(template, USER, tools=(TOOL,))) == [{"type": "function", "function": function}]
    assert render(template, USER) == "null"


def test_a_template_does_not_see_tools_that_must_not_be_called() -> None:
    template = local_template("{{ tools is none }}", {})
    fields = template.fields(Conversation((USER,), (TOOL,), ToolMode.NONE))
    assert template.render(fields) == "True"


def test_variables_reach_the_template() -> None:
    template = local_template("{{ enable_thinking }} {{ documents[0].title }} {{ eos_token }}", {"eos_token": "</s>"})
    variables: JsonObject = {"enable_thinking": False, "documents": [{"title": "A"}]}
    assert template.render(template.fields(Conversation((USER,), variables=variables))) == "False A </s>"


def test_calls_have_the_form_that_the_template_expects() -> None:
    features = TemplateFeatures(arguments_are_text=True, empty_content_is_none=True)
    template = local_template("{{ messages | tojson }}", {}, features=features)
    empty, full = json.loads(render(template, CALL, Message("assistant", "So:", CALL.tool_calls)))
    assert (empty["content"], full["content"]) == (None, "So:")
    assert empty["tool_calls"][0]["function"]["arguments"] == '{"city": "Aix"}'


@pytest.mark.parametrize("arguments", ['{"word": ', "[1]"])
def test_arguments_that_are_no_object_are_shown_in_any_form(arguments: str) -> None:
    call = Message("assistant", "", (ToolCall("c", "look_up", arguments),))
    for source in (CALLS_AS_OBJECTS, CALLS_AS_TEXT, CALLS_BY_ARGUMENT):
        features = find_features(partial(render_template, source, {}), None)
        assert arguments in render(local_template(source, {}, features=features), USER, call)


def test_a_conversation_with_tools_can_have_a_separate_template() -> None:
    template = local_template("plain", {}, tools_source="with tools")
    assert (render(template, USER), render(template, USER, tools=(TOOL,))) == ("plain", "with tools")
    assert (template.text, local_template("plain", {}).text) == ("plain\nwith tools", "plain")


def test_special_tokens_come_from_the_configuration(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}")
    write_config(tmp_path, eos_token={"content": "<|im_end|>", "lstrip": False}, add_bos_token=True)
    assert render(load(tmp_path), USER) == "<|im_start|><|im_end|>False"


@pytest.mark.parametrize(
    "template", ["from the configuration", [{"name": "default", "template": "from the configuration"}]]
)
def test_the_configuration_can_contain_the_template(tmp_path: Path, template: object) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    write_config(tmp_path, chat_template=template)
    assert render(load(tmp_path), USER) == "from the configuration"


def test_the_configuration_can_contain_a_template_for_tools(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    names = {"default": "plain", "tool_use": "{{ tools[0].function.name }}", "rag": "{{ unclosed"}
    write_config(tmp_path, chat_template=[{"name": name, "template": text} for name, text in names.items()])
    template = load(tmp_path)
    assert (render(template, USER), render(template, USER, tools=(TOOL,))) == ("plain", "get_weather")


def test_a_template_file_takes_precedence(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="from the file")
    write_config(tmp_path, chat_template="from the configuration")
    assert render(load(tmp_path), USER) == "from the file"


async def test_a_model_without_a_template_accepts_no_conversations(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    prompts = PromptEncoder(Encoder(tiny_tokenizer()), load(tmp_path))
    assert not prompts.has_chat_template
    with pytest.raises(TemplateFailedError):
        await prompts.encode(Conversation((USER,)), 256)


def test_a_template_that_is_not_a_string_is_refused(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    write_config(tmp_path, chat_template=7)
    with pytest.raises(ModelDirectoryError):
        load(tmp_path)


@pytest.mark.parametrize(
    "failure", ["{{ raise_exception('no ' + messages[0].content) }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}"]
)
def test_messages_that_make_the_template_fail_are_an_invalid_request(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    template = local_template(f"{{% if messages | length > 1 %}}{failure}{{% endif %}}", {})
    with pytest.raises(InvalidRequestError) as caught:
        render(template, Message("user", "a secret"), USER)
    assert caught.value.reason == "INVALID_REQUEST"
    assert [violation.field for violation in caught.value.violations] == ["chat.messages"]
    assert "secret" not in caught.value.message + caplog.text


@pytest.mark.parametrize("words", ["System role not supported", 'It isn\'t "so"', "x" * 600])
def test_a_templates_own_words_are_told(words: str) -> None:
    literal = json.dumps(words)
    template = local_template("{% generation %}{{ raise_exception(" + literal + ") }}{% endgeneration %}", {})
    with pytest.raises(InvalidRequestError) as caught:
        render(template, USER)
    [violation] = caught.value.violations
    assert violation.description == f"the chat template rejected the messages: {words[:500]}"


@pytest.mark.parametrize(
    "built", ["messages[0].content", "'role ' ~ messages[0].role", "'a' 'b' ~ messages[0].content"]
)
def test_words_that_a_template_builds_are_not(built: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(local_template(f"{{{{ raise_exception({built}) }}}}", {}), USER)
    assert caught.value.violations[0].description == "the chat template rejected the messages"


def test_a_render_does_not_see_state_of_an_earlier_one() -> None:
    template = local_template(CHATML, {})
    first = render(template, USER)
    render(template, Message("system", "other"), USER)
    assert render(template, USER) == first
