"""Settings of the tokenizer service."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, FilePath, model_validator
from pydantic_settings import SettingsConfigDict

from services.tokenizer.scores.known_recipes import KNOWN_RECIPES
from shared.config import HttpPortSettings, ProcessSettings, SchedulerLossSettings, load_settings
from shared.model_files.model_dir import display_name
from shared.network.tls import Role
from shared.release import install_advice
from shared.setting_types import Addresses, ListenAddress, Names


def check_otlp_endpoint(endpoint: str) -> str:
    """Return a collector's URL unchanged.

    Raises:
        ValueError: it is none, or the packages that export spans are missing.
    """
    parts = urlsplit(endpoint)
    is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port
    if not is_url or endpoint.rstrip("/") != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if not all(map(_is_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"))):
        raise ValueError(f"needs OpenTelemetry: {install_advice(['tracing'])}")
    return endpoint


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        # A package that it is in.
        return False


OtlpEndpoint = Annotated[str, AfterValidator(check_otlp_endpoint)]


class TokenizerSettings(SchedulerLossSettings, ProcessSettings, HttpPortSettings):
    """The tokenizer service's settings."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_TOKENIZER_", cli_prog_name="python -m services.tokenizer")

    role = Role.TOKENIZER

    listen: ListenAddress = Field(
        default="127.0.0.1:50051",
        description="Address for clients: unix:PATH, HOST:PORT on loopback, or with TLS any HOST:PORT.",
    )
    model_dir: Path = Field(description="Model directory, in the Hugging Face layout.")
    model_name: str | None = Field(
        default=None, min_length=1, description="Model name that requests may give; the directory's name if not set."
    )
    served_model_name: Names = Field(
        default=(),
        description="Names that clients of the HTTP API may give the model, separated by commas; the first one is in "
        "its answers. Without them, it is the model's name.",
    )
    http_allowed_hosts: Names = Field(
        default=(),
        description="Hosts, without ports, that HTTP requests may name, separated by commas. On a loopback address "
        "they are allowed besides the loopback's own names; on others any host is, if not set.",
    )
    cors_origin: Names = Field(
        default=(),
        description="Origins whose web pages may use the HTTP API, such as https://chat.example.org, separated by "
        "commas.",
    )
    max_http_connections: int = Field(
        default=4096,
        ge=1,
        description="HTTP connections that may be open; a further one replaces the one that has waited longest for a "
        "request, and is refused if none waits.",
    )
    lenient_fields: bool = Field(
        default=False,
        description="Whether fields of HTTP requests that nobody knows have no effect and are named in the header "
        "x-lockstep-ignored; otherwise they are refused, since they may change the answer.",
    )
    scheduler: Addresses = Field(
        default=("127.0.0.1:50054",),
        min_length=1,
        description="Addresses of the cell's schedulers (their --cell-listen), separated by commas. It links to "
        "all of them, and uses the first that holds workers.",
    )
    scheduler_silence_s: float = Field(
        default=3.0,
        ge=1.0,
        allow_inf_nan=False,
        description="Seconds of silence after which a scheduler counts as lost.",
    )
    bridging_s: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds without workers after which /readyz and the health of TokenizerService say no, so that "
        "balancers send clients elsewhere; until then requests wait here. If not set, twice as long as the cell's "
        "workers took to start, and at least 10; 60 while that is not known.",
    )
    max_unread_s: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A request is aborted once its client has read none of its responses for this many seconds.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Seconds that answers in flight may take once the service is asked to end; new calls are refused "
        "with DRAINING. Another signal, more than 2 s later, ends it at once.",
    )
    num_encode_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that encode and decode short texts, and processes that render short chats; long ones get "
        "one more of each.",
    )
    otlp_endpoint: OtlpEndpoint | None = Field(
        default=None,
        description="OpenTelemetry collector that gets the spans of requests, by OTLP over gRPC: http://HOST:PORT, or "
        "https://HOST:PORT with TLS. Needs the extra `tracing`.",
    )

    template_timeout_s: float = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="CPU seconds that the chat template may take to render a chat, or at start a plain message.",
    )
    chat_template: FilePath | None = Field(
        default=None, description="File with a chat template (Jinja), used instead of the model's own."
    )
    reply_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "deepseek_v3",
        "deepseek_v32",
        "harmony",
        "kimi_k2",
        "glm4",
        "qwen3_coder",
        "mistral",
        "generic",
    ] = Field(
        default="auto",
        description="Parser that splits chat replies into text, reasoning and tool calls; auto picks the one that fits "
        "the chat template.",
    )
    generic_tools: bool = Field(
        default=False,
        description="Whether a model whose chat template takes no tools gets them too, in a message of the prompt, and "
        "calls them as the parser `generic` reads it; otherwise requests with tools are refused.",
    )

    score_template: str | None = Field(
        default=None,
        min_length=1,
        description="How scores make a prompt of a query and a document, for a model whose directory does not say it "
        "(files of sentence-transformers with a LogitScore): `qwen3-reranker`, or a file with a chat template that has "
        "messages of the roles `system` (the instruction, if any), `query` and `document`.",
    )
    score_labels: Names = Field(
        default=(),
        max_length=2,
        description="The tokens that scores by a template from a file tell apart: the positive one and the other, such "
        "as yes,no.",
    )

    grammar_timeout_s: float = Field(
        default=2.0,
        gt=0.0,
        allow_inf_nan=False,
        description="CPU seconds that compiling a request's structured output may take.",
    )
    grammar_memory_gib: float = Field(
        default=1.0,
        ge=0.5,
        allow_inf_nan=False,
        description="Memory limit of each of the two processes that compile structured outputs, in GiB.",
    )

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        needs_labels = self.score_template is not None and self.score_template not in KNOWN_RECIPES
        if len(set(self.score_labels)) != (2 if needs_labels else 0):
            raise ValueError("score_labels must be two different tokens with a score_template from a file, else none")
        return self

    @model_validator(mode="after")
    def _check_generic_tools(self) -> Self:
        if self.generic_tools and self.reply_parser not in ("auto", "generic"):
            raise ValueError(f"--generic-tools cannot be used with --reply-parser {self.reply_parser}")
        return self

    @property
    def name_of_model(self) -> str:
        """The model name that requests may give."""
        return self.model_name or display_name(self.model_dir)


if __name__ == "__main__":
    # `lockstep serve` checks the flags this way before it starts any process.
    settings = load_settings(TokenizerSettings)
