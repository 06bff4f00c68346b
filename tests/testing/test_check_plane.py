"""The conformance suite passes on the reference model, and sees each of many wrong ones."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import matrix
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS, Mutant, NewestFirst
from plane_kit import FakeClock, holder_of_model, model_planes

from dreamlake.lakeshore.planes.hub import Hub
from dreamlake.lakeshore.planes.plane import Engine, Plane
from dreamlake.lakeshore.testing import check_plane
from dreamlake.lakeshore.testing.lab import RULES
from dreamlake.lakeshore.testing.reference.model import Model
from dreamlake.lakeshore.testing.reference.transitions import TABLE, Rule
from dreamlake.lakeshore.testing.sequences import Sequence

if TYPE_CHECKING:
    from dreamlake.lakeshore.planes.contract.news import News

pytestmark = pytest.mark.anyio


@pytest.mark.timeout(400)
async def test_the_model_passes_by_a_fake_clock() -> None:
    clock = FakeClock()
    many = matrix.tier().sequences
    await check_plane(model_planes(clock), clock=clock, holder=holder_of_model, sequences=many, patience=90)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_model_passes_by_the_real_clock() -> None:
    await check_plane(model_planes(None), holder=holder_of_model, sequences=50, patience=90)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(random=st.randoms(use_true_random=False), length=st.integers(1, 40))
@settings(max_examples=matrix.examples(60), deadline=None)
def test_any_sequence_of_operations_is_answered_as_by_the_model(backend: str, random: Random, length: int) -> None:
    anyio.run(_sequence, random, length, Model, backend=backend)


async def _sequence(random: Random, length: int, kind: type[Model]) -> None:
    clock = FakeClock()
    async with model_planes(clock, kind)() as plane:
        await Sequence(plane, random, clock, "here").run(length)


async def test_the_named_checks_alone_reach_every_rule_of_the_table() -> None:
    reached: set[Rule] = set()

    class Recording(Model):
        def _event(self, *args: Any) -> Rule | None:
            rule = super()._event(*args)
            reached.update([] if rule is None else [rule])
            return rule

    clock = FakeClock()
    await check_plane(model_planes(clock, Recording), clock=clock, holder=holder_of_model, sequences=0)
    assert set(TABLE) - reached == set()


# That it can fail -------------------------------------------------------------------------------------------------------

asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@asyncio_only
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_named_check_sees_the_mutant(mutant: Mutant) -> None:
    clock = FakeClock()
    factory = model_planes(clock, mutant.model)
    with pytest.raises(AssertionError) as failure:
        await check_plane(factory, clock=clock, holder=holder_of_model, only=[mutant.check], sequences=0, patience=2.0)
    (sentence,) = [rule.sentence for rule in RULES if rule.name == mutant.check]
    assert str(failure.value).startswith(f"1 of 1 checks failed:\n- {mutant.check}: {sentence} ")
    assert re.search(r"expected .*, came ", str(failure.value))
    assert not re.search(r"came (Key|Index|Attribute|Type|Name)Error", str(failure.value)), (
        "the mutant itself is broken"
    )


@asyncio_only
@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.in_sequences], ids=lambda mutant: mutant.name)
async def test_a_generated_sequence_sees_the_mutant(mutant: Mutant) -> None:
    async def sequences() -> None:
        for seed in range(400):
            await _sequence(Random(seed), 30, mutant.model)

    with pytest.raises(AssertionError, match=r"(?s)expected .*, came .*; before that:"):
        await sequences()


async def _named_checks_fail(only: list[str]) -> str:
    """The named checks all fail for planes as they are now; what was said."""
    clock = FakeClock()
    with pytest.raises(AssertionError) as failure:
        await check_plane(model_planes(clock), clock=clock, only=only, sequences=0, patience=1.5)
    said = str(failure.value)
    assert said.startswith(f"{len(only)} of {len(only)} checks failed:"), said
    return said


async def _seen_by(name: str) -> str:
    """What the check said that failed; trio runs tasks in a random order, so it may take some attempts to meet the fault."""
    clock = FakeClock()
    for _ in range(10):
        try:
            await check_plane(model_planes(clock), clock=clock, only=[name], sequences=0, patience=1.5)
        except AssertionError as failure:
            return str(failure)
    pytest.fail(f"{name} has not seen the fault")


async def test_claims_that_nobody_took_over_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_give_back", lambda self, op, answer: None)
    said = await _seen_by("a_claimer_who_leaves_leaves_no_row_running")
    said += await _seen_by("a_waiting_claimer_who_leaves_leaves_no_row_running")
    said += await _seen_by("a_crowd_of_claimers_who_leave_leaves_no_row_running")
    assert "the rows running, within 0.5 seconds: expected {}, came {('q', 'running'): 1}" in said


async def test_waiters_that_nobody_wakes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "publish", lambda self, news: None)
    said = await _named_checks_fail(["a_wait_for_an_outcome_is_woken", "a_reader_is_woken", "a_waiting_claim_is_woken"])
    assert said.count("No comparison failed: expected the end within 1.5 seconds, came TimeoutError") == 3


async def test_a_waiter_that_is_not_woken_beside_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell_one(hub: Hub, news: News) -> None:
        for waiter in hub._waiters[news.kind].get(news.name or "", [])[:1]:
            waiter.outcome = news.outcome
            waiter.event.set()

    monkeypatch.setattr(Hub, "publish", tell_one)
    said = await _named_checks_fail(["many_waiters_and_a_claimer_share_one_loop"])
    assert "came TimeoutError" in said


@asyncio_only
async def test_every_failure_is_told_and_a_seed_tells_the_same_again() -> None:
    clock = FakeClock()

    async def told() -> str:
        with pytest.raises(AssertionError) as failure:
            await check_plane(model_planes(clock, NewestFirst), clock=clock, only=[], sequences=20, length=20, seed=5)
        return str(failure.value)

    first = await told()
    clock.time = FakeClock().time
    assert first == await told()


@asyncio_only
async def test_a_factory_that_fails_is_a_failure_of_the_check() -> None:
    def broken() -> Plane:
        raise OSError("no server at this address")

    with pytest.raises(AssertionError, match=r"came OSError\('no server at this address'\)"):
        await check_plane(broken, only=["counts_equal_the_rows"], sequences=0)


async def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no checks are called \['counts'\]: `only` takes \['a_submit_makes_a_queued_row'"
    ):
        await check_plane(model_planes(None), only=["counts"])


def test_every_named_check_has_a_sentence() -> None:
    for rule in RULES:
        assert re.fullmatch(r"[A-Z].*\.", rule.sentence), rule
    assert len({rule.name for rule in RULES}) == len(RULES)
