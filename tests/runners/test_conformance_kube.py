"""Children that are Jobs of Kubernetes, on an API server of the tests' own."""

from __future__ import annotations

import pytest
from kube_kit import KUBE

pytest.register_assert_rewrite("conformance", "conformance_kit")

from conformance import Conformance  # noqa: E402


class TestKube(Conformance):
    engine = KUBE
