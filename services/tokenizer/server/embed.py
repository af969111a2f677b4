"""The course of one `Embed` call: the vector of each item, cut and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.request.embed_checks import check_embed
from services.tokenizer.server.generate import CallTerms
from services.tokenizer.server.items import ItemsCall, request_id_of
from shared.errors import InternalError, NumericError
from shared.step.columns import Float32Column

# As torch's `normalize` has it, for vectors of length 0.
_SHORTEST = 1e-12
# What takes longer is done in a thread.
_MAX_VALUES_ON_LOOP = 16 * 1024


class EmbedCall(ItemsCall):
    """Serves one call."""

    async def serve(self, request: tokenizer_pb2.EmbedRequest, terms: CallTerms) -> tokenizer_pb2.EmbedResponse:
        """Make the vectors of all items.

        Raises:
            ServiceError: the request was refused, or an item ended with an error.
        """
        vectors: dict[int, Float32Column] = {}
        check = partial(check_embed, vectors=self.model.vectors)
        whole = await self.answer(request, check, replace(terms, vectors=vectors))
        size = request.dimensions if request.HasField("dimensions") else self.model.vectors.size
        work = partial(self._response, whole, vectors, size)
        return await self.model.checking.run(work) if len(vectors) * size > _MAX_VALUES_ON_LOOP else work()

    def _response(
        self, whole: tokenizer_pb2.CompleteResponse, vectors: Mapping[int, Float32Column], size: int
    ) -> tokenizer_pb2.EmbedResponse:
        recipe = self.model.vectors.recipe
        assert recipe is not None, "checked"
        response = tokenizer_pb2.EmbedResponse(
            usage=whole.usage, request_id=request_id_of(whole), model=self.model.name
        )
        for index, choice in enumerate(whole.choices):
            values = _usable(vectors.get(index), self.model.vectors.size)[:size]
            if recipe.is_normalized:
                values = values / max(float(np.linalg.norm(values)), _SHORTEST)
            response.embeddings.add(
                values=values.tolist(),
                usage=choice.finish.usage,
                recovery=choice.finish.recovery if choice.finish.HasField("recovery") else None,
            )
        return response


def _usable(values: Float32Column | None, size: int) -> Float32Column:
    """Raises ServiceError unless these are the values of a vector."""
    if values is None or len(values) != size:
        raise InternalError("the cell did not return a vector of the model's size")
    if not np.isfinite(values).all():
        raise NumericError("the model's hidden states were not finite")
    return values
