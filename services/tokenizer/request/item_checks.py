"""What requests for many items have in common: each item asks the cell for one token, which is not read."""

from __future__ import annotations

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.request.checks import AnswerForm, CheckedRequest, Prompt
from shared.errors import ModelNotFoundError, Violation
from shared.request.request_fields import (
    raise_violations,
    read_cache_salt,
    read_determinism,
    read_priority,
    read_request_id,
)
from shared.request.sampling_params import SamplingParams
from shared.tenants.client_keys import Client

_MAX_ID = 64


class ItemChecks:
    """Reads the fields of one request that do not say what its items are; `violations` collects what is wrong."""

    def __init__(
        self,
        request: tokenizer_pb2.ScoreRequest | tokenizer_pb2.EmbedRequest,
        model_name: str,
        client: Client,
        *,
        most_items: int,
    ) -> None:
        """Read what names the request.

        Raises:
            PermissionDeniedError: it has a higher priority than its client may ask for.
            ModelNotFoundError: it names another model.
        """
        self._request = request
        self._client = client
        self._priority = client.resolve_priority(request.priority)
        if request.HasField("model") and request.model != model_name:
            raise ModelNotFoundError.from_name(request.model, [model_name])
        self.violations: list[Violation] = []
        self._id = read_request_id(request.request_id if request.HasField("request_id") else None, self.violations)
        # The cell knows an item by the id and a suffix.
        most = _MAX_ID - len(f"-{most_items - 1}")
        if len(self._id) > most:
            rule = f"must have at most {most} characters"
            self.violations.append(Violation("request_id", "OUT_OF_RANGE", rule))

    def checked(
        self,
        prompts: tuple[Prompt, ...],
        sampling: SamplingParams,
        *,
        is_empty: bool = False,
        max_prompt_tokens: int | None = None,
    ) -> CheckedRequest:
        """The request, whose items have these prompts; `is_empty` as in `AnswerForm`.

        Raises:
            InvalidRequestError: there are violations; it names the first ones.
        """
        request, violations = self._request, self.violations
        checked = CheckedRequest(
            self._id,
            prompts,
            sampling,
            has_max_tokens=True,
            n=1,
            form=AnswerForm(is_raw=True, is_empty=is_empty),
            bad_words=(),
            structured_output=None,
            priority=read_priority(self._priority, violations),
            cache_salt=read_cache_salt(request.cache_salt, violations),
            is_exact=read_determinism(request.determinism, violations),
            max_prompt_tokens=max_prompt_tokens,
            tenant=self._client.tenant,
        )
        raise_violations(violations)
        return checked
