"""The control plane's server: any plane behind the HTTP protocol. `create_app` needs the extra `[server]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app as create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` on first use: `lakeshore token` works without the extra that it needs."""
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .app import create_app

    return create_app
