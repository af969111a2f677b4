"""A conversation with the model."""

from __future__ import annotations

import grpc

from lockstep.v1 import tokenizer_pb2
from services.cli.clients.client import Answer, stream_answer
from services.cli.clients.key_flag import Metadata
from services.cli.clients.word_wrap import WordWrap


class Conversation:
    """Keeps turns with an answer, even a partial one; `system` is empty for no system prompt."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        request: tokenizer_pb2.GenerateRequest,
        system: str = "",
        timeout_s: float | None = None,
        wrap: WordWrap | None = None,
        metadata: Metadata = (),
    ) -> None:
        """`request` has every field but the messages; for `wrap` and `metadata` see `stream_answer`."""
        self.system = system
        self._channel = channel
        self._request = request
        self._timeout_s = timeout_s
        self._wrap = wrap
        self._metadata = metadata
        self._messages: list[tokenizer_pb2.ChatMessage] = []

    def reset(self) -> None:
        """Forget the turns."""
        self._messages.clear()

    async def answer(self, turn: str) -> None:
        """Stream the answer to the terminal; a partial one is kept on cancellation.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        question = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content=turn)
        request = tokenizer_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if self.system:
            request.chat.messages.add(role=tokenizer_pb2.ROLE_SYSTEM, content=self.system)
        request.chat.messages.extend([*self._messages, question])
        answer = Answer()
        try:
            await stream_answer(
                self._channel, request, answer, timeout_s=self._timeout_s, metadata=self._metadata, wrap=self._wrap
            )
        except grpc.aio.AioRpcError:
            raise
        except BaseException:
            self._keep(question, answer)
            raise
        self._keep(question, answer)

    def _keep(self, question: tokenizer_pb2.ChatMessage, answer: Answer) -> None:
        if answer.text or answer.reasoning:
            reply = tokenizer_pb2.ChatMessage(
                role=tokenizer_pb2.ROLE_ASSISTANT, content=answer.text, reasoning=answer.reasoning
            )
            self._messages += [question, reply]
