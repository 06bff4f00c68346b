"""The environment as a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamlake.lakeshore.settings import read_settings


def test_the_defaults() -> None:
    for env in (
        {},
        {f"LAKESHORE_{name}": "" for name in ("URL", "CLIENT_TOKEN", "NAMESPACE", "HOME", "ROOT", "QUEUE")},
    ):
        settings = read_settings(env)
        assert (settings.url, settings.client_token, settings.namespace, settings.root) == (None, None, None, None)
        assert (settings.home, settings.queue, settings.runtime_policy) == (
            Path.home() / ".lakeshore",
            "default",
            "minor",
        )


def test_variables_replace_the_defaults() -> None:
    settings = read_settings({"LAKESHORE_NAMESPACE": "team", "LAKESHORE_URL": "http://h:1", "LAKESHORE_HOME": "~/h"})
    assert (settings.namespace, settings.url, settings.home) == ("team", "http://h:1", Path.home() / "h")


@pytest.mark.parametrize("url", ["http://user:hunter2@host:1/v", "http://:hunter2@host:1/v", "http://hunter2@host:1/v"])
def test_secrets_are_not_shown(url: str) -> None:
    shown = repr(read_settings({"LAKESHORE_URL": url, "LAKESHORE_CLIENT_TOKEN": "lks_hunter2"}))
    assert "hunter2" not in shown
    for name, field in {"LAKESHORE_MONGO_URL": "mongo", "LAKESHORE_REDIS_URL": "redis"}.items():
        settings = read_settings({name: url})
        assert getattr(settings, field) == url
        assert "hunter2" not in repr(settings)
    assert "url='http://host:1/v', client_token=set, namespace=None, " in shown
    assert "client_token=None" in repr(read_settings({}))
