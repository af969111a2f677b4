"""Schedulers that compete for the same groups over a faulty network: every next state of a state.

A state is a tuple of small immutable parts. Messages are lost (an undelivered one counts as lost once the sender gives
up), arrive late (even after the sender has given up or died) and are repeated. Streams keep their order, but their two
ends notice a break at different times. All other faults are counted and bounded: a process dies, a link breaks, a lease
runs out while its holder is alive.

An offer does not overtake its sender's earlier Restart: `DomainClient` sends it only after the Restart was answered or
has failed. A Restart that timed out may still arrive later; the model omits that case.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.cell.domains.attach_events import (
    QUESTION,
    Accepted,
    AttachEvent,
    CloseStreams,
    Command,
    Offer,
    OpenStreams,
    Refused,
    Restart,
    RetryDue,
    StreamBroken,
)
from services.scheduler.cell.events import Exit
from services.scheduler.core.policy import CellTopology
from services.worker.server.claim import ClaimLedger
from shared.ids import DpRank
from tests.simulation.attach.actors import GroupActor, ProtocolError, SchedulerActor, States
from tests.simulation.attach.messages import OPENING, Bounds, Message, Move, Reply, ReplyEvent, Request, State, Stream


class AttachModel:
    """Generates every move of the protocol; raises ProtocolError when one violates a guarantee."""

    def __init__(self, topology: CellTopology, bounds: Bounds, *, num_schedulers: int = 2) -> None:
        self._topology = topology
        self._bounds = bounds
        self._num_schedulers = num_schedulers
        self.schedulers: States[SchedulerActor] = States()
        self.groups: States[GroupActor] = States()

    def first_state(self) -> State:
        """The state in which all processes have just started."""
        slots, groups = range(self._num_schedulers), range(self._topology.dp_size)
        return State(
            tuple(self._new_scheduler(slot, 0) for slot in slots),
            (0,) * len(slots),
            tuple(self._new_group(group) for group in groups),
            frozenset(),
            0,
        )

    def has_room(self, state: State, *, num_epochs: int, num_lives: int) -> bool:
        """Whether the bounds leave room for this many higher epochs and this many scheduler restarts."""
        epochs = [
            *(max(self.schedulers[number].known_epochs) for number in state.schedulers),
            *(self.groups[number].ledger.epoch for number in state.groups),
            *(message.epoch for message in state.messages if isinstance(message, Request)),
        ]
        return (
            max(epochs) + num_epochs <= self._bounds.max_epoch and max(state.lives) + num_lives < self._bounds.max_lives
        )

    def is_served(self, state: State) -> bool:
        """Whether one scheduler has attached all domains, and every group has an open stream from it."""
        return any(self._serves(self.schedulers[number], state) for number in state.schedulers)

    def is_alone(self, state: State) -> bool:
        """Whether at most one scheduler is alive."""
        return sum(not self.schedulers[number].has_exited for number in state.schedulers) <= 1

    def check(self, state: State) -> None:
        """Check the invariants of a state in which nothing is in transit.

        Raises:
            ProtocolError: A scheduler has attached a domain without holding one of its groups.
        """
        if any(not isinstance(message, Stream) or self._has_news(state, message) for message in state.messages):
            return
        for number in state.schedulers:
            scheduler = self.schedulers[number]
            for domain, epoch in scheduler.attached.items():
                for group in self._topology.ranks_of(domain):
                    ledger = self._ledger(state, group)
                    if not ledger.is_open or (ledger.epoch, ledger.holder) != (epoch, scheduler.instance_id):
                        raise ProtocolError(f"scheduler {scheduler.instance_id} continues without group {group}")

    def moves(self, state: State) -> Iterator[Move]:
        """Yield every move from a state that stays within the bounds."""
        return (move for move in self._moves(state) if self._is_within_bounds(move.state))

    def _is_within_bounds(self, state: State) -> bool:
        # A loop, since a generator for each of a million moves takes as long as the moves.
        for message in state.messages:
            if isinstance(message, Request) and message.epoch > self._bounds.max_epoch:
                return False
        return True

    def _moves(self, state: State) -> Iterator[Move]:
        may_fail = state.num_faults < self._bounds.max_faults
        for slot in range(self._num_schedulers):
            yield from self._scheduler_moves(state, slot, may_fail=may_fail)
        for message in state.messages:
            if isinstance(message, Stream):
                yield from self._stream_moves(state, message, may_fail=may_fail)
            elif isinstance(message, Request):
                if not _is_overtaking(state, message):
                    yield from self._request_moves(state, message, may_fail=may_fail)
            else:
                yield from self._reply_moves(state, message, may_fail=may_fail)
        later = self._pass_lease(state)
        if later != state:
            yield Move("a lease passes", "", later)
        if may_fail:
            for group in range(self._topology.dp_size):
                yield Move("a group dies", group, self._restart_group(_fault(state), group), True)

    def _scheduler_moves(self, state: State, slot: int, *, may_fail: bool) -> Iterator[Move]:
        scheduler = self.schedulers[state.schedulers[slot]]
        name = scheduler.instance_id
        if scheduler.has_exited:
            if state.lives[slot] + 1 < self._bounds.max_lives:
                yield Move("is started again", name, self._replace_scheduler(state, slot))
            return
        for domain in range(self._topology.num_domains):
            if scheduler.is_retry_due[domain]:
                begins = f"begins a round with domain {domain}"
                yield Move(begins, name, self._begin_round(state, slot, domain))
                if may_fail and not scheduler.has_attached:
                    for deaf_group in self._topology.ranks_of(domain):
                        after = self._begin_round(_fault(state), slot, domain, deaf_group=deaf_group)
                        yield Move(f"{begins} and does not reach group {deaf_group}", name, after, True)
            if scheduler.num_sent.get(domain, self._bounds.max_steps) < self._bounds.max_steps:
                yield Move("sends a step", name, self._send_step(state, slot, domain))
            for group in scheduler.awaited[domain]:
                # Giving up while the offer or its answer is in transit is a fault: the answer could have arrived.
                is_fault = self._may_be_answered(state, slot, group)
                if may_fail or not is_fault:
                    refusal = Refused(group, scheduler.epochs[domain], "no answer came")
                    after = self._handle(_fault(state) if is_fault else state, slot, domain, refusal)
                    yield Move("waits no longer", name, after, is_fault)
        if may_fail:
            yield Move("dies", name, self._end_scheduler(_fault(state), slot), True)

    def _request_moves(self, state: State, request: Request, *, may_fail: bool) -> Iterator[Move]:
        rest = state._replace(messages=state.messages - {request})
        yield Move("arrives", request, self._deliver_request(rest, request, is_lease_over=False))
        if may_fail:
            yield Move("arrives, not for the last time", request, self._repeat(state, request), True)
            if not request.is_restart:
                lapsed = self._deliver_request(_fault(rest), request, is_lease_over=True)
                yield Move("finds the lease run out", request, lapsed, True)

    def _reply_moves(self, state: State, reply: Reply, *, may_fail: bool) -> Iterator[Move]:
        rest = state._replace(messages=state.messages - {reply})
        yield Move("arrives", reply, self._deliver_reply(rest, reply))
        if may_fail:
            yield Move("arrives, not for the last time", reply, self._deliver_reply(_fault(state), reply), True)
            if isinstance(reply.event, Accepted | Refused):
                yield Move("is lost", reply, _fault(rest), True)

    def _stream_moves(self, state: State, stream: Stream, *, may_fail: bool) -> Iterator[Move]:
        rest = state._replace(messages=state.messages - {stream})
        if stream.items:
            yield Move("brings its next item", stream, self._deliver_item(rest, stream))
        if stream.is_closed:
            yield Move("ends", stream, self._end_stream(rest, stream))
        elif may_fail:
            yield Move("breaks at the group", stream, self._end_stream(_fault(rest), stream), True)
            event = StreamBroken(stream.group, stream.epoch)
            domain = self._domain_of(stream.group)
            broken = self._handle(_fault(state), stream.slot, domain, event)
            yield Move("breaks at the scheduler", stream, broken, True)
        ledger = self._ledger(state, stream.group)
        if ledger.epoch > stream.epoch:
            cut = self._end_stream(rest, stream, ledger.epoch, ledger.live_holder(0.0))
            yield Move("is cut", stream, cut)

    def _deliver_request(self, state: State, request: Request, *, is_lease_over: bool) -> State:
        group = request.group
        if request.is_restart:
            _, may_restart = self.groups.call(
                state.groups[group], "is_restart_allowed", request.epoch, request.instance_id
            )
            return self._restart_group(state, group) if may_restart else state
        number, answer = self.groups.call(
            state.groups[group], "offer", request.epoch, request.instance_id, is_lease_over
        )
        state = state._replace(groups=_with(state.groups, group, number))
        return self._reply(state, request.instance_id, request.slot, answer)

    def _repeat(self, state: State, request: Request) -> State:
        return _send(self._deliver_request(_fault(state), request, is_lease_over=False), request)

    def _begin_round(self, state: State, slot: int, domain: int, *, deaf_group: int | None = None) -> State:
        """Begin a round; its questions are answered at once.

        No behaviour is lost: the offer that follows an answer may be delayed instead of the answer.
        """
        number, commands = self.schedulers.call(state.schedulers[slot], "handle", domain, RetryDue(), False)
        state = state._replace(schedulers=_with(state.schedulers, slot, number))
        instance_id = self.schedulers[number].instance_id
        for command in commands:
            if command.epoch != QUESTION:
                state = self._perform(state, slot, domain, command)
                continue
            answer = Refused(command.group, QUESTION, "no answer came")
            if command.group != deaf_group:
                _, answer = self.groups.call(state.groups[command.group], "offer", QUESTION, instance_id, False)
            is_holder_alive = self._lives(state, answer.holder)
            state = self._handle(state, slot, domain, answer, is_holder_alive=is_holder_alive)
        return state

    def _reply(self, state: State, instance_id: str, slot: int, event: ReplyEvent) -> State:
        """Send an event to a scheduler.

        An event without commands is delivered at once: the time of its arrival makes no difference, and a lost answer
        is a move of its own.
        """
        if not self._is_there(state, slot, instance_id):
            return state
        is_holder_alive = isinstance(event, Refused | StreamBroken) and self._lives(state, event.holder)
        reply = Reply(instance_id, slot, event, is_holder_alive)
        domain = self._domain_of(event.group)
        number, commands = self.schedulers.call(state.schedulers[slot], "handle", domain, event, is_holder_alive)
        return _send(state, reply) if commands else state._replace(schedulers=_with(state.schedulers, slot, number))

    def _deliver_reply(self, state: State, reply: Reply) -> State:
        if not self._is_there(state, reply.slot, reply.instance_id):
            return state
        domain = self._domain_of(reply.event.group)
        return self._handle(state, reply.slot, domain, reply.event, is_holder_alive=reply.is_holder_alive)

    def _deliver_item(self, state: State, stream: Stream) -> State:
        """Deliver the next item of a stream, which ends if the item is refused."""
        item, group = stream.items[0], stream.group
        left = stream._replace(items=stream.items[1:])
        call = ("open_stream",) if item == OPENING else ("admit", item)
        number, event = self.groups.call(state.groups[group], *call, stream.number, stream.epoch, stream.instance_id)
        state = state._replace(groups=_with(state.groups, group, number))
        if item != OPENING and event is None:
            self._check_collectives(state, group)
        if isinstance(event, StreamBroken):
            return self._end_stream(state, left, event.held_epoch, event.holder)
        state = _send(state, left)
        return state if event is None else self._reply(state, stream.instance_id, stream.slot, event)

    def _end_stream(self, state: State, stream: Stream, held_epoch: int | None = None, holder: str = "") -> State:
        """End a stream at the group, after its removal from the messages; the scheduler is notified later."""
        number, _ = self.groups.call(state.groups[stream.group], "end_stream", stream.number)
        state = state._replace(groups=_with(state.groups, stream.group, number))
        if stream.is_closed:
            return state
        event = StreamBroken(stream.group, stream.epoch, held_epoch, holder)
        return self._reply(state, stream.instance_id, stream.slot, event)

    def _handle(
        self, state: State, slot: int, domain: int, event: AttachEvent, *, is_holder_alive: bool = False
    ) -> State:
        number, commands = self.schedulers.call(state.schedulers[slot], "handle", domain, event, is_holder_alive)
        state = state._replace(schedulers=_with(state.schedulers, slot, number))
        for command in commands:
            state = self._perform(state, slot, domain, command)
        return state

    def _perform(self, state: State, slot: int, domain: int, command: Command) -> State:
        instance_id = self.schedulers[state.schedulers[slot]].instance_id
        match command:
            case Offer(group, epoch):
                return _send(state, Request(instance_id, slot, group, epoch, is_restart=False))
            case Restart(group, epoch):
                return _send(state, Request(instance_id, slot, group, epoch, is_restart=True))
            case OpenStreams(epoch):
                for group in self._topology.ranks_of(domain):
                    state = _send(state, Stream(instance_id, slot, group, epoch, (OPENING,), is_closed=False))
            case CloseStreams():
                return self._close_streams(state, slot, domain)
            case Exit():
                return self._end_scheduler(state, slot)
        return state

    def _close_streams(self, state: State, slot: int, domain: int | None = None) -> State:
        """Close a scheduler's ends of its streams: those of one domain, or all if `domain` is None."""
        groups = range(self._topology.dp_size) if domain is None else self._topology.ranks_of(domain)
        return state._replace(
            messages=frozenset(
                message._replace(is_closed=True)
                if isinstance(message, Stream) and message.slot == slot and message.group in groups
                else message
                for message in state.messages
            )
        )

    def _send_step(self, state: State, slot: int, domain: int) -> State:
        number, step_id = self.schedulers.call(state.schedulers[slot], "send_step", domain)
        state = state._replace(schedulers=_with(state.schedulers, slot, number))
        groups = self._topology.ranks_of(domain)
        messages = frozenset(
            message._replace(items=(*message.items, step_id))
            if isinstance(message, Stream)
            and not message.is_closed
            and message.slot == slot
            and message.group in groups
            else message
            for message in state.messages
        )
        return state._replace(messages=messages)

    def _pass_lease(self, state: State) -> State:
        """Let a lease pass: holders without an open stream lose their groups."""
        heard = {
            (message.group, message.epoch, message.instance_id)
            for message in state.messages
            if isinstance(message, Stream) and not message.is_closed
        }
        groups, schedulers = list(state.groups), list(state.schedulers)
        for group, number in enumerate(groups):
            ledger = self.groups[number].ledger
            if ledger.live_holder(0.0) and (group, ledger.epoch, ledger.holder) not in heard:
                groups[group], _ = self.groups.call(number, "pass_lease")
        for slot, number in enumerate(schedulers):
            if not self.schedulers[number].has_exited:
                schedulers[slot], _ = self.schedulers.call(number, "pass_lease")
        return state._replace(groups=tuple(groups), schedulers=tuple(schedulers))

    def _end_scheduler(self, state: State, slot: int) -> State:
        """End a scheduler's process; the other ends of its streams have not noticed yet."""
        number, _ = self.schedulers.call(state.schedulers[slot], "exit")
        return self._close_streams(state._replace(schedulers=_with(state.schedulers, slot, number)), slot)

    def _replace_scheduler(self, state: State, slot: int) -> State:
        """Start a new scheduler process in the slot of one that has ended."""
        life = state.lives[slot] + 1
        return state._replace(
            schedulers=_with(state.schedulers, slot, self._new_scheduler(slot, life)),
            lives=_with(state.lives, slot, life),
        )

    def _restart_group(self, state: State, group: int) -> State:
        """End a group's processes and its streams, and start new processes without any state."""
        for stream in [message for message in state.messages if isinstance(message, Stream) and message.group == group]:
            state = self._end_stream(state._replace(messages=state.messages - {stream}), stream)
        return state._replace(groups=_with(state.groups, group, self._new_group(group)))

    def _new_scheduler(self, slot: int, life: int) -> int:
        instance_id = str(life * self._num_schedulers + slot)
        return self.schedulers.number_of(SchedulerActor(instance_id, self._topology))

    def _new_group(self, group: int) -> int:
        return self.groups.number_of(GroupActor(group, self._topology))

    def _has_news(self, state: State, stream: Stream) -> bool:
        """Whether one end of a stream has yet to receive an item or notice its end."""
        return stream.is_closed or bool(stream.items) or self._ledger(state, stream.group).epoch > stream.epoch

    def _domain_of(self, group: int) -> int:
        return self._topology.domain_of(DpRank(group))

    def _ledger(self, state: State, group: int) -> ClaimLedger:
        return self.groups[state.groups[group]].ledger

    def _may_be_answered(self, state: State, slot: int, group: int) -> bool:
        return any(
            message.slot == slot and (message.group if isinstance(message, Request) else message.event.group) == group
            for message in state.messages
            if not isinstance(message, Stream)
        )

    def _is_there(self, state: State, slot: int, instance_id: str) -> bool:
        scheduler = self.schedulers[state.schedulers[slot]]
        return scheduler.instance_id == instance_id and not scheduler.has_exited

    def _lives(self, state: State, instance_id: str) -> bool:
        return any(self._is_there(state, slot, instance_id) for slot in range(self._num_schedulers))

    def _serves(self, scheduler: SchedulerActor, state: State) -> bool:
        if len(scheduler.attached) < self._topology.num_domains:
            return False
        open_streams = {
            (message.group, message.instance_id, message.epoch)
            for message in state.messages
            if isinstance(message, Stream) and not message.is_closed
        }
        for group, number in enumerate(state.groups):
            ledger = self.groups[number].ledger
            claim = (scheduler.instance_id, scheduler.attached[self._domain_of(group)])
            if not ledger.is_open or (ledger.holder, ledger.epoch) != claim or (group, *claim) not in open_streams:
                return False
        return True

    def _check_collectives(self, state: State, group: int) -> None:
        """Check that coupled groups run the same steps in the same order, so that their collectives match.

        Raises:
            ProtocolError: The n-th steps of two groups differ.
        """
        launches = self.groups[state.groups[group]].launches
        for partner in self._topology.ranks_of(self._domain_of(group)):
            others = self.groups[state.groups[partner]].launches
            if any(own != other for own, other in zip(launches, others, strict=False)):
                raise ProtocolError(f"group {group} met group {partner} in a different step: {launches}, {others}")


def _is_overtaking(state: State, request: Request) -> bool:
    """Whether an earlier Restart of the same sender to the same group is still in transit."""
    return any(
        isinstance(other, Request)
        and other.is_restart
        and (other.instance_id, other.group) == (request.instance_id, request.group)
        and other.epoch < request.epoch
        for other in state.messages
    )


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def _send(state: State, message: Message) -> State:
    return state._replace(messages=state.messages | {message})


def _fault(state: State) -> State:
    return state._replace(num_faults=state.num_faults + 1)
