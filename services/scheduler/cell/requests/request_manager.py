"""The engine's client-facing side."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.cell_facts import CellFacts
from services.scheduler.cell.events import Action, ClientMessage, CloseClient, Deliver, Submission
from services.scheduler.cell.requests.intake import check_sequence, make_request
from services.scheduler.cell.requests.requests import Request, RequestTable
from services.scheduler.cell.requests.tenant_totals import TenantState, TenantTotals, describe_tenants
from services.scheduler.core.batch.sequence import Finish, RequestKey, Sequence
from services.scheduler.core.policy import CacheSettings, SchedulerPolicy
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd
from services.scheduler.core.stops import find_finish
from shared.errors import (
    AbortedByCallError,
    DeadlinePassedError,
    DuplicateRequestError,
    ExactUnavailableError,
    InvalidRequestError,
    NotReadyError,
    NotSupportedError,
    PoisonRequestError,
    QueueFullError,
    ServiceError,
    TenantLimitError,
    Violation,
    WorkersLostError,
)


class RequestManager:
    """Accepts requests, queues their choices, and ends them.

    Invariant: a choice is known here until its end has been delivered, its client has aborted the request, or a later
    attempt has replaced it (its client is notified of that too).
    """

    def __init__(
        self, policy: SchedulerPolicy, cache: CacheSettings, requests: RequestTable, cell: Cell, facts: CellFacts
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._requests = requests
        self._tenant_totals = TenantTotals()
        self._cell = cell
        self._facts = facts

    def on_message(self, message: ClientMessage, now: float) -> list[Action]:
        """Handle a client's message."""
        client = message.client
        outputs = OutputsByClient()
        for submission in message.submissions:
            if self._requests.is_taken(client, submission.handle, submission.n):
                return [*deliver(outputs), CloseClient(client, InvalidRequestError("a handle was used twice"))]
            try:
                self._submit(client, submission, outputs, now)
            except ServiceError as error:
                for choice in submission.open_choices:
                    outputs.add_end(client, RequestEnd(submission.handle_of(choice), error=error))
        for handle, num_tokens in message.stop_ats:
            seq = self._requests.remove_choice(client, handle)
            if seq is not None:
                outputs.add_end(client, self._cell.stop_at(seq, num_tokens, now))
                self._count_completion(seq)
        for handle in message.aborts:
            request = self._requests.by_handle(client, handle)
            if request is not None:
                self._abort(request, now)
        return deliver(outputs)

    def on_client_closed(self, client: int, now: float) -> None:
        """Abort a client's requests."""
        for request in self._requests.of_client(client):
            self._abort(request, now)

    def on_abort_call(self, key: RequestKey, now: float) -> list[Action]:
        """End a request of any client."""
        request = self._requests.by_key(key)
        if request is None:
            return []
        return self._fail([request], AbortedByCallError("another call aborted the request"), now)

    def expire(self, now: float) -> list[Action]:
        """End the requests past their deadlines."""
        first = self._requests.first_deadline
        if first is None or first > now:
            return []
        return self._fail(self._requests.passed(now), DeadlinePassedError("the request's deadline passed"), now)

    def end_poison(self, key: RequestKey, now: float) -> list[Action]:
        """End a request that crashes its workers."""
        request = self._requests.by_key(key)
        assert request is not None
        return self._fail([request], PoisonRequestError("a worker failed twice while running only this request"), now)

    def end_without_workers(self, now: float) -> list[Action]:
        """End the requests that have waited for lost workers for as long as an operator lets them."""
        bound_s = self._policy.workers_lost_s
        if bound_s is None or not self._cell.has_lost_workers(now):
            return []
        late = [request for request in self._requests.all() if now - request.submitted_at >= bound_s]
        return self._fail(late, WorkersLostError("the cell's workers were lost and did not return in time"), now)

    def end_all(self, error: ServiceError, now: float) -> list[Action]:
        """End every request."""
        return self._fail(self._requests.all(), error, now)

    def end_unsupported(self, now: float) -> list[Action]:
        """End the requests that need what a worker lacks, running or not: any of them may be moved to it."""
        actions: list[Action] = []
        for request in self._requests.all():
            try:
                self._facts.introduction.check(request.needs)
            except NotSupportedError as error:
                actions += self._fail([request], error, now)
        return actions

    def end_unservable(self, waiting: Iterable[Sequence], now: float) -> list[Action]:
        """End the waiting sequences that cannot be served any more or have finished."""
        outputs = OutputsByClient()
        for seq in waiting:
            try:
                finish = self._check_sequence(seq)
            except ServiceError as error:
                self._cell.abort(seq, now)
                end = RequestEnd.failure(seq, error)
            else:
                if finish is None:
                    continue
                end = self._cell.finish(seq, finish, now)
            self._requests.remove_choice(seq.client, seq.handle)
            self._count_completion(seq)
            outputs.add_end(seq.client, end)
        return deliver(outputs)

    def take_outputs(self, outputs: OutputsByClient) -> None:
        """Count the choices that started with a step, and remove those that ended."""
        for client, client_outputs in outputs.by_client.items():
            for start in client_outputs.starts:
                started = self._requests.choice(client, start.handle)
                assert started is not None
                num_tokens = started.num_prompt_tokens - start.num_cached_tokens
                self._tenant_totals.of(started.tenant.name).num_prompt_tokens += num_tokens
            for end in client_outputs.ends:
                ended = self._requests.remove_choice(client, end.handle)
                assert ended is not None
                self._count_completion(ended)

    def tenants(self) -> list[TenantState]:
        """Take a snapshot of what is known of each tenant."""
        return describe_tenants(self._requests.loads, self._tenant_totals)

    def _submit(self, client: int, submission: Submission, outputs: OutputsByClient, now: float) -> None:
        """Check a request and queue its choices; a later attempt replaces an earlier one.

        `outputs` receives the ends of an earlier attempt, and of choices that have already finished.

        Raises:
            ServiceError: it cannot be served; nothing has changed.
        """
        if self._facts.model is None and submission.attempt == 1:
            raise NotReadyError("no worker has been attached yet")
        if submission.attempt == 1 and self._cell.has_lost_workers(now):
            raise WorkersLostError("the cell's workers are lost, and have not come back yet")
        earlier = self._requests.by_key(submission.key)
        if earlier is not None and not _is_superseded(earlier, client, submission.attempt):
            raise DuplicateRequestError("a request with this id is in flight", request_id=submission.request_id)
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            raise DeadlinePassedError("the request's deadline passed")
        self._facts.introduction.check(submission.needs)
        request = make_request(client, submission, now, shares_between_tenants=self._cache.shares_between_tenants)
        finishes = [(seq, self._check_sequence(seq)) for seq in request.choices]
        self._check_room(request, now)
        if earlier is not None:
            self._supersede(earlier, client, outputs, now)
        request.choices = [seq for seq, finish in finishes if finish is None]
        if request.choices:
            self._queue(request, now)
        for seq, finish in finishes:
            if finish is not None:
                num_tokens = seq.num_stored_tokens - seq.num_prompt_tokens
                outputs.add_end(client, RequestEnd(seq.handle, num_tokens, finish, num_resumes=seq.num_resumes))

    def _supersede(self, earlier: Request, client: int, outputs: OutputsByClient, now: float) -> None:
        error: ServiceError = AbortedByCallError("a later call replaced this request")
        if earlier.client != client:
            error = DuplicateRequestError("another client has taken over this request id", request_id=earlier.key.id)
        for seq in self._abort(earlier, now):
            outputs.add_end(seq.client, RequestEnd.failure(seq, error))

    def _queue(self, request: Request, now: float) -> None:
        for number, seq in enumerate(request.choices):
            seq.is_leader, seq.num_choices = not number, len(request.choices)
        self._requests.add(request)
        self._cell.add(request.choices, now)

    def _check_sequence(self, seq: Sequence) -> Finish | None:
        """Check a waiting sequence, once a model is known; returns how it has finished, if it has.

        Raises:
            ServiceError: it cannot be served.
        """
        model, limits = self._facts.model, self._facts.limits
        if model is None or limits is None:
            return None
        check_sequence(seq, limits, embeds=model.embeds)
        if seq.is_exact:
            self._promise_exactness(seq)
        if seq.num_stored_tokens == seq.num_prompt_tokens:
            return None
        return find_finish(seq, frozenset(model.eos_token_ids))

    def _promise_exactness(self, seq: Sequence) -> None:
        """Promise exactness, under the same numerics as any earlier promise.

        Raises:
            ExactUnavailableError: it is not available.
        """
        fingerprint = self._facts.exact_fingerprint
        if not fingerprint or seq.exact_fingerprint not in (None, fingerprint):
            raise ExactUnavailableError("the workers cannot guarantee exact results")
        seq.exact_fingerprint = fingerprint

    def _check_room(self, request: Request, now: float) -> None:
        """The limits of tenants and queues do not apply to a request that was admitted before.

        Raises:
            QueueFullError, TenantLimitError: there is no room now.
            InvalidRequestError: it exceeds a limit by itself: that of prompt log-probabilities, or of choices.
        """
        num_bytes, max_bytes = request.num_prompt_logprob_bytes, self._policy.max_prompt_logprob_bytes
        if num_bytes > max_bytes:
            rule = f"takes {num_bytes} bytes for this prompt; at most {max_bytes} are allowed"
            violation = Violation("sampling.num_prompt_logprobs", "OUT_OF_RANGE", rule)
            raise InvalidRequestError.from_violations([violation])
        if request.attempt > 1 or not request.choices:
            return
        self._check_tenant(request, now)
        loads, tenant = self._requests.loads, request.tenant
        num_missing = loads.count_missing(tenant, len(request.choices), request.choices[0].num_prompt_tokens)
        if num_missing:
            load = loads.load_of(tenant)
            raise QueueFullError(
                "the waiting queue is full",
                retry_delay_s=self._cell.retry_delay_s(now, num_missing),
                num_waiting=load.num_waiting,
                num_waiting_tokens=load.num_waiting_tokens,
            )
        if num_bytes and not loads.has_room_for_bytes(tenant, num_bytes):
            raise QueueFullError(
                "too many prompt log-probabilities are requested",
                retry_delay_s=self._cell.retry_delay_s(now),
                num_bytes=loads.num_bytes_of(tenant),
            )

    def _check_tenant(self, request: Request, now: float) -> None:
        tenant, num_choices = request.tenant, len(request.choices)
        if tenant.max_in_flight is not None and num_choices > tenant.max_in_flight:
            rule = f"at most {tenant.max_in_flight} choices of this tenant may be in flight"
            raise InvalidRequestError.from_violations([Violation("sampling.n", "OUT_OF_RANGE", rule)])
        limit = self._requests.loads.find_exceeded(tenant, num_choices, request.choices[0].num_prompt_tokens)
        if limit is not None:
            self._tenant_totals.of(tenant.name).num_refused += 1
            raise TenantLimitError(
                f"the tenant has reached its {limit.name}",
                retry_delay_s=self._cell.retry_delay_s(now),
                limit=limit.name,
                value=limit.value,
            )

    def _abort(self, request: Request, now: float) -> list[Sequence]:
        """Returns the choices that had not ended."""
        choices = self._requests.remove(request)
        for seq in choices:
            self._cell.abort(seq, now)
            self._count_completion(seq)
        return choices

    def _count_completion(self, seq: Sequence) -> None:
        """Count the tokens of a choice that has ended."""
        num_tokens = seq.num_stored_tokens - seq.num_prompt_tokens - seq.num_earlier_tokens
        self._tenant_totals.of(seq.tenant.name).num_completion_tokens += num_tokens

    def _fail(self, requests: Iterable[Request], error: ServiceError, now: float) -> list[Action]:
        outputs = OutputsByClient()
        for request in requests:
            for seq in self._abort(request, now):
                outputs.add_end(seq.client, RequestEnd.failure(seq, error))
        return deliver(outputs)


def _is_superseded(earlier: Request, client: int, attempt: int) -> bool:
    """Any later attempt replaces one in flight; from the same client, any but the first.

    Direct calls are one client, and their attempts are not counted beyond the second.
    """
    return attempt > earlier.attempt or (attempt > 1 and client == earlier.client)


def deliver(outputs: OutputsByClient) -> list[Action]:
    """Make one `Deliver` action per client."""
    return [Deliver(client, client_outputs) for client, client_outputs in outputs.by_client.items()]
