"""The codecs that a test registers are gone after it: the package itself has no way to unregister."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dreamlake.lakeshore.wire import registry

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    registered, holders, decoders = registry._registered, dict(registry.holders), dict(registry.decoders)
    yield
    registry._registered = registered
    for table, before in ((registry.holders, holders), (registry.decoders, decoders)):
        table.clear()  # type: ignore[attr-defined]
        table.update(before)  # type: ignore[attr-defined]
