"""Children in containers of dockerd that gVisor runs."""

from __future__ import annotations

import pytest
from container_kit import Docker

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestGVisorByDocker(Conformance):
    engine = Docker("gvisor-docker", "gvisor", runtime="runsc")
