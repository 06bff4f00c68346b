"""Children in containers of dockerd that gVisor runs."""

from __future__ import annotations

import pytest
from container_kit import GVISOR

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestGVisor(Conformance):
    engine = GVISOR
