"""What the services of a cell may send to one of another release."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from hypothesis import given
from hypothesis import strategies as st

from lockstep.internal.v1 import exchange_pb2
from lockstep.internal.v1.introduction_pb2 import Introduction as Message
from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.server.direct_clients import resolve_request
from services.scheduler.server.exchange_codec import decode_request, encode_outputs
from services.tokenizer.exchange.exchange_codec import encode_request
from services.tokenizer.request.resolved_request import ResolvedRequest
from shared.errors import NotSupportedError
from shared.ids import RequestHandle
from shared.request.limits import TOKEN_DTYPE, ModelLimits
from shared.request.sampling_params import NO_OPTIONS, Pooling, SamplingOptions, SamplingParams
from shared.step.codec import encode_step
from shared.tenants.tenant import Tenant
from shared.wire import (
    CAPABILITIES,
    NOT_INTRODUCED,
    WIRE_VERSION,
    Introduction,
    find_needs,
    introduce_self,
    lower_of,
    read_introduction,
)
from tests.support.scheduler.engine_driver import EngineDriver

# Wire version 0 is closed: what is new has a capability, and what is gone is reserved in its message.
NUM_FIELDS_OF_VERSION_0 = 183
TABLE = Path(__file__).with_name("wire_fields.txt")
PROTOS = Path(__file__).parents[3] / "protos"
PACKAGE = "lockstep/internal/v1"
PROMPT = list(range(100, 110))

CAPABILITY_TO_OPTIONS = {
    "min_p": SamplingOptions(min_p=0.5),
    "penalties": SamplingOptions(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0),
    "logit_bias": SamplingOptions(logit_bias=((3, 1.0),)),
    "bad_words": SamplingOptions(bad_words=((4, 5),)),
    "allowed_token_ids": SamplingOptions(allowed_token_ids=(1, 2)),
    "min_tokens": SamplingOptions(min_tokens=1),
    "grammar": SamplingOptions(grammar='start: "a"', reasoning_begin=(1,), reasoning_end=(2,)),
    "vectors": SamplingOptions(pooling=Pooling.LAST),
    "logprobs": SamplingOptions(num_logprobs=0, num_prompt_logprobs=0, logprob_token_ids=(1,)),
}

OPTIONS = st.builds(
    SamplingOptions,
    min_p=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([(), ((3, 1.0),)]),
    bad_words=st.sampled_from([(), ((4, 5),)]),
    min_tokens=st.sampled_from([0, 1]),
    num_logprobs=st.sampled_from([None, 0, 2]),
    num_prompt_logprobs=st.sampled_from([None, 0]),
    # The model of a worker has grammars that fail after some tokens; these answers have 8.
    grammar=st.sampled_from(["", "9"]),
    allowed_token_ids=st.sampled_from([(), (1, 2)]),
    logprob_token_ids=st.sampled_from([(), (1,)]),
)


def internal_fields() -> Iterator[str]:
    """Every field of every internal message, and every value of the enums that they have."""
    for path in sorted((PROTOS / PACKAGE).glob("*.proto")):
        stubs = importlib.import_module(f"{PACKAGE.replace('/', '.')}.{path.stem}_pb2")
        for message in stubs.DESCRIPTOR.message_types_by_name.values():
            yield from fields_of(message)


def fields_of(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        yield field.full_name
        if field.enum_type is not None:
            yield from values_of(field.enum_type)
    for nested in message.nested_types:
        yield from fields_of(nested)


def values_of(enum: EnumDescriptor) -> Iterator[str]:
    return (f"{enum.full_name}.{value.name}" for value in enum.values)


def make_request(options: SamplingOptions = NO_OPTIONS) -> ResolvedRequest:
    """A request with everything that one may have, but only these options."""
    params = SamplingParams(
        max_tokens=4,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        seed=1,
        ignore_eos=True,
        stop_token_ids=(1,),
        stop_token_sequences=((1, 2),),
        options=None if options == NO_OPTIONS else options,
    )
    prompt = np.array(PROMPT, TOKEN_DTYPE).tobytes()
    return ResolvedRequest("r", prompt, params, priority=1, cache_salt=b"salt", n=2, is_exact=True)


def test_every_internal_field_is_in_the_table_under_the_wire_version_that_brought_it() -> None:
    """When it fails, see `shared.wire` for what to do. The lines of a wire version never change once it is released."""
    version_of = {field: each.wire_version for each in CAPABILITIES for field in each.fields}
    names = {name.removeprefix(f"{PACKAGE.replace('/', '.')}.") for name in internal_fields()}
    assert version_of.keys() <= names, "a capability names a field that is not there"
    table = TABLE.read_text().splitlines()
    assert [f"{version_of.get(name, 0)} {name}" for name in sorted(names)] == table
    assert sum(line.startswith("0 ") for line in table) == NUM_FIELDS_OF_VERSION_0


def test_capabilities_have_names_fields_and_versions_of_their_own() -> None:
    names = [each.name for each in CAPABILITIES]
    fields = [field for each in CAPABILITIES for field in each.fields]
    assert len(set(names)) == len(names)
    assert len(set(fields)) == len(fields)
    assert {each.wire_version for each in CAPABILITIES} == set(range(1, WIRE_VERSION + 1))


def test_each_option_needs_one_capability() -> None:
    for name, options in CAPABILITY_TO_OPTIONS.items():
        assert find_needs(encode_request(make_request(options))) == {name}
    changed = {field for each in CAPABILITY_TO_OPTIONS.values() for field, _ in changes_of(each)}
    assert changed == {field.name for field in dataclasses.fields(SamplingOptions)}
    others = {"introduction", "tenants", "recurrent_state", "timings", "worker_start", "first_start", "controls"}
    others |= {"implementation", "takes_work", "last_word", "trials"}
    assert CAPABILITY_TO_OPTIONS.keys() | others == {each.name for each in CAPABILITIES}


def test_a_tenant_with_its_limits_reaches_the_scheduler_and_needs_a_capability() -> None:
    for tenant in (Tenant("a"), Tenant("b", 0.001, max_in_flight=1, max_waiting_requests=5, max_waiting_tokens=2**40)):
        request = make_request()
        request.tenant = tenant
        submit = encode_request(request)
        assert find_needs(submit) == {"tenants"}
        submit.handle = 1
        assert decode_request(1, exchange_pb2.ExchangeRequest(submits=[submit])).submissions[0].tenant == tenant
    assert not encode_request(make_request()).HasField("tenant")


def changes_of(options: SamplingOptions) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != getattr(NO_OPTIONS, field.name):
            yield field.name, value


def test_a_peer_of_wire_version_0_is_given_requests_without_options_alone() -> None:
    peer = read_introduction(Message())
    assert peer == NOT_INTRODUCED
    peer.check(find_needs(encode_request(make_request())))
    for name, options in CAPABILITY_TO_OPTIONS.items():
        with pytest.raises(NotSupportedError, match=name) as refusal:
            peer.check(find_needs(encode_request(make_request(options))))
        assert refusal.value.values == {"capabilities": name, "wire_version": "0"}


def test_a_peer_of_this_release_is_given_everything() -> None:
    own = read_introduction(Message(**introduce_self().encode()))
    assert own == introduce_self()
    own.check(frozenset(CAPABILITY_TO_OPTIONS))


def test_the_lower_wire_version_decides() -> None:
    own = introduce_self()
    later = Introduction("later", WIRE_VERSION + 1, own.capabilities | {"of tomorrow"})
    assert lower_of(own, later) == own
    assert lower_of(later, own) == dataclasses.replace(own, release="later")
    assert lower_of(own, later, NOT_INTRODUCED) == dataclasses.replace(NOT_INTRODUCED, release=own.release)
    without = dataclasses.replace(later, capabilities=later.capabilities - {"grammar"})
    assert lower_of(own, without).capabilities == own.capabilities - {"grammar"}
    # A name counts only from the wire version on that brought it.
    claimed = dataclasses.replace(own, wire_version=0)
    assert lower_of(own, claimed).capabilities == frozenset()


@given(OPTIONS)
def test_no_message_on_a_requests_way_needs_more_than_the_request(options: SamplingOptions) -> None:
    submit = encode_request(make_request(options))
    submit.handle = 1
    (submission,) = decode_request(1, exchange_pb2.ExchangeRequest(submits=[submit])).submissions
    assert submission.needs == find_needs(submit)
    driver = EngineDriver()
    driver.submit(1, PROMPT, options=submission.params.options)
    (step,) = driver.sent
    assert find_needs(encode_step(step)) <= submission.needs
    driver.run()
    assert driver.delivered
    assert all(find_needs(encode_outputs(each.outputs)) <= submission.needs for each in driver.delivered)


@given(OPTIONS)
def test_a_direct_call_needs_what_the_same_request_of_a_replica_needs(options: SamplingOptions) -> None:
    sampling = common_pb2.SamplingParams(
        max_tokens=4,
        seed=1,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias),
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in options.bad_words],
        min_tokens=options.min_tokens,
        num_logprobs=options.num_logprobs,
        num_prompt_logprobs=options.num_prompt_logprobs,
        allowed_token_ids=options.allowed_token_ids,
        logprob_token_ids=options.logprob_token_ids,
    )
    call = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=PROMPT, sampling=sampling)
    submission = resolve_request(RequestHandle(1), call, ModelLimits(512, 1000, 1024))
    # A direct call has no grammar.
    assert submission.needs == find_needs(encode_request(make_request(dataclasses.replace(options, grammar=""))))
