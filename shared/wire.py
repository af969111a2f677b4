"""Wire versions and capabilities: what a service may send to another one of a different release.

Protobuf drops a field that its receiver does not know, so a request could lose a part of itself without an error.
Each side of a link therefore introduces itself, and the lower wire version of the two decides what is sent.

A new field, or enum value, of an internal message takes three steps: raise `WIRE_VERSION`, unless that was done since
the last release; add a capability of that version, with the names of its fields, to `CAPABILITIES`; and set the field
only in requests that need it, in answers to them, or for a side that has the capability. Fields of wire version 0 need
none: every service knows them.

Plain Python: the parts of the services that do no I/O use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from shared.errors import NotSupportedError
from shared.release import find_release

_PACKAGE = "lockstep.internal.v1."

WIRE_VERSION = 1
"""The highest wire version whose fields this release knows."""

TIMINGS = "timings"
"""The capability of a replica that is told how long requests waited and were prefilled."""
CONTROLS = "controls"
"""The capability of a worker that computes dummy steps of any size, whether or not its rank is coupled."""
VECTORS = "vectors"
"""The capability of requests for a prompt's vector, and of whoever knows that a model may be served for these alone."""
LAST_WORD = "last_word"
"""The capability of a scheduler that tells its workers when no scheduler needs them any more."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that a request may need of every service on its way."""

    name: str
    wire_version: int
    """The one that brought it, at least 1."""
    fields: tuple[str, ...]
    """What it adds to `lockstep.internal.v1`: fields as `Message.field`, values of enums as `Enum.VALUE`."""


# Wire version 0 has no options: nothing tells which of them a service that does not introduce itself knows.
CAPABILITIES = (
    Capability(
        "introduction",
        1,
        (
            "AttachRequest.introduction",
            "AttachResponse.introduction",
            "CellInfo.introduction",
            "ExchangeRequest.introduction",
            "Introduction.capabilities",
            "Introduction.release",
            "Introduction.wire_version",
        ),
    ),
    Capability(
        "tenants",
        1,
        (
            "Submit.tenant",
            "Tenant.max_in_flight",
            "Tenant.max_waiting_requests",
            "Tenant.max_waiting_tokens",
            "Tenant.name",
            "Tenant.weight",
        ),
    ),
    Capability("min_p", 1, ("SamplingOptions.min_p",)),
    Capability(
        "penalties",
        1,
        (
            "SamplingOptions.frequency_penalty",
            "SamplingOptions.presence_penalty",
            "SamplingOptions.repetition_penalty",
        ),
    ),
    Capability("logit_bias", 1, ("SamplingOptions.logit_bias_token_ids", "SamplingOptions.logit_biases")),
    Capability("bad_words", 1, ("SamplingOptions.bad_words",)),
    Capability("allowed_token_ids", 1, ("SamplingOptions.allowed_token_ids",)),
    Capability("min_tokens", 1, ("SamplingOptions.min_tokens",)),
    Capability(
        "grammar",
        1,
        (
            "SamplingOptions.grammar",
            "SamplingOptions.reasoning_begin",
            "SamplingOptions.reasoning_end",
            "StepResult.failed_grammar_rows",
        ),
    ),
    Capability(
        "logprobs",
        1,
        (
            "ChunkLogprobs.logprobs",
            "ChunkLogprobs.slot",
            "Logprobs.counts",
            "Logprobs.indexes",
            "Logprobs.ranks",
            "Logprobs.requested_counts",
            "Logprobs.token_ids",
            "Logprobs.values",
            "Outputs.logprobs",
            "Outputs.prompt_logprobs",
            "PromptLogprobs.handle",
            "PromptLogprobs.logprobs",
            "SamplingOptions.logprob_token_ids",
            "SamplingOptions.num_logprobs",
            "SamplingOptions.num_prompt_logprobs",
            "StepResult.logprobs",
            "StepResult.prompt_logprobs",
        ),
    ),
    Capability(
        "recurrent_state",
        1,
        (
            "AttachResponse.max_num_seqs",
            "AttachResponse.num_checkpoint_slots",
            "AttachResponse.state_bytes_per_slot",
            "MemberAttached.max_num_seqs",
            "MemberAttached.num_checkpoint_slots",
            "StepRequest.state_restores",
            "StepRequest.state_saves",
            "StepResult.not_finite_saves",
        ),
    ),
    Capability("first_start", 1, ("AttachRequest.is_first_start",)),
    Capability(TIMINGS, 1, ("RequestEnd.queue_time_us", "RequestStart.prefill_time_us")),
    # Whoever does not know them loses nothing but a better guess of how long a restart takes.
    Capability("worker_start", 1, ("AttachResponse.start_time", "CellInfo.worker_start_time")),
    Capability("implementation", 1, ("AttachResponse.implementation", "CellInfo.implementation")),
    # Whoever does not know it goes by `holds_workers`.
    Capability("takes_work", 1, ("SchedulerHeartbeat.takes_work",)),
    # Where one side does not know them, replicas try their suspects side by side.
    Capability("trials", 1, ("ExchangeRequest.is_trying", "SchedulerHeartbeat.has_trial")),
    Capability(CONTROLS, 1, ("StepRequest.num_dummy_tokens",)),
    Capability(
        VECTORS,
        1,
        (
            "AttachResponse.task",
            "CellInfo.task",
            "Outputs.vectors",
            "PromptVector.handle",
            "PromptVector.values",
            "Pooling.POOLING_LAST",
            "Pooling.POOLING_MEAN",
            "Pooling.POOLING_UNSPECIFIED",
            "SamplingOptions.pooling",
            "SlotVector.slot",
            "SlotVector.values",
            "StepResult.vectors",
        ),
    ),
    # A worker that does not know it takes every end of its stream for the last.
    Capability(LAST_WORD, 1, ("Heartbeat.is_last",)),
)


class IntroductionMessage(Protocol):
    """A `lockstep.internal.v1.Introduction`."""

    @property
    def release(self) -> str:
        """See introduction.proto."""

    @property
    def wire_version(self) -> int:
        """See introduction.proto."""

    @property
    def capabilities(self) -> Sequence[str]:
        """See introduction.proto."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a service can do, or all services on a way."""

    release: str
    wire_version: int
    capabilities: frozenset[str]

    def check(self, needs: frozenset[str]) -> None:
        """Refuse a request that needs capabilities which are not here.

        Raises:
            NotSupportedError: naming them.
        """
        if lacking := sorted(needs - self.capabilities):
            raise NotSupportedError(
                f"a service of the cell is of a release that does not know this: {', '.join(lacking)}",
                capabilities=",".join(lacking),
                wire_version=self.wire_version,
            )

    def encode(self) -> dict[str, Any]:
        """The fields of its message."""
        return {
            "release": self.release,
            "wire_version": self.wire_version,
            "capabilities": sorted(self.capabilities),
        }


NOT_INTRODUCED = Introduction("", 0, frozenset())
"""What a service of wire version 0 can do: it knows of no introductions."""


def introduce_self() -> Introduction:
    """What this process says about itself."""
    return Introduction(find_release(), WIRE_VERSION, _names_up_to(WIRE_VERSION))


def read_introduction(message: IntroductionMessage) -> Introduction:
    """Read what the other side of a link says about itself; an empty message is that of wire version 0."""
    return Introduction(message.release, message.wire_version, frozenset(message.capabilities))


def lower_of(first: Introduction, *others: Introduction) -> Introduction:
    """What all of them can do, under the name of the first one's release."""
    wire_version = min(each.wire_version for each in (first, *others))
    common = _names_up_to(wire_version).intersection(*(each.capabilities for each in (first, *others)))
    return Introduction(first.release, wire_version, common)


def find_needs(message: Any) -> frozenset[str]:
    """The names of the capabilities that an internal message needs, by the fields that it sets."""
    return frozenset(_needs(message))


@dataclass(frozen=True, slots=True)
class _Watched:
    """A field that may need a capability."""

    name: str
    default: Any
    """None if the message says itself whether it is set."""
    capability: str | None
    """What it needs when it is set."""
    value_to_capability: dict[int, str]
    """What values of its enum need."""
    has_messages: bool
    """Whether it has messages, one or more, with fields that are watched."""
    is_repeated: bool


def _needs(message: Any) -> Iterator[str]:
    for field in _watched(message.DESCRIPTOR):
        value = getattr(message, field.name)
        if not message.HasField(field.name) if field.default is None else value == field.default:
            continue
        if field.capability is not None:
            yield field.capability
        if field.value_to_capability and value in field.value_to_capability:
            yield field.value_to_capability[value]
        if field.has_messages:
            for each in value if field.is_repeated else [value]:
                yield from _needs(each)


@cache
def _watched(descriptor: Any) -> tuple[_Watched, ...]:
    """What is watched of a kind of message. A prompt is not among it, and so is not copied however long it is."""
    fields = [_watch(field) for field in descriptor.fields]
    return tuple(each for each in fields if each.capability or each.value_to_capability or each.has_messages)


def _watch(field: Any) -> _Watched:
    values = [] if field.enum_type is None else field.enum_type.values
    names = {value.number: f"{field.enum_type.full_name}.{value.name}" for value in values}
    inner = field.message_type
    return _Watched(
        field.name,
        None if field.has_presence else field.default_value,
        _FIELD_TO_NAME.get(field.full_name),
        {number: _FIELD_TO_NAME[name] for number, name in names.items() if name in _FIELD_TO_NAME},
        inner is not None and inner.full_name.startswith(_PACKAGE) and bool(_watched(inner)),
        field.is_repeated,
    )


def _names_up_to(wire_version: int) -> frozenset[str]:
    return frozenset(each.name for each in CAPABILITIES if each.wire_version <= wire_version)


_FIELD_TO_NAME = {_PACKAGE + field: each.name for each in CAPABILITIES for field in each.fields}
