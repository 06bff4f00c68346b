"""The conformance suite: what every plane has to do, checked from outside."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

import anyio

from . import claims as claims
from . import journals as journals
from . import leaving as leaving
from . import moving as moving
from . import rows as rows
from . import waits as waits
from .lab import RULES, Clock, Lab
from .sequences import Sequence

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator
    from contextlib import AbstractAsyncContextManager

    from ..planes.plane import Plane

__all__ = ["check_plane"]


async def check_plane(
    factory: Callable[[], AbstractAsyncContextManager[Plane]],
    *,
    clock: Clock | None = None,
    holder: Callable[[Plane], Awaitable[str]] | None = None,
    sequences: int = 150,
    length: int = 30,
    seed: int = 0,
    crowd: int = 200,
    patience: float = 30.0,
    only: Collection[str] | None = None,
) -> None:
    """Hold a plane against the contract: one named check for each rule, and generated sequences against the model.

    factory: gives a fresh, empty plane each time it is entered. clock: what the factory's planes go by, when that is no
    real clock; all that time does is then part of the sequences, otherwise short real leases are waited for. holder: asks a
    plane for the name by which `Reap` knows the claims made through it; without it what is said of holders is skipped.
    sequences, length: how many sequences of how many operations; seed: which ones. crowd: how many submits at once share
    a key. patience: seconds for one check. only: names of the named checks to run; all by default.

    Raises AssertionError with one sentence for each check that failed: the rule, what was expected, what came;
    ValueError for an unknown name in `only`. Runs on asyncio and trio; cancellation ends it at once.
    """
    if unknown := set(only or ()) - {one.name for one in RULES}:
        raise ValueError(f"no checks are called {sorted(unknown)}: `only` takes {[one.name for one in RULES]}")
    faults: list[Exception] = []
    named = [one for one in RULES if only is None or one.name in only]
    for name, sentence, check in named:
        try:
            with anyio.fail_after(patience):
                async with factory() as plane:
                    name_of_holder = None if holder is None else await holder(plane)
                    await check(Lab(plane, clock, name_of_holder, crowd, patience / 3, sentence))
        except Exception as exc:
            faults.append(_fault(name, sentence, exc, patience))
    for number in range(sequences):
        try:
            with anyio.fail_after(patience):
                async with factory() as plane:
                    name_of_holder = None if holder is None else await holder(plane)
                    await Sequence(plane, Random(f"{seed}.{number}"), clock, name_of_holder).run(length)
        except Exception as exc:
            sentence = "A plane answers as the model does."
            faults.append(_fault(f"sequence {number} of seed {seed}", sentence, exc, patience))
            break
    if faults:
        sentences = "\n".join(f"- {fault}" for fault in faults)
        raise AssertionError(f"{len(faults)} of {len(named)} checks failed:\n{sentences}") from faults[0]


def _fault(name: str, sentence: str, exc: Exception, patience: float) -> AssertionError:
    """What a check that failed has to say: its own sentence, or what came in its way."""
    leaves = list(_leaves(exc))
    cause = next((leaf for leaf in leaves if isinstance(leaf, AssertionError)), leaves[0])
    said = str(cause)
    if not isinstance(cause, AssertionError):
        said = f"{sentence} No comparison failed: expected the end within {patience:g} seconds, came {cause!r}"
    fault = AssertionError(f"{name}: {said}")
    fault.__cause__ = cause
    return fault


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for one in cast("BaseExceptionGroup[BaseException]", exc).exceptions:
            yield from _leaves(one)
    else:
        yield exc
