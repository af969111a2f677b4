"""Settings of the tokenizer service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.config import Addresses, LocalAddress, ServiceSettings, load_settings


class TokenizerSettings(ServiceSettings):
    """What the tokenizer service can be told."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_TOKENIZER_", cli_prog_name="python -m services.tokenizer")

    listen: LocalAddress = Field(
        default="127.0.0.1:50051", description="Address to serve on: unix:PATH, or HOST:PORT on loopback."
    )
    model_dir: Path = Field(description="The model's directory, in Hugging Face's layout.")
    model_name: str | None = Field(
        default=None, min_length=1, description="The name that requests may give; the directory's own if not set."
    )
    scheduler: Addresses = Field(
        default=("127.0.0.1:50054",),
        min_length=1,
        description="Addresses of the cell's schedulers (their --cell-listen), with commas between them; the first one "
        "that serves is used.",
    )
    scheduler_silence_s: float = Field(
        default=3.0,
        ge=1.0,
        allow_inf_nan=False,
        description="A scheduler that gives no sign of life for so many seconds is lost.",
    )
    scheduler_lost_s: float = Field(
        default=60.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Requests in flight wait so many seconds for a scheduler that was lost. One that lives and waits "
        "for its workers is not lost.",
    )
    metrics_listen: LocalAddress | None = Field(
        default=None, description="Address to serve metrics for Prometheus on, as GET /metrics over HTTP."
    )
    max_unread_s: float = Field(
        default=30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A client that takes nothing of its answer for so many seconds loses it.",
    )
    num_encode_threads: int = Field(
        default=2, ge=1, le=64, description="Threads that encode, decode and render; long texts have one of their own."
    )

    template_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A chat template that uses more seconds of a processor for a plain message at start is refused.",
    )
    reply_parser: Literal["auto", "none", "hermes", "llama3_json", "deepseek_v3", "harmony", "glm4"] = Field(
        default="auto",
        description="How replies to chats are read into tool calls and reasoning; auto goes by the chat template.",
    )

    grammar_timeout_s: float = Field(
        default=2.0,
        gt=0.0,
        allow_inf_nan=False,
        description="A request whose structured output uses more seconds of a processor to compile is refused.",
    )
    grammar_memory_gib: float = Field(
        default=1.0,
        ge=0.5,
        allow_inf_nan=False,
        description="Memory of each of the two processes that compile structured outputs, in GiB.",
    )

    @property
    def served_model_name(self) -> str:
        """The name that requests may give."""
        return self.model_name or self.model_dir.resolve().name


if __name__ == "__main__":
    # `lockstep serve` asks whether the flags are good, before it starts anything.
    load_settings(TokenizerSettings)
