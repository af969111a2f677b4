"""Finds stop strings in text that arrives in pieces, looking at every character once.

Source: Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search", CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in a text."""

    start: int
    """The index of its first character."""
    stop: str


class StopMatcher:
    """Watches one text. The stop string that begins first wins; of two that begin together, the one completed first.

    Text is held back while it may belong to a stop string. A completed one is only a candidate while one that began
    earlier can still be completed; then the matcher is decided.

    Invariant: `_node` is the longest end of the text that begins a stop string.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """`stops` has at least one, none empty; `includes_stop` keeps the one found in the text."""
        self._automaton = _Automaton(stops)
        self._includes_stop = includes_stop
        # Whether stop strings that are completed now count.
        self.is_watchful = True
        self._node = _ROOT
        self._num_characters = 0
        self._num_taken = 0
        self._held = ""
        self.candidate: StopMatch | None = None
        self.is_decided = False

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that has become certain.

        Not to be called once decided. Text after the deciding character is dropped.
        """
        self._held += text
        for character in text:
            self._num_characters += 1
            self._node = self._automaton.next_node(self._node, character)
            if self._node != _ROOT or self.candidate is not None:
                self._judge()
                if self.is_decided:
                    break
        return self._take_certain()

    def finish(self) -> str:
        """The text has ended: a candidate wins. Returns the remaining text."""
        self._node = _ROOT
        self.is_decided = self.candidate is not None
        return self._take_certain()

    def _judge(self) -> None:
        stop = self._automaton.stops[self._node] if self.is_watchful else None
        if stop is not None:
            start = self._num_characters - len(stop)
            if self.candidate is None or start < self.candidate.start:
                self.candidate = StopMatch(start, stop)
        self.is_decided = self.candidate is not None and self.candidate.start <= self._first_possible_start()

    def _first_possible_start(self) -> int:
        return self._num_characters - self._automaton.depths[self._node]

    def _take_certain(self) -> str:
        end = self._first_possible_start()
        if self.is_decided and self.candidate is not None:
            end = self.candidate.start + (len(self.candidate.stop) if self._includes_stop else 0)
        num_certain = end - self._num_taken
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        self._num_taken = end
        return certain


class _Automaton:
    """A trie of the stop strings with fallback links; each node is a prefix."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks: list[int] = [_ROOT]
        self.depths = [0]
        # Per node: the longest stop string that its prefix ends with.
        self.stops: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def next_node(self, node: int, character: str) -> int:
        while node != _ROOT and character not in self._children[node]:
            node = self._fallbacks[node]
        return self._children[node].get(character, _ROOT)

    def _insert(self, stop: str) -> None:
        node = _ROOT
        for depth, character in enumerate(stop, start=1):
            children = self._children[node]
            if character not in children:
                children[character] = len(self._children)
                self._children.append({})
                self._fallbacks.append(_ROOT)
                self.depths.append(depth)
                self.stops.append(None)
            node = children[character]
        self.stops[node] = stop

    def _link(self) -> None:
        """A node's fallback is its longest proper suffix that is a node."""
        nodes = deque(self._children[_ROOT].values())
        while nodes:
            node = nodes.popleft()
            if self.stops[node] is None:
                self.stops[node] = self.stops[self._fallbacks[node]]
            for character, child in self._children[node].items():
                self._fallbacks[child] = self.next_node(self._fallbacks[node], character)
                nodes.append(child)
