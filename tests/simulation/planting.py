"""What a bug is that the simulation must see, and how one is entered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.simulation.faults import Fault

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug, what it breaks, and the kinds of faults under which it must show."""

    name: str
    breaks: str
    kinds: tuple[Fault, ...]
    plant: Plant


def planter(bugs: list[PlantedBug]) -> Callable[..., Callable[[Plant], Plant]]:
    """A decorator that enters functions which plant a bug; their docstrings say what it breaks, its arguments where."""

    def planted(*kinds: Fault) -> Callable[[Plant], Plant]:
        def enter(plant: Plant) -> Plant:
            bugs.append(PlantedBug(plant.__name__.strip("_"), plant.__doc__ or "", kinds, plant))
            return plant

        return enter

    return planted
