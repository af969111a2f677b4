"""The routes of the HTTP API, one row each: the app, its description and protos/README.md are made from this table.

What a body may have is in `reading/readers.py`, by the function that reads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aiohttp import web

from services.tokenizer.http.anthropic.events import ID_PREFIX, PING, MessageAnswer, MessageEvents
from services.tokenizer.http.anthropic.request import read_count_request, read_messages_request
from services.tokenizer.http.calls import AnswerForm
from services.tokenizer.http.connections.clients import Audience
from services.tokenizer.http.embeddings.answers import embedding_value
from services.tokenizer.http.embeddings.requests import read_embedding_request
from services.tokenizer.http.handlers import Handlers
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.openai.choice_forms import ChatChoiceForm, CompletionChoiceForm
from services.tokenizer.http.openai.completion_request import read_completion_request
from services.tokenizer.http.openai.token_requests import read_detokenize_request, read_tokenize_request
from services.tokenizer.http.openai.whole_answers import MergedAnswer, chat_answer, completion_answer
from services.tokenizer.http.openai_responses.events import ResponseEvents, ResponseObject
from services.tokenizer.http.openai_responses.request import read_response_request
from services.tokenizer.http.page.files import PAGE_FILES
from services.tokenizer.http.scores.answers import rating_value
from services.tokenizer.http.scores.requests import read_rerank_request, read_score_request
from services.tokenizer.http.streams.pieces import Pieces
from services.tokenizer.server.embed import EmbedCall
from services.tokenizer.server.score import ScoreCall
from services.tokenizer.tracing.request_trace import TEXT_COMPLETION

CHAT = AnswerForm(
    "chatcmpl-",
    partial(Pieces, kind="chat.completion.chunk", make_form=ChatChoiceForm),
    partial(MergedAnswer, make=chat_answer),
)
COMPLETION = AnswerForm(
    "cmpl-",
    partial(Pieces, kind="text_completion", make_form=CompletionChoiceForm),
    partial(MergedAnswer, make=completion_answer),
    operation=TEXT_COMPLETION,
)
MESSAGES = AnswerForm(ID_PREFIX, MessageEvents, MessageAnswer, PING)
RESPONSE = AnswerForm("resp_", ResponseEvents, ResponseObject)

STREAM = "text/event-stream"
STATE_ROUTE = "/lockstep/state"

_GENERATION_ERRORS = (404, 429, 499, 501, 503, 504)


@dataclass(frozen=True, slots=True)
class Route:
    """A method of a path. No two rows have the same path."""

    method: Literal["GET", "POST"]
    """GET has HEAD with it."""
    path: str
    """As in the description: `{name}` is a part that may have any text, slashes too."""
    handle: Callable[..., Awaitable[web.StreamResponse]]
    """A method of `Handlers`; it gets the request and, with a body, `read`."""
    summary: str
    """In the description and the document."""
    read: Callable[..., Any] | None = None
    """What reads the body, one of `FIELDS`; None if there is none."""
    answer: str | None = None
    """The name of the answer's schema, if that is JSON."""
    media_types: tuple[str, ...] = ()
    """Media types of other answers."""
    errors: tuple[int, ...] = ()
    """Statuses of errors beyond those that every route, or every body, has."""
    audience: Audience = Audience.CLIENTS
    note: str = ""
    """Markdown, for the document alone."""
    is_described: bool = True
    """Whether it is in `/openapi.json`."""

    @property
    def is_streamed(self) -> bool:
        """Whether it continues prompts, whose answer may be a stream."""
        return STREAM in self.media_types

    @property
    def is_counted(self) -> bool:
        """Whether the metrics count what becomes of its requests: the cell computes the answers."""
        return self.is_streamed or self.handle in (_RATE, _EMBED)


_RATE = partial(Handlers.items, make_call=ScoreCall, value_of=rating_value)
_EMBED = partial(Handlers.items, make_call=EmbedCall, value_of=embedding_value)


def _generation(path: str, form: AnswerForm, read: Callable[..., Any], summary: str, answer: str) -> Route:
    handle = partial(Handlers.answer, form=form)
    return Route("POST", path, handle, summary, read, answer, media_types=(STREAM,), errors=_GENERATION_ERRORS)


def _question(
    path: str, handle: Callable[..., Any], read: Callable[..., Any], summary: str, answer: str, note: str = ""
) -> Route:
    return Route("POST", path, handle, summary, read, answer, errors=_GENERATION_ERRORS, note=note)


def _rating(path: str, read: Callable[..., Any], summary: str, answer: str, note: str) -> Route:
    return Route("POST", path, _RATE, summary, read, answer, errors=_GENERATION_ERRORS, note=note)


_AS_IN_VLLM = "as in vLLM"
_SCORES = "by vLLM's fields or SGLang's; [scores](#scores-over-http)"
_RANKS = "by Jina's and Cohere's fields or TEI's; [scores](#scores-over-http)"
_VECTORS = "by OpenAI's fields, where the cell [serves vectors](#vectors-over-http)"
_LENGTH = "with `max_model_len`, by each `--served-model-name`"

ROUTES = (
    _generation("/v1/chat/completions", CHAT, read_chat_request, "Continue a chat", "ChatAnswer"),
    _generation("/v1/completions", COMPLETION, read_completion_request, "Continue prompts", "CompletionAnswer"),
    _generation("/v1/messages", MESSAGES, read_messages_request, "Answer in Anthropic's form", "MessageAnswer"),
    _question(
        "/v1/messages/count_tokens", Handlers.count_tokens, read_count_request, "Count a prompt's tokens", "TokenCount"
    ),
    _generation("/v1/responses", RESPONSE, read_response_request, "Continue a conversation of items", "ResponseAnswer"),
    _question(
        "/v1/responses/input_tokens",
        Handlers.count_input_tokens,
        read_response_request,
        "Count a prompt's tokens",
        "InputTokens",
    ),
    _question(
        "/v1/chat/completions/render",
        Handlers.render,
        read_chat_request,
        "Show a chat as the model reads it",
        "RenderedPrompts",
        "its text and its token ids",
    ),
    _question(
        "/v1/completions/render",
        Handlers.render,
        read_completion_request,
        "Show prompts as the model reads them",
        "RenderedPrompts",
        "their texts and their token ids",
    ),
    _question("/tokenize", Handlers.tokenize, read_tokenize_request, "Encode a text or a chat", "Tokens", _AS_IN_VLLM),
    _question(
        "/detokenize", Handlers.detokenize, read_detokenize_request, "Decode token ids", "DecodedTokens", _AS_IN_VLLM
    ),
    *(
        _rating(path, read_score_request, "Rate texts by the model's recipe or by labels", "Scores", _SCORES)
        for path in ("/v1/score", "/score")
    ),
    *(
        _rating(path, read_rerank_request, "Rank documents by how well they fit a query", "Ranks", _RANKS)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Route(
        "POST",
        "/v1/embeddings",
        _EMBED,
        "Make vectors of texts by the model's recipe",
        read_embedding_request,
        "Embeddings",
        errors=_GENERATION_ERRORS,
        note=_VECTORS,
    ),
    Route("GET", "/v1/models", Handlers.models, "List the model's names", answer="Models", errors=(503,), note=_LENGTH),
    Route(
        "GET", "/v1/models/{id}", Handlers.model, "Describe the model", answer="Model", errors=(404, 503), note=_LENGTH
    ),
    Route(
        "GET",
        "/health",
        Handlers.health,
        "Whether a request would be computed now",
        errors=(503,),
        audience=Audience.EVERYBODY,
        note="200 if so, else 503",
    ),
    Route(
        "GET",
        "/readyz",
        Handlers.ready,
        "Whether a balancer should send clients here",
        errors=(503,),
        audience=Audience.EVERYBODY,
        note="200 if so, else 503; it [bridges a restart of workers](../services/README.md#what-happens-at-each-fault)",
    ),
    Route(
        "GET",
        "/ping",
        Handlers.ping,
        "Whether the process is alive",
        audience=Audience.EVERYBODY,
        note="200 while it is",
    ),
    Route("GET", "/version", Handlers.version, "The release", answer="Release", audience=Audience.EVERYBODY),
    Route(
        "GET",
        "/metrics",
        Handlers.metrics,
        "Metrics in Prometheus' text format",
        media_types=("text/plain",),
        audience=Audience.ALL_OR_NONE,
        note="what the management port shows",
    ),
    Route(
        "GET",
        STATE_ROUTE,
        Handlers.state,
        "The cell's state, for operators",
        answer="State",
        errors=(403, 404, 503),
        audience=Audience.OPERATORS,
        note="`GetState`'s answer in protobuf's JSON form; without keys "
        "[for the machine itself](../deploy/README.md#http)",
    ),
    Route("GET", "/openapi.json", Handlers.openapi, "This API", note="the fields of all routes", is_described=False),
    Route(
        "GET",
        "/",
        Handlers.page,
        "A page with a chat, and the cell if its state may be read",
        note="it asks for the files below `/lockstep/`",
        audience=Audience.EVERYBODY,
        is_described=False,
    ),
    *(
        Route("GET", path, Handlers.page_file, "A file of the page", audience=Audience.EVERYBODY, is_described=False)
        for path in PAGE_FILES
    ),
)

# Other parts of OpenAI's, Anthropic's, vLLM's, llama.cpp's and Ollama's APIs, which are refused by name.
NOT_SUPPORTED = (
    "/v1/messages/batches",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/moderations",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning/jobs",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pooling",
    "/classify",
    "/props",
    "/slots",
    "/completion",
    "/infill",
    "/apply-template",
    "/api/tags",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/ps",
    "/api/pull",
    "/api/embed",
    "/api/embeddings",
    "/api/version",
)
