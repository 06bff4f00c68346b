"""The operations of many submits, made at once, are those that single submits make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dreamlake.lakeshore.body.context import scope
from dreamlake.lakeshore.client.calls import submit_operation, submit_operations
from dreamlake.lakeshore.client.thunk import thunk
from dreamlake.lakeshore.functions.resolve import resolve_fn
from dreamlake.lakeshore.wire import Envelope

if TYPE_CHECKING:
    from collections.abc import Iterator


def first(x: Any = None) -> Any:
    return x


def second(x: Any = None, *, y: Any = None) -> Any:
    return x, y


def test_many_operations_are_those_of_single_submits() -> None:
    payloads = [thunk(first, 1), thunk(first, 2), thunk(second, 1, y=2), "plain", thunk(first), thunk(lambda: 3)]
    with scope("p"):
        many = submit_operations("q", payloads, priority=2.5)
        single = [submit_operation("q", payload, None, 2.5) for payload in payloads]
    assert len({op.id for op in many}) == len(payloads)
    for one, other, payload in zip(many, single, payloads, strict=True):
        assert (one.queue, one.key, one.priority, one.parent) == ("q", None, 2, None)
        assert (other.queue, other.key, other.priority, other.parent) == ("q", None, 2, None)
        if payload == "plain":
            assert one.body == other.body
            continue
        ours, theirs = Envelope.from_bytes(one.body), Envelope.from_bytes(other.body)
        assert ours.id == one.id
        theirs.id = ours.id
        assert ours == theirs
        assert ours.prefix == "p"


def test_a_pickled_function_is_packed_as_it_is_when_its_thunk_comes() -> None:
    value = 0

    def captures() -> int:
        return value

    def thunks() -> Iterator[Any]:
        nonlocal value
        while value < 3:
            yield thunk(captures)
            value += 1

    ops = submit_operations("q", thunks())
    specs = [Envelope.from_bytes(op.body).fn for op in ops]
    assert [resolve_fn(spec, allow_pickled=True)() for spec in specs] == [0, 1, 2]
