"""The type of a planted bug, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.simulation.faults import Fault

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug, its effect, and the kinds of faults under which the simulation must detect it."""

    name: str
    breaks: str
    kinds: tuple[Fault, ...]
    plant: Plant
    seed: int
    """One that shows the bug, to be tried first."""
    raises: type[Exception]
    """What shows it: a check that fails, unless the cell itself notices that it cannot go on."""


def planter(bugs: list[PlantedBug]) -> Callable[..., Callable[[Plant], Plant]]:
    """Return a decorator that registers bugs in `bugs`.

    The decorator's arguments are the fault kinds, a seed that shows the bug and what it `raises`; the docstring of the
    decorated function becomes `breaks`.
    """

    def planted(*kinds: Fault, seed: int = 0, raises: type[Exception] = AssertionError) -> Callable[[Plant], Plant]:
        def enter(plant: Plant) -> Plant:
            bugs.append(PlantedBug(plant.__name__.strip("_"), plant.__doc__ or "", kinds, plant, seed, raises))
            return plant

        return enter

    return planted
