"""What the tests of planes share: a clock that stands still, and planes over the reference model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dreamlake.lakeshore.planes.plane import Plane
from dreamlake.lakeshore.testing.reference.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeClock:
    """Seconds since the epoch that pass only when told to."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


async def holder_of_model(plane: Plane) -> str:
    return "here"


def model_planes(clock: FakeClock | None, kind: type[Model] = Model) -> Callable[[], Plane]:
    """A factory of fresh planes over a model, by the clock given or the real one."""
    now = time.time if clock is None else clock.now

    def make() -> Plane:
        plane = Plane(lambda: kind(now), "Model()")
        plane.local = True
        return plane

    return make
