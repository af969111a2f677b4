"""The service as the HTTP API uses it: the model, the link to the cell, the requests in flight."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.exchange.linked_cell import LinkedCell
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.http.streams.answer_facts import PromptFacts
from services.tokenizer.request.large_messages import checked
from services.tokenizer.request.model import ServedModel
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.tracing.request_trace import Tracer
from shared.errors import ModelNotFoundError, NotReadyError
from shared.network.probes import Probes
from shared.tenants.client_keys import ClientKeys


@dataclass(frozen=True, slots=True)
class Backend:
    """What the calls need of the service."""

    model: ServedModel
    scheduler: SchedulerClient
    live: LiveRequests
    totals: RequestTotals
    max_unread_s: float
    model_names: tuple[str, ...]
    """Names that clients may give; the first one is in answers. At least one."""
    probes: Probes
    """Probes of the process."""
    client_keys: ClientKeys | None = None
    """None means that clients need no key."""
    tracer: Tracer | None = None
    """What makes the spans of requests; None makes none."""
    is_lenient: bool = False
    """Whether fields that nobody knows have no effect, instead of being refused."""

    def cell(self) -> LinkedCell:
        """The linked cell, or the last one.

        Raises:
            DrainingError: the service is stopping.
            NotReadyError: there has been no link yet.
        """
        self.live.check_open()
        return self.scheduler.cell()

    def check_health(self) -> None:
        """Check whether a request would be computed now.

        Raises:
            DrainingError: the service is stopping.
            NotReadyError: it would wait.
        """
        self.live.check_open()
        why_not = self.scheduler.why_not_computed
        if why_not is not None:
            raise NotReadyError(why_not)

    def check_ready(self) -> None:
        """Check whether clients should be sent here.

        Raises:
            DrainingError: the service is stopping.
            NotReadyError: requests have not been computed for longer than the bridging time.
        """
        self.live.check_open()
        why_not = self.probes.why_not_ready
        if why_not is not None:
            raise NotReadyError(why_not)

    def check_model(self, name: str | None) -> None:
        """Check the name that a client gave, if it gave one.

        Raises:
            ModelNotFoundError: it is another model's.
        """
        if name is not None and name not in self.model_names:
            raise ModelNotFoundError.from_name(name, self.model_names)

    async def render(
        self, prompt: tokenizer_pb2.Prompt, *, max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> tuple[str, list[int]]:
        """A prompt's text and token ids; raises as `PromptEncoder.encode`.

        Ids have no text and are returned unchecked.

        Args:
            prompt: The prompt.
            max_tokens: The most that it may have; the context length if None.
            add_special_tokens: Whether a text gets the post-processor's tokens.
        """
        prompts, max_tokens = self.model.prompts, max_tokens or self.cell().limits.context_length
        kind = prompt.WhichOneof("prompt")
        if kind == "chat":
            conversation = await checked(self.model.checking, prompt, partial(check_chat, prompt.chat))
            text, token_ids = await prompts.render_chat(conversation, max_tokens)
            return text, token_ids.tolist()
        if kind == "tokens":
            return "", list(prompt.tokens.token_ids)
        token_ids = await prompts.encode_text(prompt.text, max_tokens, add_special_tokens=add_special_tokens)
        return prompt.text, token_ids.tolist()

    async def prompt_facts(self, prompt: tokenizer_pb2.Prompt, num_kept: int) -> PromptFacts:
        """What answers may tell of a prompt, of which the last `num_kept` tokens are kept, or all if 0."""
        _, token_ids = await self.render(prompt, max_tokens=sys.maxsize if num_kept else None)
        token_ids = token_ids[-num_kept:]
        # What is out of range is refused later.
        is_known = token_ids and token_ids[0] < self.cell().limits.logits_width
        return PromptFacts(token_ids, self.token_text(token_ids[0]) if is_known else "")

    def token_text(self, token_id: int) -> str:
        """A token's text in isolation."""
        return self.model.texts.bytes_of(token_id).decode(errors="replace")
