"""The public RPCs."""

from __future__ import annotations

from functools import partial

import grpc
import numpy as np

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.answer.whole_answer import WholeAnswer
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.exchange.linked_cell import LinkedCell
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.request.large_messages import checked
from services.tokenizer.request.model import ServedModel
from services.tokenizer.server.embed import EmbedCall
from services.tokenizer.server.generate import CallTerms, GenerateCall, Writer
from services.tokenizer.server.live_requests import LiveRequests
from services.tokenizer.server.score import ScoreCall
from services.tokenizer.text_size import check_text
from services.tokenizer.tracing.request_trace import CHAT, TEXT_COMPLETION, Tracer, traced
from shared.errors import InvalidRequestError, Violation
from shared.network.access import get_caller
from shared.network.response_writer import ResponseWriter
from shared.request.limits import check_token_ids
from shared.request.request_fields import read_time_left

TOKENIZER_SERVICE = "lockstep.v1.TokenizerService"


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves clients, while linked to the cell and not stopping; tokenizer.proto has the contracts."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: SchedulerClient,
        live: LiveRequests,
        *,
        totals: RequestTotals,
        max_unread_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        """Serve requests.

        Args:
            model: The served model.
            scheduler: The link to the cell.
            live: The requests in flight over all APIs.
            totals: Where they are counted.
            max_unread_s: A request is aborted once its client has read nothing for this long.
            tracer: What makes the spans of requests; None makes none.
        """
        self._model = model
        self._scheduler = scheduler
        self._live = live
        self._totals = totals
        self._max_unread_s = max_unread_s
        self._tracer = tracer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def Generate(self, request: tokenizer_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continue a prompt; the responses are written to `context`."""
        with ResponseWriter(context, self._max_unread_s) as writer:
            await self._generate(request, writer, context)

    async def Complete(
        self, request: tokenizer_pb2.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.CompleteResponse:
        """Continue a prompt, with one response."""
        answer = WholeAnswer()
        await self._generate(request.request, answer, context)
        return answer.message()

    async def Score(
        self, request: tokenizer_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.ScoreResponse:
        """Rate documents or prompts."""
        call = ScoreCall(self._model, self._scheduler, self._live, totals=self._totals)
        return await call.serve(request, CallTerms(read_time_left(context.time_remaining()), client=get_caller()))

    async def Embed(
        self, request: tokenizer_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.EmbedResponse:
        """Make vectors of texts."""
        call = EmbedCall(self._model, self._scheduler, self._live, totals=self._totals)
        return await call.serve(request, CallTerms(read_time_left(context.time_remaining()), client=get_caller()))

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        """Encode text."""
        cell = self._cell()
        check_text(request.text)
        token_ids = await self._model.prompts.encode_text(request.text, cell.limits.context_length)
        return tokenizer_pb2.TokenizeResponse(token_ids=token_ids.tolist())

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Decode token ids."""
        cell = self._cell()
        _check_num_ids(len(request.token_ids), cell.limits.context_length)
        token_ids = np.array(request.token_ids, np.uint32)
        check_token_ids(token_ids, cell.limits.logits_width, field="token_ids")
        return tokenizer_pb2.DetokenizeResponse(text=await self._model.prompts.decode(token_ids))

    async def RenderChat(
        self, request: tokenizer_pb2.RenderChatRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.RenderChatResponse:
        """Render a conversation and encode it."""
        context_length = self._cell().limits.context_length
        conversation = await checked(self._model.checking, request, partial(check_chat, request.chat))
        text, token_ids = await self._model.prompts.render_chat(conversation, context_length)
        return tokenizer_pb2.RenderChatResponse(text=text, token_ids=token_ids.tolist())

    async def GetModelInfo(
        self, request: tokenizer_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.GetModelInfoResponse:
        """Describe the served model."""
        cell = self._cell()
        return tokenizer_pb2.GetModelInfoResponse(
            model=self._model.name,
            model_digest=self._model.digest,
            context_length=cell.limits.context_length,
            logits_width=cell.limits.logits_width,
            eos_token_ids=cell.eos_token_ids,
            num_pool_tokens=cell.limits.num_pool_tokens,
            has_chat_template=self._model.prompts.has_chat_template,
            has_exact_determinism=bool(cell.exact_fingerprint),
            tool_parser=self._model.reply_parsers.tool_parser,
            reasoning_parser=self._model.reply_parsers.reasoning_parser,
            weights_digest=cell.weights_digest,
            serves_text_only=self._model.serves_text_only,
            implementation=cell.implementation,
            score_recipe=self._model.scores.name,
            num_dimensions=self._model.vectors.size if cell.embeds else 0,
        )

    async def _generate(
        self, request: tokenizer_pb2.GenerateRequest, writer: Writer, context: grpc.aio.ServicerContext
    ) -> None:
        time_left_s = read_time_left(context.time_remaining())
        with traced(self._tracer, _operation_of(request), partial(_metadata_of, context)) as trace:
            terms = CallTerms(time_left_s, client=get_caller(), trace=trace)
            call = GenerateCall(self._model, self._scheduler, self._live, writer, totals=self._totals, terms=terms)
            await call.serve(request)

    def _cell(self) -> LinkedCell:
        self._live.check_open()
        return self._scheduler.cell()


def _operation_of(request: tokenizer_pb2.GenerateRequest) -> str:
    is_list = request.WhichOneof("prompt") == "prompts"
    prompts = request.prompts.prompts if is_list else [request]
    return CHAT if any(prompt.HasField("chat") for prompt in prompts) else TEXT_COMPLETION


def _metadata_of(context: grpc.aio.ServicerContext, name: str) -> list[str]:
    return [value for key, value in context.invocation_metadata() or () if key == name]


def _check_num_ids(num_ids: int, context_length: int) -> None:
    if num_ids > context_length:
        violation = Violation("token_ids", "OUT_OF_RANGE", f"must have at most {context_length} (the context length)")
        raise InvalidRequestError.from_violations([violation])
