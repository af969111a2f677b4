"""Bugs in requests that the simulation must detect: in their choices, ends, attempts and log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.internal.v1 import exchange_pb2
from services.scheduler.cell.cell_facts import CellFacts
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Action, ClientClosed, ClientMessage, Event, Submission, TimePassed
from services.scheduler.cell.requests import intake
from services.scheduler.cell.requests.request_manager import RequestManager
from services.scheduler.cell.requests.requests import Request, RequestTable
from services.scheduler.cell.requests.tenant_loads import TenantLoads
from services.scheduler.core.batch.sequence import Finish, Numerics, Sequence
from services.scheduler.core.planning.prefill import PrefillPlanner
from services.scheduler.core.results.endings import Endings
from services.scheduler.core.results.outputs import OutputsByClient
from services.scheduler.core.results.postprocess import Postprocessor
from services.scheduler.core.stops import find_finish
from services.scheduler.server.client_link import ClientLink
from services.scheduler.server.direct_clients import DirectClients
from services.tokenizer.exchange.exchange_codec import encode_submit
from services.tokenizer.exchange.request_ledger import RequestLedger
from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import ServiceError, StepMismatchError
from shared.ids import RequestHandle, choice_handles
from shared.step.logprobs import Logprobs
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

REQUEST_BUGS: list[PlantedBug] = []
_planted = planter(REQUEST_BUGS)


# Accusations.


@_planted(Fault.SCHEDULER_FLAP, seed=10)
def _blames_without_a_control(patch: Patch) -> None:
    """A request that was alone in two deaths of schedulers is blamed, although they die without it too."""

    def try_at_once(self: SubmitSuspects, main_suspect: RequestHandle) -> None:
        self._trial, self._is_last_trial, self.has_changed = {main_suspect}, True, True

    patch.setattr(SubmitSuspects, "_control", try_at_once)


@_planted(Fault.MODEL_CHANGE, seed=5)
def _weights_are_not_compared(patch: Patch) -> None:
    """A worker with other weights is attached, and answers go on with them."""
    patch.setattr(CellFacts, "find_other_model", lambda *_: None)


# Choices.


@_planted()
def _choices_draw_alike(patch: Patch) -> None:
    """Every choice of a request samples with the noise of the first."""
    entering = PrefillPlanner._entering
    patch.setattr(PrefillPlanner, "_entering", lambda *args: replace(entering(*args), choice=0))


@_planted(Fault.CANCEL, seed=6, raises=KeyError)
def _aborts_end_one_choice(patch: Patch) -> None:
    """When a request is aborted or its deadline passes, only one choice ends."""
    remove = RequestTable.remove
    patch.setattr(RequestTable, "remove", lambda self, request: remove(self, request)[:1])


@_planted(Fault.CANCEL, seed=17)
def _requests_go_with_their_first_choice(patch: Patch) -> None:
    """A client can no longer abort a request whose first choice has ended."""
    by_handle = RequestTable.by_handle

    def find(self: RequestTable, client: int, handle: RequestHandle) -> Request | None:
        return by_handle(self, client, handle) if (client, handle) in self._choices else None

    patch.setattr(RequestTable, "by_handle", find)


@_planted(Fault.TEXT_STOP)
def _a_stop_in_the_text_ends_the_request(patch: Patch) -> None:
    """A stop string in one choice ends the others too."""
    on_message = RequestManager.on_message

    def stop_all(self: RequestManager, message: ClientMessage, now: float) -> list[Action]:
        requests = [self._requests.by_handle(message.client, handle) for handle, _ in message.stop_ats]
        actions = on_message(self, message, now)
        for request in requests:
            if request is not None and request.choices:
                self._abort(request, now)
        return actions

    patch.setattr(RequestManager, "on_message", stop_all)


@_planted(Fault.STREAM_BREAK)
def _ended_choices_begin_again(patch: Patch) -> None:
    """A resubmitted request restarts choices that have already ended for its client."""
    patch.setattr(Submission, "open_choices", property(lambda self: list(range(self.n))))


@_planted(Fault.STREAM_BREAK)
def _choices_go_on_behind_the_first_ones_output(patch: Patch) -> None:
    """A resubmitted request resumes every choice from the output of the first."""
    make = intake.make_request

    def make_alike(client: int, submission: Submission, now: float, **options: Any) -> Request:
        alike = tuple(replace(one, output=submission.choices_so_far[0].output) for one in submission.choices_so_far)
        return make(client, replace(submission, choices_so_far=alike), now, **options)

    patch.setattr("services.scheduler.cell.requests.request_manager.make_request", make_alike)


@_planted(Fault.QUEUE_FULL)
def _choices_take_one_place(patch: Patch) -> None:
    """A request counts once against the waiting queue's limit, however many choices it has."""
    count = TenantLoads.count_missing
    patch.setattr(TenantLoads, "count_missing", lambda self, tenant, _, num_tokens: count(self, tenant, 1, num_tokens))


# Log-probabilities.


@_planted(raises=IndexError)
def _log_probabilities_keep_their_numbers(patch: Patch) -> None:
    """Log-probabilities keep their row indexes when earlier rows are dropped."""
    select = Logprobs.select

    def keep_numbers(self: Logprobs, is_kept: Any) -> Logprobs | None:
        selected = select(self, is_kept)
        return None if selected is None else replace(selected, indexes=self.indexes[is_kept[self.indexes]])

    patch.setattr(Logprobs, "select", keep_numbers)


@_planted(raises=IndexError)
def _log_probabilities_of_wasted_tokens_are_sent(patch: Patch) -> None:
    """Log-probabilities of discarded rows go to a client."""
    patch.setattr(Logprobs, "select", lambda self, _: self)


@_planted(Fault.LINK_BREAK, seed=30)
def _prompt_log_probabilities_are_sent_again(patch: Patch) -> None:
    """When a prompt is recomputed, its log-probabilities are sent again from the start."""
    patch.setattr(Logprobs, "after", lambda self, _: self)


@_planted(raises=StepMismatchError)
def _scored_prompts_come_from_the_cache(patch: Patch) -> None:
    """A prompt with requested log-probabilities uses cached blocks, for which there are none."""
    patch.setattr(PrefillPlanner, "_find_prefix", lambda self, seq: self._blocks.find_prefix(seq))


@_planted(seed=5)
def _every_choice_scores_the_prompt(patch: Patch) -> None:
    """Every choice returns the prompt's log-probabilities."""
    patch.setattr(
        Sequence,
        "wants_prompt_logprobs",
        property(lambda self: self.has_prompt_logprobs and self.num_stored_tokens == self.num_prompt_tokens),
    )


@_planted(Fault.QUEUE_FULL)
def _prompts_are_charged_for_good(patch: Patch) -> None:
    """The bytes charged for a prompt's log-probabilities are never released."""
    forget = RequestTable._forget

    def keep(self: RequestTable, request: Request) -> None:
        forget(self, request)
        self.loads.add_bytes(request.tenant, request.num_prompt_logprob_bytes)

    patch.setattr(RequestTable, "_forget", keep)


# Grammars.


@_planted(Fault.GRAMMAR_FAILURE)
def _tokens_of_a_failed_grammar_are_sent(patch: Patch) -> None:
    """A row whose grammar has failed delivers its token like any other."""
    postprocess = Postprocessor.postprocess
    no_rows = np.empty(0, np.int32)
    patch.setattr(
        Postprocessor,
        "postprocess",
        lambda self, result, now: postprocess(self, replace(result, failed_grammar_rows=no_rows), now),
    )


# Exactness.


@_planted(Fault.EXACT, seed=4, raises=KeyError)
def _exactness_is_promised_by_all(patch: Patch) -> None:
    """A request for exact output is accepted although the ranks are not exact."""
    patch.setattr(RequestManager, "_promise_exactness", lambda *_: None)


@_planted(Fault.EXACT, Fault.LINK_BREAK)
def _exact_resumes_are_reported_as_inexact(patch: Patch) -> None:
    """A resume between bitwise identical ranks is reported as inexact."""
    patch.setattr(Numerics, "is_continued_by", lambda *_: False)


# Direct calls.


@_planted(Fault.DIRECT_CALL, Fault.CANCEL)
def _direct_requests_go_with_their_first_choice(patch: Patch) -> None:
    """Cancelling a direct call whose first choice has ended does not abort the others."""
    forget = DirectClients._forget

    def forget_first(self: DirectClients, submission: Submission) -> None:
        if submission.handle in self._choices:
            forget(self, submission)
        for handle in choice_handles(submission.handle, submission.n):
            self._choices.pop(handle, None)

    patch.setattr(DirectClients, "_forget", forget_first)


@_planted(Fault.DIRECT_CALL)
def _of_direct_calls_with_news_one_is_woken(patch: Patch) -> None:
    """Only the first direct call with new output is woken after a step."""
    patch.setattr(DirectClients, "_wake_some", lambda self: self._to_wake.popleft().wake())


# Requests, their ends and their attempts.


@_planted(Fault.TEXT_STOP)
def _stop_positions_are_ignored(patch: Patch) -> None:
    """A request stopped by a stop string counts the tokens after the stop."""
    stop_at = Endings.stop_at
    patch.setattr(Endings, "stop_at", lambda self, seq, _, now: stop_at(self, seq, 1 << 30, now))


@_planted(seed=5)
def _stops_count_before_min_tokens(patch: Patch) -> None:
    """A request may end before `min_tokens`."""
    patch.setattr("services.scheduler.core.results.endings.find_finish", _find_finish_without_options)


def _find_finish_without_options(seq: Sequence, eos_token_ids: frozenset[int]) -> Finish | None:
    return find_finish(replace(seq, params=replace(seq.params, options=None)), eos_token_ids)


@_planted(Fault.DEADLINE)
def _deadlines_are_ignored(patch: Patch) -> None:
    """A request is still computed after its deadline."""
    patch.setattr(RequestManager, "expire", lambda *_: [])


@_planted(Fault.REPLICA_GONE)
def _requests_outlive_their_replica(patch: Patch) -> None:
    """The requests of a dead replica are still computed."""
    on_event = Engine.on_event

    def ignore(self: Engine, event: Event, now: float) -> list[Action]:
        return on_event(self, TimePassed() if isinstance(event, ClientClosed) else event, now)

    patch.setattr(Engine, "on_event", ignore)


@_planted(Fault.STREAM_BREAK, seed=3)
def _later_attempts_are_duplicates(patch: Patch) -> None:
    """A resubmitted request is refused as a duplicate of its own earlier attempt."""
    submit = RequestManager._submit
    patch.setattr(
        RequestManager,
        "_submit",
        lambda self, client, submission, *rest: submit(self, client, replace(submission, attempt=1), *rest),
    )


@_planted(Fault.STREAM_BREAK, seed=13)
def _earlier_attempts_run_on(patch: Patch) -> None:
    """Both attempts of a resubmitted request run."""
    submit = RequestManager._submit

    def submit_beside(self: RequestManager, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RequestTable, "by_key", lambda *_: None)
            return submit(self, *args)

    patch.setattr(RequestManager, "_submit", submit_beside)


@_planted(Fault.SAME_ID, Fault.STREAM_BREAK, seed=8)
def _a_superseded_client_gets_no_error(patch: Patch) -> None:
    """A client whose request was superseded by another client never gets an answer."""

    def supersede(self: RequestManager, earlier: Request, _client: int, _outputs: OutputsByClient, now: float) -> None:
        self._abort(earlier, now)

    patch.setattr(RequestManager, "_supersede", supersede)


@_planted(Fault.STREAM_BREAK, Fault.SCHEDULER_RESTART)
def _max_tokens_count_from_the_resubmission(patch: Patch) -> None:
    """The output so far counts as prompt, so a resumed request gets `max_tokens` more."""
    submit = RequestManager._submit

    def submit_as_prompt(self: RequestManager, client: int, submission: Submission, *rest: Any) -> Any:
        if submission.n > 1 or not submission.choices_so_far:
            return submit(self, client, submission, *rest)
        prompt = submission.prompt + submission.choices_so_far[0].output
        return submit(self, client, replace(submission, prompt=prompt, choices_so_far=()), *rest)

    patch.setattr(RequestManager, "_submit", submit_as_prompt)


@_planted(Fault.STREAM_BREAK, Fault.DEADLINE, seed=1)
def _resubmission_extends_the_deadline(patch: Patch) -> None:
    """A resumed request loses its deadline."""

    def forget(request: ResolvedRequest, now: float) -> exchange_pb2.Submit:
        submit = encode_submit(request, now)
        if request.num_attempts > 1:
            submit.ClearField("time_left")
        return submit

    patch.setattr("tests.simulation.parts.replica.encode_submit", forget)


@_planted(Fault.MESSAGE_REPEATED, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LOST)
def _replicas_append_without_a_look_at_positions(patch: Patch) -> None:
    """A replica appends tokens without checking for lost, repeated or reordered messages."""
    receive = RequestLedger.receive

    def append(self: RequestLedger, stream: int, handle: RequestHandle, _: int, token_ids: Any) -> Any:
        choice = self._choices.get(handle)
        return receive(self, stream, handle, 0 if choice is None else len(choice.output), token_ids)

    patch.setattr(RequestLedger, "receive", append)


@_planted(Fault.STREAM_BREAK, Fault.MESSAGE_LATE)
def _replicas_listen_to_old_streams(patch: Patch) -> None:
    """A replica accepts an end from a stream that it has replaced."""
    end = RequestLedger.end

    def end_anyway(self: RequestLedger, stream: int, handle: RequestHandle) -> bool:
        choice = self._choices.get(handle)
        return end(self, stream if choice is None else choice.request.stream or stream, handle)

    patch.setattr(RequestLedger, "end", end_anyway)


# Replicas.


@_planted(Fault.REPLICA_STALL, seed=5)
def _replicas_that_do_not_read_keep_their_streams(patch: Patch) -> None:
    """Messages for a replica that does not read pile up, and its requests are still computed."""
    patch.setattr("services.scheduler.server.client_link.MAX_UNREAD_S", math.inf)


@_planted(Fault.REPLICA_STALL, seed=5)
def _links_wait_for_their_last_words(patch: Patch) -> None:
    """The stream of a replica that does not read closes only once it has read everything queued."""
    close = ClientLink.close

    def close_later(self: ClientLink, error: ServiceError | None) -> None:
        if self._outbox.empty():
            close(self, error)

    patch.setattr(ClientLink, "close", close_later)
