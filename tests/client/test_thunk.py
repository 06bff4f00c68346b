"""Thunks: how they become Envelopes, and what is not a thunk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from ulid import ULID

from dreamlake.lakeshore.body.context import invocation_context, scope
from dreamlake.lakeshore.client.thunk import Thunk, thunk
from dreamlake.lakeshore.errors import EncodeError
from dreamlake.lakeshore.functions.serialize import serialize_fn
from dreamlake.lakeshore.wire import Envelope, unpack

if TYPE_CHECKING:
    from pathlib import Path


def at_module_level(x: int = 1) -> int:
    return x + 1


def of_anything(x: Any) -> Any:
    return x


def test_a_thunk_becomes_an_envelope() -> None:
    made = thunk(at_module_level, 7)
    assert isinstance(made, Thunk)
    with scope("scenes/0007"):
        envelope = made.to_envelope(key="once")
    assert Envelope.from_bytes(envelope.to_bytes()) == envelope
    assert ULID.from_str(envelope.id)
    assert (envelope.prefix, envelope.key, envelope.parent, envelope.cfg) == ("scenes/0007", "once", None, {})
    assert (unpack(envelope.args), unpack(envelope.kwargs)) == ([7], {})
    assert envelope.fn == serialize_fn(at_module_level)
    assert made.to_envelope().id != envelope.id


def test_what_is_given_wins_over_what_is_ambient(tmp_path: Path) -> None:
    call = invocation_context(tmp_path, "p", "01PARENT", 1)
    made: Thunk[Any] = thunk(dict[str, int], fn=1, self=2)
    ambient = call.step(made.to_envelope)
    assert (ambient.prefix, ambient.parent, unpack(ambient.kwargs)) == ("p", "01PARENT", {"fn": 1, "self": 2})
    given = call.step(made.to_envelope, id="mine", prefix="", parent="01OTHER")
    assert (given.id, given.prefix, given.parent) == ("mine", "", "01OTHER")


def test_a_thunk_packs_when_it_is_made_into_an_envelope() -> None:
    values = [1]
    made = thunk(of_anything, values)
    envelope = made.to_envelope()
    values.append(2)
    assert unpack(envelope.args) == [[1]]
    with pytest.raises(EncodeError):
        thunk(of_anything, object()).to_envelope()


def test_thunks_of_arrays_can_be_compared() -> None:
    class NoTruth:
        def __eq__(self, other: object) -> bool:
            raise ValueError

    one = thunk(of_anything, NoTruth())
    assert one != thunk(of_anything, NoTruth())
    assert one in {one}


@pytest.mark.parametrize("fn", [3, None, "f"])
def test_a_thunk_of_a_value_is_refused(fn: Any) -> None:
    with pytest.raises(TypeError) as caught:
        thunk(fn)
    assert str(caught.value) == (
        f"expected a callable and its arguments, got {type(fn).__name__}: write thunk(f, x), not thunk(f(x))"
    )


def test_a_thunk_of_a_started_coroutine_is_refused() -> None:
    async def f() -> None: ...

    with contextlib.closing(f()) as started, pytest.raises(TypeError, match="got coroutine: write thunk"):
        thunk(started)  # type: ignore[arg-type]
