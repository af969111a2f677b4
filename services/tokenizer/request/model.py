"""What the service loads from the model's directory at start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.tokenizer.chat.chat_template import load_chat_template
from services.tokenizer.chat.template_renderer import RendererMaker, TemplateRenderer
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.grammar.grammar_child import TrialLimits
from services.tokenizer.grammar.structured_output import FormCompiler
from services.tokenizer.request.embed_checks import Vectors
from services.tokenizer.request.model_checks import can_compile_grammars, warn_of_unknown_tokens
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.request.reply_parsers import ReplyParsers, lacks_tools, load_reply_parsers
from services.tokenizer.scores.find_recipe import RecipeFinder
from services.tokenizer.scores.recipe import Scores
from services.tokenizer.text.detokenizer import TokenTexts, make_token_texts
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.encoding_pools import EncodingPool
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.model_files.model_dir import (
    CONFIG,
    ModelDirectoryError,
    architectures_of,
    digest_of,
    is_multimodal,
    read_config,
    read_file,
)
from shared.model_files.sentence_files import read_vector_recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything about the model that requests need."""

    name: str
    digest: str
    prompts: PromptEncoder
    texts: TokenTexts
    reply_parsers: ReplyParsers
    form_compiler: FormCompiler
    longest_token_bytes: int
    """The most bytes of text that one token can have."""
    serves_text_only: bool
    """Whether the model could also read images, video or sound."""
    scores: Scores
    """What pairs are rated by."""
    vectors: Vectors
    """What texts become, where the cell makes vectors."""
    checking: EncodingPool
    """The thread in which large messages are checked, and grammars of replies are written."""

    @property
    def stuck(self) -> str | None:
        """What takes too long to end ever, in a few words; None if nothing does."""
        return self.prompts.stuck or self.checking.stuck

    def close(self) -> None:
        """End the processes that render chats and compile grammars."""
        self.prompts.close()
        self.scores.close()
        self.form_compiler.close()


def load_model(settings: TokenizerSettings, *, make_renderer: RendererMaker = TemplateRenderer) -> ServedModel:
    """Read the model's directory.

    Raises:
        ModelDirectoryError: a file is missing or malformed, an EOS token is outside the vocabulary, or the chat
            template fails its trial.
    """
    model_tokenizer = load_tokenizer(settings.model_dir, chat_template=settings.chat_template)
    tokenizer = model_tokenizer.backend
    encoder = Encoder(tokenizer)
    vocabulary = encoder.vocabulary
    warn_of_unknown_tokens(vocabulary, settings.model_dir)
    config = read_config(settings.model_dir)
    architecture, serves_text_only = next(iter(architectures_of(config)), ""), is_multimodal(config)
    scores = RecipeFinder(
        settings.model_dir,
        settings.name_of_model,
        model_tokenizer,
        setting=settings.score_template,
        labels=settings.score_labels,
        make_renderer=lambda source: make_renderer(
            {source: False}, model_tokenizer.special_tokens, cpu_s=settings.template_timeout_s
        ),
    ).find()
    # A reranker's template would leave out what a chat's user says.
    template = (
        None
        if scores.owns_template
        else load_chat_template(
            model_tokenizer,
            timeout_s=settings.template_timeout_s,
            architecture=architecture,
            make_renderer=make_renderer,
            lacks_tools=partial(lacks_tools, architecture) if settings.generic_tools else lambda _: False,
        )
    )
    prompts = PromptEncoder(encoder, template, num_threads=settings.num_encode_threads)
    parsers = load_reply_parsers(architecture, prompts, name=settings.reply_parser)
    logger.info(
        "model read",
        extra={
            "model": settings.name_of_model,
            "tool_parser": parsers.tool_parser,
            "reasoning_parser": parsers.reasoning_parser,
            "chat_template": prompts.template_digest,
            "score_recipe": scores.name,
            "serves_text_only": serves_text_only,
        },
    )
    can_compile = can_compile_grammars(model_tokenizer)
    grammar_limits = TrialLimits(settings.grammar_timeout_s, round(settings.grammar_memory_gib * 2**30))
    return ServedModel(
        settings.name_of_model,
        digest_of(read_file(settings.model_dir, CONFIG), model_tokenizer.files),
        prompts,
        make_token_texts(vocabulary),
        parsers,
        FormCompiler(settings.model_dir, grammar_limits, can_compile=can_compile),
        vocabulary.longest_bytes,
        serves_text_only,
        scores,
        _find_vectors(settings.model_dir, config),
        # One: what it does takes the interpreter from the event loop.
        EncodingPool(1, "check"),
    )


def _find_vectors(model_dir: Path, config: Mapping[str, Any]) -> Vectors:
    """What the directory's files say; nothing is wrong with a chat model that has none."""
    size = config.get("hidden_size")
    try:
        recipe = read_vector_recipe(model_dir)
    except ModelDirectoryError:
        # Workers that embed say what is wrong: they read the same files.
        recipe = None
    if recipe is None or type(size) is not int:
        return Vectors(None, "the model's directory has no recipe that makes vectors")
    return Vectors(recipe, size=size)
