"""Everything that the service reads from the model's directory, once, at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.tokenizer.chat_template import load_chat_template
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.detokenizer import Detokenizer, make_detokenizer_factory
from services.tokenizer.encoder import Encoder, load_tokenizer
from services.tokenizer.prompts import PromptEncoder
from shared.model_dir import model_digest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as text sees it."""

    name: str
    digest: str
    prompts: PromptEncoder
    make_detokenizer: Callable[[], Detokenizer]


def load_model(settings: TokenizerSettings) -> ServedModel:
    """Read the model's directory.

    Raises:
        ModelDirectoryError: a file is missing or malformed, or the chat template does not render a plain message.
    """
    tokenizer = load_tokenizer(settings.model_dir)
    encoder = Encoder(tokenizer, num_threads=settings.num_encode_threads)
    return ServedModel(
        settings.served_model_name,
        model_digest(settings.model_dir),
        PromptEncoder(encoder, load_chat_template(settings.model_dir)),
        make_detokenizer_factory(tokenizer),
    )
