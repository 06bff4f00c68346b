"""Children in containers of podman."""

from __future__ import annotations

import pytest
from container_kit import PODMAN

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestPodman(Conformance):
    engine = PODMAN
