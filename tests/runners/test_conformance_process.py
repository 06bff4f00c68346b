"""Children that are processes of this machine, started and forked."""

from __future__ import annotations

import pytest
from engine_kit import PROCESS, WARM

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestProcess(Conformance):
    engine = PROCESS
    timeout = 3.0


class TestWarm(Conformance):
    engine = WARM
    timeout = 3.0
