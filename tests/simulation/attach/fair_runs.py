"""Finds where fair runs through a graph of states end or cycle forever.

A run is fair if no move is continuously possible and never made (weak fairness): messages arrive at some time, and time
passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

# (from, to), by state number.
Edge = tuple[int, int]
# The moves from a state: the label of each, and the state to which it leads.
LabelledMoves = Callable[[int], Iterable[tuple[Hashable, int]]]


def find_origins(numbers: Iterable[int], edges: Iterable[Edge]) -> set[int]:
    """The states from which one of these can be reached, themselves included."""
    sources = defaultdict(list)
    for origin, number in edges:
        sources[number].append(origin)
    found = set(numbers)
    pending = list(found)
    while pending:
        new = [origin for origin in sources[pending.pop()] if origin not in found]
        found.update(new)
        pending += new
    return found


def find_dead_ends(states: set[int], edges: Iterable[Edge]) -> set[int]:
    """The states without an outgoing edge."""
    return states - {origin for origin, _ in edges}


def find_fair_circles(states: set[int], edges: Iterable[Edge], moves: LabelledMoves) -> set[int]:
    """The states on cycles in which a fair run may stay forever."""
    successors = _trim(states, edges)
    return {
        number
        for component in _find_components(successors)
        if _has_circle(component, successors) and _is_fair(component, moves)
        for number in component
    }


def _trim(states: set[int], edges: Iterable[Edge]) -> dict[int, list[int]]:
    """The successors of the states from which a cycle can be reached; usually there are none."""
    successors: dict[int, list[int]] = {number: [] for number in states}
    sources = defaultdict(list)
    for origin, number in edges:
        if origin in states and number in states:
            successors[origin].append(number)
            sources[number].append(origin)
    num_left = {number: len(next_ones) for number, next_ones in successors.items()}
    pending = [number for number, count in num_left.items() if not count]
    while pending:
        number = pending.pop()
        del successors[number]
        for origin in sources[number]:
            num_left[origin] -= 1
            if not num_left[origin]:
                pending.append(origin)
    return {origin: [number for number in some if number in successors] for origin, some in successors.items()}


def _find_components(successors: dict[int, list[int]]) -> Iterator[set[int]]:
    """Yield the strongly connected components.

    Source: Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1(2), 1972; made iterative.
    """
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root, first_ones in successors.items():
        if root in order:
            continue
        path = [(root, iter(first_ones))]
        order[root] = lowest[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while path:
            number, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[number])
                if lowest[number] == order[number]:
                    component = set(stack[stack.index(number) :])
                    del stack[-len(component) :]
                    on_stack -= component
                    yield component
            elif following not in order:
                order[following] = lowest[following] = len(order)
                stack.append(following)
                on_stack.add(following)
                path.append((following, iter(successors[following])))
            elif following in on_stack:
                lowest[number] = min(lowest[number], order[following])


def _has_circle(component: set[int], successors: dict[int, list[int]]) -> bool:
    return len(component) > 1 or any(number in successors[number] for number in component)


def _is_fair(component: set[int], moves: LabelledMoves) -> bool:
    """Whether every move that is possible in all states of a component is made within it."""
    made: set[Hashable] = set()
    always: set[Hashable] | None = None
    for number in component:
        possible = set()
        for label, target in moves(number):
            possible.add(label)
            if target in component:
                made.add(label)
        always = possible if always is None else always & possible
    return not always or always <= made
