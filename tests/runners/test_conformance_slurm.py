"""Children that are jobs of a Slurm cluster."""

from __future__ import annotations

import pytest
from slurm_kit import SLURM

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestSlurm(Conformance):
    engine = SLURM
