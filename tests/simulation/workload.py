"""What one run serves: a cell's settings, and requests with their expected answers. All are drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Finish, FinishReason, Priority, RequestKey
from services.scheduler.core.policy import CacheSettings, CellTopology, RetractionPolicy, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.worker_facts import WorkerFacts
from services.worker.batch.enter_checks import BatchLimits
from shared.request.sampling_params import NO_OPTIONS, SamplingOptions, SamplingParams
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from shared.wire import introduce_self
from tests.simulation.faults import DRAINS, Fault, FaultMix
from tests.simulation.tenants import TenantDraw
from tests.support.scheduler.cell_model import VOCABULARY, HashGrammar, Oracle, expected_completion

EOS_TOKEN_IDS = tuple(range(7, 22))

_MAX_PROMPT_TOKENS = 96
_MAX_COMPLETION_TOKENS = 56
_CONTEXT_LENGTH = 192
# In cells with long answers, the lengths of a few completions, which wrap around the token ring of a slot, and of
# prompts that end just before the wrap.
_LONG_COMPLETION_TOKENS = (601, 700)
_LONG_PROMPT_TOKENS = (496, 511)
_LONG_CONTEXT_LENGTH = 832
_MAX_LONG_ANSWERS = 2
_DRAINS_S = (0.0, 0.5, 5.0)
# In a run about schedulers that die in planned stops: answers need the next one for longer than it takes to leave them.
_LONG_DRAIN_S = 20.0
_WORKERS_LOST_S = (1.0, 5.0, 20.0)
# Follow-ups and shared ids refer to one of this many recent requests.
_NUM_RECENT = 8
# The share of cells whose DP ranks have several processes.
_SHARE_OF_GROUPS = 0.25
# The low bits of a sampling seed are the request's number. Steps name only slots, so this identifies their sequences.
_NUMBER_BITS = 20


Salt = tuple[str, bytes]
"""Tenant and cache salt: what requests that share prefixes have in common."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank proposes if no token budget is configured."""

    num_prompt_tokens: int
    """Prompt tokens of a step."""
    mixes: bool
    """Whether decodes join prompts in a step."""


@dataclass(slots=True)
class ModelOnDisk:
    """What a worker's process loads when it starts."""

    weights_digest: str = "weights 1"


@dataclass(frozen=True, slots=True)
class CellSettings:
    """The settings of one run's scheduler and workers."""

    topology: CellTopology
    policy: SchedulerPolicy
    cache: CacheSettings
    context_length: int
    is_exact: bool
    """Whether all ranks compute the same bits, whatever else is in the batch."""
    num_blocks: tuple[int, ...]
    """KV blocks by rank, at its first start; see `pool_of`."""
    proposals: tuple[Proposal, ...]
    """By rank; equal within a failure domain."""
    num_draft_tokens: int
    """Most tokens that the worker drafts for a row."""
    share_right: float
    """The share of drafts that are right."""
    max_live_requests: int
    """Arrivals pause while this many choices are in progress."""
    mean_gap_s: float
    health_kill_s: float
    """The launcher ends a process that does not answer for this long."""
    tp_size: int
    """Processes of each DP rank."""
    num_checkpoint_slots: int | None = None
    """Recurrent states that each rank's worker can save; None for a model without state."""
    max_live_states: int | None = None
    """Sequences for whose recurrent states each rank's worker has room; None for as many as may run."""
    returns_with_less: bool = False
    """Whether every other start of a rank has only the blocks of the longest request."""
    model: ModelOnDisk = field(default_factory=ModelOnDisk)
    poison: dict[int, int] = field(default_factory=dict)
    """The position whose computation kills the worker, by the seed of the poison request."""

    def pool_of(self, rank: int, num_starts: int) -> int:
        """The KV blocks of a rank's process, whose start is its `num_starts`-th one."""
        if not self.returns_with_less or num_starts % 2:
            return self.num_blocks[rank]
        return min(self.num_blocks[rank], -(-self.max_request_tokens // self.cache.block_size))

    def worker_facts(self, epoch: int, rank: int, num_blocks: int) -> WorkerFacts:
        """The facts that a rank with so many blocks reports when it is attached."""
        return WorkerFacts(
            epoch,
            "digest",
            self.context_length,
            VOCABULARY,
            EOS_TOKEN_IDS,
            num_blocks,
            num_draft_tokens=self.num_draft_tokens,
            needs_all_tokens=self.num_draft_tokens > 0,
            numerics_fingerprint="bits",
            is_exact=self.is_exact,
            proposed_prompt_tokens=self.proposals[rank].num_prompt_tokens,
            proposes_mixed_steps=self.proposals[rank].mixes,
            graph_batch_sizes=self.graph_batch_sizes(rank),
            introduction=introduce_self(),
            state_bytes_per_slot=0 if self.num_checkpoint_slots is None else 8,
            num_checkpoint_slots=self.num_checkpoint_slots or 0,
            max_num_seqs=self.max_num_seqs,
        )

    def graph_batch_sizes(self, rank: int) -> tuple[int, ...]:
        """The batch sizes of a rank's graphs: some that all ranks have, and some of its own."""
        return tuple(sorted({1, 4, 16, 2 + 3 * rank, 5 + 3 * rank}))

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that may run on a rank."""
        most = self.policy.max_num_seqs
        return most if self.max_live_states is None else min(most, self.max_live_states)

    def max_step_tokens(self, rank: int) -> int:
        """The most tokens of one step of a rank."""
        budget = self.policy.max_num_batched_tokens
        return self.proposals[rank].num_prompt_tokens + self.policy.max_num_seqs if budget is None else budget

    def max_prompt_tokens(self, rank: int) -> int:
        """The most prompt tokens of one step of a rank."""
        budget = self.policy.max_num_batched_tokens
        return self.proposals[rank].num_prompt_tokens if budget is None else budget

    def mixes(self, rank: int) -> bool:
        """Whether a rank's steps may mix prompts and decodes."""
        mixes = self.policy.enable_mixed_steps
        return self.policy.enable_chunked_prefill and (self.proposals[rank].mixes if mixes is None else mixes)

    @property
    def max_save_points(self) -> int:
        """The most chunks of a prompt that end because its state is saved."""
        if not self.num_checkpoint_slots or not self.policy.enable_chunked_prefill:
            return 0
        interval = self.cache.state_checkpoint_interval
        # After the cached blocks that could not be shared, and for other choices, after the last whole block.
        return 2 + (self.max_request_tokens // interval if interval else 0)

    @property
    def has_long_answers(self) -> bool:
        """Whether a few completions may be long."""
        return self.context_length == _LONG_CONTEXT_LENGTH

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of a prompt with its completion."""
        longest = _LONG_COMPLETION_TOKENS[1] if self.has_long_answers else _MAX_COMPLETION_TOKENS
        return _MAX_PROMPT_TOKENS + longest

    def batch_limits(self, rank: int, num_blocks: int) -> BatchLimits:
        """The limits that a rank with so many blocks checks steps against."""
        return BatchLimits(
            self.policy.max_num_seqs,
            self.max_step_tokens(rank),
            self.cache.block_size,
            num_blocks,
            self.context_length,
            VOCABULARY,
            self.num_checkpoint_slots,
            self.max_live_states,
        )

    @classmethod
    def draw(cls, rng: Random, mix: FaultMix) -> CellSettings:
        """Draw the settings of a cell: tiny to roomy KV pools, and every policy."""
        dp_size = rng.choice([1, 1, 1, 2, 2, 3, 4])
        is_coupled = dp_size > 1 and rng.random() < 0.5
        is_dynamic = Fault.ENDPOINT_GONE in mix.rates and not is_coupled
        topology = CellTopology(dp_size, is_coupled=is_coupled, is_dynamic=is_dynamic)
        block_size = rng.choice([1, 16, 16, 32])
        max_num_seqs = rng.choice([1, 3, 8, 12])
        proposals = _draw_proposals(rng, topology)
        max_num_batched_tokens = rng.choice([16, 48, 600, None])
        least_prompt_tokens = max_num_batched_tokens or min(one.num_prompt_tokens for one in proposals)
        mixes = rng.choice([False, False, True, None])
        max_waiting_requests = rng.randint(3, 10) if Fault.QUEUE_FULL in mix.rates else 1024
        context_length = _LONG_CONTEXT_LENGTH if mix.strikes(Fault.LONG_ANSWER, rng) else _CONTEXT_LENGTH
        policy = SchedulerPolicy(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            delay_factor=rng.choice([0.0, 0.0, 1.5]),
            max_steps_in_flight=rng.randint(1, 4),
            enable_chunked_prefill=bool(mixes) or least_prompt_tokens < context_length or rng.random() < 0.5,
            enable_mixed_steps=mixes,
            max_waiting_requests=max_waiting_requests,
            num_full_tenants=1 if max_waiting_requests % 2 else 8,
            # Room for a few prompts of the longest length at once, or for any number of prompts.
            max_prompt_logprob_bytes=rng.choice([48 * context_length, 2**28])
            if Fault.QUEUE_FULL in mix.rates
            else 2**28,
            queue_policy=rng.choice(list(QueuePolicy)),
            max_age_s=rng.choice([0.5, 10.0]),
            admission_policy=rng.choice(list(AdmissionPolicy)),
            retraction_policy=rng.choice(list(RetractionPolicy)),
            share_in_step=rng.random() < 0.5,
            max_prefill_wait_steps=2 * (max_num_seqs % 2),
            drain_s=_draw_drain_s(rng, mix),
            workers_lost_s=rng.choice(_WORKERS_LOST_S) if Fault.WORKERS_GONE in mix.rates else None,
        )
        # The smallest pool holds just the longest request.
        num_pool_tokens = rng.choice([160, 160, 256, 800])
        if context_length == _LONG_CONTEXT_LENGTH:
            num_pool_tokens = max(num_pool_tokens, rng.choice([800, 1024]))
        num_blocks = [num_pool_tokens // block_size] * dp_size
        is_unequal = mix.strikes(Fault.UNEQUAL_POOLS, rng)
        if is_unequal:
            num_blocks = [number + rng.choice([0, 1, number]) for number in num_blocks]
        settings = cls(
            topology,
            policy,
            CacheSettings(block_size, rng.random() < 0.8),
            context_length,
            rng.random() < 0.7,
            tuple(num_blocks),
            proposals,
            # Coupled ranks do not draft: the number of tokens of a step must be known before it runs.
            num_draft_tokens=rng.randint(1, 8) if rng.random() < 0.5 and not topology.is_coupled else 0,
            share_right=rng.choice([0.2, 0.7, 0.95]),
            # Only a few requests more than fit may find the queue full at a time.
            max_live_requests=min(rng.choice([6, 16, 24]), max_num_seqs + max_waiting_requests + 2),
            mean_gap_s=rng.choice([0.002, 0.03]),
            health_kill_s=rng.choice([30.0, 120.0]),
            # Groups of three only in small cells: every process adds to the cost of a run.
            returns_with_less=is_unequal,
            tp_size=(2 if dp_size > 2 else rng.choice([2, 2, 3])) if rng.random() < _SHARE_OF_GROUPS else 1,
        )
        return settings._with_state(rng) if mix.strikes(Fault.RECURRENT_STATE, rng) else settings

    def _with_state(self, rng: Random) -> CellSettings:
        """The same cell with a model that has recurrent state."""
        cache = replace(
            self.cache,
            state_checkpoint_interval=rng.choice([0, 1, 20, 8192]),
            state_record_interval=rng.choice([1, 20, 256]),
        )
        return replace(
            self,
            cache=cache,
            num_checkpoint_slots=rng.choice([0, 1, 3, 10, 50]),
            max_live_states=rng.choice([None, 2, 7]),
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer of an undisturbed run."""

    tokens: list[int]
    finish: Finish | None
    """None means that the grammar fails after `tokens`."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request: what its client asks for, what the client will do, and the expected answer."""

    number: int
    prompt: list[int]
    params: SamplingParams
    priority: Priority
    cache_salt: bytes
    text_stop_token: int | None
    """The last token of its stop string."""
    patience_s: float | None
    """From arrival to deadline."""
    cancel_after_s: float | None
    abort_call_after_s: float | None
    by_cell: list[Expected]
    """What the cell computes, by choice, unless a client reports a stop string."""
    by_text: list[Expected]
    """What the client receives, by choice: a stop string may end it earlier than the cell would."""
    request_id: str
    tenant: Tenant = DEFAULT_TENANT
    is_exact: bool = False
    is_poison: bool = False

    @property
    def key(self) -> RequestKey:
        """What the cell knows it by."""
        return RequestKey(self.tenant.name, self.request_id)

    @property
    def salt(self) -> Salt:
        """Under which its prefixes are cached."""
        return self.tenant.name, self.cache_salt

    @property
    def own_id(self) -> str:
        """The id it has unless it shares that of another request."""
        return f"r{self.number}"

    @property
    def n(self) -> int:
        """The number of its choices."""
        return len(self.by_cell)

    @property
    def options(self) -> SamplingOptions:
        """Its sampling options, or the defaults."""
        return self.params.options or NO_OPTIONS

    @property
    def num_prompt_logprob_bytes(self) -> int:
        """The bytes charged for the log-probabilities of its prompt."""
        num_top = self.options.num_prompt_logprobs
        return 0 if num_top is None else 12 * len(self.prompt) * (num_top + 1)


def _draw_drain_s(rng: Random, mix: FaultMix) -> float:
    if mix.rates.keys() & DRAINS:
        return rng.choice(_DRAINS_S)
    return _LONG_DRAIN_S if mix.is_about_stops else _DRAINS_S[-1]


def _draw_proposals(rng: Random, topology: CellTopology) -> tuple[Proposal, ...]:
    by_domain = [Proposal(rng.choice([8, 16, 48, 600]), rng.random() < 0.5) for _ in range(topology.num_domains)]
    return tuple(by_domain[topology.domain_of(rank)] for rank in topology.ranks)


def number_of(seed: int) -> int:
    """The number of the request with this sampling seed."""
    return seed & (1 << _NUMBER_BITS) - 1


class Workload:
    """Draws one request after the other; prompts share prefixes, and some continue an earlier answer."""

    def __init__(self, rng: Random, mix: FaultMix, oracle: Oracle, settings: CellSettings, tenants: TenantDraw) -> None:
        """Draw from `rng`; adds the answers to `oracle` and poison requests to `settings.poison`."""
        self._rng = rng
        self._mix = mix
        self._oracle = oracle
        self._tenants = tenants
        self._poison = settings.poison
        self._num_drawn = 0
        self._num_long_answers_left = _MAX_LONG_ANSWERS if settings.has_long_answers else 0
        self._ids: list[str] = []
        # Prompts with their answers appended, and their cache salts.
        self._texts: list[tuple[list[int], bytes]] = []
        self._has_long_prompts = settings.has_long_answers
        longest = _LONG_PROMPT_TOKENS[1] if self._has_long_prompts else _MAX_PROMPT_TOKENS
        self._prefixes = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(3)]
        self._shares_prompts = rng.random() < 0.7
        self._completion_scale = rng.choice([8, 30, _MAX_COMPLETION_TOKENS])

    def draw(self) -> RequestPlan:
        """Draw the next request."""
        rng, number = self._rng, self._num_drawn
        self._num_drawn += 1
        prompt, cache_salt = self._draw_follow_up() or (self._draw_prompt(), rng.choice([b"", b"", b"salt"]))
        is_long = self._num_long_answers_left > 0 and len(prompt) <= _MAX_PROMPT_TOKENS and rng.random() < 0.2
        self._num_long_answers_left -= is_long
        max_tokens = rng.randint(*_LONG_COMPLETION_TOKENS) if is_long else rng.randint(1, self._completion_scale)
        seed = rng.getrandbits(64 - _NUMBER_BITS) << _NUMBER_BITS | number
        is_poison = self._poisons(seed, len(prompt))
        n = rng.choice([2, 3, 8]) if rng.random() < 0.2 and not (is_poison or is_long) else 1
        grammar = self._draw_grammar(max_tokens)
        completions = [_complete(prompt, seed, max_tokens, choice, grammar) for choice in range(n)]
        for completion in completions:
            # Including the tokens after a stop, since drafts continue there.
            self._oracle.learn_answer(prompt, completion)
        params = self._draw_params(completions[0], seed, grammar, may_end_early=not is_long)
        text_stop_token = completions[0][rng.randrange(max_tokens)] if self._strikes(Fault.TEXT_STOP) else None
        by_cell = [_expect(completion, params, None) for completion in completions]
        self._texts.append((prompt + by_cell[0].tokens, cache_salt))
        return RequestPlan(
            number,
            prompt,
            params,
            priority=rng.choice(list(Priority)),
            cache_salt=cache_salt,
            text_stop_token=text_stop_token,
            patience_s=rng.choice([0.02, 0.3, 3.0, 30.0]) if self._strikes(Fault.DEADLINE) else None,
            cancel_after_s=rng.choice([0.0, 0.05, 0.5, 5.0]) if self._strikes(Fault.CANCEL) else None,
            abort_call_after_s=rng.choice([0.0, 0.05, 0.5, 5.0]) if self._strikes(Fault.ABORT_CALL) else None,
            by_cell=by_cell,
            by_text=[_expect(completion, params, text_stop_token) for completion in completions],
            request_id=f"r{number}" if is_poison else self._draw_id(number),
            tenant=self._tenants.draw(),
            is_exact=self._strikes(Fault.EXACT),
            is_poison=is_poison,
        )

    def _poisons(self, seed: int, num_prompt_tokens: int) -> bool:
        """Draw whether a request kills the worker that computes its last prompt token; at most one per run does."""
        if self._poison or not self._strikes(Fault.POISON):
            return False
        self._poison[seed] = num_prompt_tokens - 1
        return True

    def _draw_follow_up(self) -> tuple[list[int], bytes] | None:
        """A prompt that continues an answer, and its salt; None if a new prompt is to be drawn."""
        texts = [text for text in self._texts[-_NUM_RECENT:] if len(text[0]) < _MAX_PROMPT_TOKENS]
        if not self._shares_prompts or not texts or self._rng.random() < 0.75:
            return None
        text, cache_salt = self._rng.choice(texts)
        return [*text, self._rng.randrange(VOCABULARY)], cache_salt

    def _draw_prompt(self) -> list[int]:
        rng = self._rng
        length = rng.choice([1, 15, 16, 17, 32, 33, 48, 65, _MAX_PROMPT_TOKENS])
        if self._has_long_prompts and rng.random() < 0.2:
            length = rng.randint(*_LONG_PROMPT_TOKENS)
        num_shared = rng.choice([0, length // 2, length - 1, length]) if self._shares_prompts else 0
        shared = rng.choice(self._prefixes)[:num_shared]
        return shared + [rng.randrange(VOCABULARY) for _ in range(length - num_shared)]

    def _draw_id(self, number: int) -> str:
        """Draw an id of its own, or that of another recent request."""
        is_own = not self._ids or not self._strikes(Fault.SAME_ID)
        self._ids.append(f"r{number}" if is_own else self._rng.choice(self._ids[-_NUM_RECENT:]))
        return self._ids[-1]

    def _draw_grammar(self, max_tokens: int) -> str | None:
        """Draw the text of a `HashGrammar`; None means no grammar."""
        if self._strikes(Fault.GRAMMAR_FAILURE):
            return str(self._rng.randrange(max_tokens))
        return str(max_tokens) if self._strikes(Fault.GRAMMAR) else None

    def _draw_params(
        self, completion: list[int], seed: int, grammar: str | None, *, may_end_early: bool
    ) -> SamplingParams:
        rng = self._rng
        at = rng.randrange(len(completion)) if may_end_early else len(completion) - 1
        stop_token_ids = (completion[at],) if rng.random() < 0.15 else ()
        stop_sequence = tuple(completion[max(0, at - rng.randint(0, 3)) : at + 1])
        return SamplingParams(
            max_tokens=len(completion),
            seed=seed,
            ignore_eos=rng.random() < 0.5 or not may_end_early,
            stop_token_ids=stop_token_ids,
            stop_token_sequences=(stop_sequence,) if rng.random() < 0.15 else (),
            options=self._draw_options(len(completion), grammar),
        )

    def _draw_options(self, max_tokens: int, grammar: str | None) -> SamplingOptions | None:
        rng = self._rng
        drawn = SamplingOptions(
            # A real worker masks stop tokens before `min_tokens`; the simulated one samples them, unless a grammar
            # masks.
            min_tokens=rng.randint(1, max_tokens) if rng.random() < 0.15 and grammar is None else 0,
            num_logprobs=rng.choice([0, 1, 3]) if rng.random() < 0.2 else None,
            num_prompt_logprobs=rng.choice([0, 2]) if rng.random() < 0.2 else None,
            grammar=grammar or "",
        )
        # Not drawn, so that seeds keep their workloads.
        requested = (9, 3, 9) if drawn.num_logprobs == 1 else (5,) if drawn.num_prompt_logprobs == 0 else ()
        options = replace(drawn, logprob_token_ids=requested)
        return None if options == NO_OPTIONS else options

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)


def _complete(prompt: list[int], seed: int, max_tokens: int, choice: int, grammar: str | None) -> list[int]:
    """The tokens that a worker samples; those after a grammar failure are never delivered."""
    matcher = None if grammar is None else HashGrammar(grammar)
    return expected_completion(prompt, seed, max_tokens, choice, grammar=matcher)


def _expect(completion: list[int], params: SamplingParams, text_stop_token: int | None) -> Expected:
    """The part of a completion up to its first stop.

    Stop strings are matched in the text, and the token of an EOS or stop token end has no text.
    """
    fails_after = params.options.grammar if params.options is not None else ""
    for length in range(1, len(completion) + 1):
        tokens = completion[:length]
        if fails_after and length > int(fails_after):
            return Expected(tokens[:-1], None)
        finish = _find_finish(tokens, params)
        is_silent = finish is not None and finish.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if tokens[-1] == text_stop_token and not is_silent:
            return Expected(tokens, Finish(FinishReason.STOP_STRING))
        if finish is not None:
            return Expected(tokens, finish)
    raise AssertionError("a completion always ends")


def _find_finish(tokens: list[int], params: SamplingParams) -> Finish | None:
    """Why the cell ends a completion after its newest token; independent of the scheduler's implementation."""
    last = tokens[-1]
    if params.options is not None and len(tokens) < params.options.min_tokens:
        return None
    for sequence in params.stop_token_sequences:
        if tuple(tokens[-len(sequence) :]) == sequence:
            return Finish(FinishReason.STOP_SEQUENCE)
    if last in EOS_TOKEN_IDS and not params.ignore_eos:
        return Finish(FinishReason.EOS, last)
    if last in params.stop_token_ids:
        return Finish(FinishReason.STOP_TOKEN, last)
    if len(tokens) == params.max_tokens:
        return Finish(FinishReason.MAX_TOKENS)
    return None
