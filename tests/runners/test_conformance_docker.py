"""Children in containers of dockerd."""

from __future__ import annotations

import pytest
from container_kit import DOCKER

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestDocker(Conformance):
    engine = DOCKER
