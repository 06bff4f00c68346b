"""Migrations from a file to MongoDB and back: what comes back is what went, and the journey can be broken off anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from cli_kit import cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from migrate_kit import bring_to_rest, everything, fill, migrate_and_be_killed, moved
from plane_kit import FakeClock

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes import migrate
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter
from dreamlake.lakeshore.testing.sequences import Sequence

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

pytestmark = pytest.mark.anyio


@pytest.fixture
def little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "ROWS", 5)
    monkeypatch.setattr(migrate, "BYTES", 5000)
    monkeypatch.setattr(migrate, "MAX_FRAMES_PER_PAGE", 2)


def without_empty_results(found: list[Any]) -> list[Any]:
    """An empty result is none on a plane that is not of this machine alone."""
    rows, outcomes, pages, claims = found
    return [rows, [one._replace(result=one.result or None) for one in outcomes], pages, claims]


@pytest.mark.usefixtures("little_at_once")
@given(random=st.randoms(use_true_random=False))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_plane_goes_there_and_comes_back_whole(mongo_database: str, random: Random) -> None:
    clock = FakeClock()
    async with (
        dls.Dispatch(clock=clock.now) as source,
        dls.MongoDispatch(mongo_database, ns=new_id()) as there,
        dls.Dispatch(clock=clock.now) as back,
    ):
        await Sequence(source, random, clock, None).run(60)
        await bring_to_rest(source, random)
        await moved(source, there)
        assert (await moved(source, there)).written == 0
        await moved(there, back)
        now = clock.now()
        assert await everything(back, now) == without_empty_results(await everything(source, now))


@pytest.mark.usefixtures("little_at_once")
async def test_large_bodies_and_long_journals(mongo_database: str, tmp_path: Path) -> None:
    clock = FakeClock()  # whose seconds are whole: dates there have milliseconds
    async with dls.Dispatch(tmp_path / "a.db", clock=clock.now) as source, dls.MongoDispatch(mongo_database) as there:
        await fill(source)
        await source.submit("q", b"L" * 20_000_000, id="larger-than-a-document")
        await moved(source, there)
        rows = await there.rows(RowFilter(limit=100))
        assert [row.id for row in rows] == [row.id for row in await source.rows(RowFilter(limit=100))]
        assert not any(row.trusted for row in rows)
        async with dls.Dispatch(tmp_path / "b.db", clock=clock.now) as back:
            await moved(there, back)
            assert await everything(back, 0.0) == without_empty_results(await everything(source, 0.0))


async def test_a_migration_that_is_killed_again_and_again_goes_on_there(
    mongo_database: str, tmp_path: Path, anyio_backend_name: str
) -> None:
    async with dls.Dispatch(tmp_path / "a.db") as source:
        await fill(source)
        await migrate_and_be_killed(anyio_backend_name, str(tmp_path / "a.db"), mongo_database)
        async with dls.MongoDispatch(mongo_database) as there:
            assert (await moved(source, there)).written == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_row_goes_on_there_where_it_was(mongo_database: str, anyio_backend: str) -> None:
    async with dls.Dispatch() as source, dls.MongoDispatch(mongo_database) as there:
        for id in ("first", "second"):
            await source.submit("q", b"body", id=id, key=id)
        (claimed,) = await source.claim(["q"], "w")
        fence = Fence("first", "w", claimed.attempt)
        await source.append(fence, 0, [b"a", b"b"])
        await source.retry(fence, delay=600.0, error=Failure("E", "try"))
        await moved(source, there)
        (claimed,) = await there.claim(["q"], "v")
        assert (claimed.id, claimed.attempt, claimed.trusted) == ("second", 1, False)
        (row,) = await there.rows(RowFilter(id="first"))
        (before,) = await source.rows(RowFilter(id="first"))
        assert row.not_before == pytest.approx(before.not_before, abs=0.002)
        assert row.submitted_at == pytest.approx(before.submitted_at, abs=0.002)
        assert await there.submit("q", b"", key="first") == "first"


def test_the_command(mongo_database: str, tmp_path: Path) -> None:
    async def submit() -> None:
        async with dls.Dispatch(tmp_path / "a.db") as plane:
            for n in range(3):
                await plane.submit("q", b"", id=f"i{n}")
            await plane.cancel("i1")

    anyio.run(submit)
    there = cli(
        "plane", "migrate", "--from", tmp_path / "a.db", "--to", mongo_database, "--to-namespace", "n", "--json"
    )
    back = cli(
        "plane", "migrate", "--from", mongo_database, "--from-namespace", "n", "--to", tmp_path / "b.db", "--json"
    )
    assert there.document == back.document
    assert there.document["alike"] is True
    assert there.document["written"] == 3
    assert there.document["source"]["counts"] == [
        {"queue": "q", "state": "killed", "count": 1},
        {"queue": "q", "state": "queued", "count": 2},
    ]


def test_addresses_may_stand_in_the_environment(
    mongo_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.db").touch()
    there = ("--from", tmp_path / "a.db", "--to", "env:THE_FLEET")
    ran = cli("plane", "migrate", *there)
    assert ran.code == 2
    assert "--to env:THE_FLEET names an environment variable that is not set: set THE_FLEET" in ran.err
    monkeypatch.setenv("THE_FLEET", mongo_database)
    ran = cli("plane", "migrate", *there)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("address", ["me:secret@host/x", "mongodb:/me:secret@host/x"])
def test_what_stands_in_the_environment_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Or its folder would be made, and named by the password."""
    (tmp_path / "a.db").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THE_FLEET", address)
    for there in (("--from", "a.db", "--to", "env:THE_FLEET"), ("--from", "env:THE_FLEET", "--to", "b.db")):
        ran = cli("plane", "migrate", *there)
        assert ran.code == 2
        assert "env:THE_FLEET: expected an address mongodb://... in THE_FLEET, got something else" in ran.err
        assert "secret" not in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]


def test_an_address_that_is_none_shows_no_password(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    ran = cli("plane", "migrate", "--from", tmp_path / "a.db", "--to", "mongodb://me:secret@/x")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("Error: --to: expected an address such as mongodb://HOST:27017/DATABASE")
    assert "secret" not in ran.err
