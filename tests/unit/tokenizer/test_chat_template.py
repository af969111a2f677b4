from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.tokenizer.chat_template import ChatTemplate, Message, load_chat_template
from services.tokenizer.encoder import Encoder
from services.tokenizer.prompts import PromptEncoder
from shared.errors import InvalidRequestError, TemplateFailedError
from shared.model_dir import ModelDirectoryError
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer, write_tiny_tokenizer

USER = Message("user", "Hi")

CHATS = [
    [USER],
    [Message("system", "Be brief."), USER],
    [USER, Message("assistant", "Hello!"), Message("user", "12345 你好 😀\n\n  def f(): pass")],
    [Message("user", ""), Message("assistant", ""), Message("user", " \t")],
    [Message("user", "{{ 7 * 7 }} {% raw %} }}")],
]


def write_config(directory: Path, **fields: object) -> None:
    """Change the directory's tokenizer configuration."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("chat", CHATS)
async def test_text_and_ids_equal_those_of_transformers(model_dir: Path, chat: list[Message]) -> None:
    reference: Any = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": message.role, "content": message.content} for message in chat]
    prompts = PromptEncoder(Encoder(tiny_tokenizer(), num_threads=1), load_chat_template(model_dir))
    text, token_ids = await prompts.render_chat(chat)
    assert text == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert token_ids.tolist() == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_template_has_what_transformers_gives_it() -> None:
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
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([Message("user", "<é>"), USER])
    assert rendered == '<s>{"role": "user", "content": "<é>"}4\nTrueTrue'


def test_special_tokens_come_from_the_configuration(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}")
    write_config(tmp_path, eos_token={"content": "<|im_end|>", "lstrip": False}, add_bos_token=True)
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([USER]) == "<|im_start|><|im_end|>False"


@pytest.mark.parametrize(
    "template", ["from the configuration", [{"name": "default", "template": "from the configuration"}]]
)
def test_the_configuration_may_hold_the_template(tmp_path: Path, template: object) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    write_config(tmp_path, chat_template=template)
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([USER]) == "from the configuration"


def test_the_templates_own_file_comes_first(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="from the file")
    write_config(tmp_path, chat_template="from the configuration")
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([USER]) == "from the file"


async def test_a_model_without_a_template_takes_no_conversations(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    prompts = PromptEncoder(Encoder(tiny_tokenizer(), num_threads=1), load_chat_template(tmp_path))
    assert not prompts.has_chat_template
    with pytest.raises(TemplateFailedError):
        await prompts.encode((USER,))


@pytest.mark.parametrize(
    "source",
    [
        "{{ unclosed",
        "{{ messages[5].content }}",
        "{{ raise_exception('never') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_on_a_plain_message_is_refused(tmp_path: Path, source: str) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=source)
    with pytest.raises(ModelDirectoryError, match="plain message"):
        load_chat_template(tmp_path)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    write_config(tmp_path, chat_template=7)
    with pytest.raises(ModelDirectoryError):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    "failure", ["{{ raise_exception('no ' + messages[0].content) }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}"]
)
def test_messages_that_make_the_template_fail_are_to_blame(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    template = ChatTemplate(f"{{% if messages | length > 1 %}}{failure}{{% endif %}}", {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render([Message("user", "a secret"), USER])
    assert caught.value.reason == "INVALID_REQUEST"
    assert [violation.field for violation in caught.value.violations] == ["chat.messages"]
    assert "secret" not in caught.value.message + caplog.text


def test_a_later_render_knows_nothing_of_an_earlier_one() -> None:
    template = ChatTemplate(CHATML, {})
    first = template.render([USER])
    template.render([Message("system", "other"), USER])
    assert template.render([USER]) == first
