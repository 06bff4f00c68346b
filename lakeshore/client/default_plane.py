"""The plane of this process: found once, in the environment."""

from __future__ import annotations

from ..planes.plane import Plane
from ..settings import read_settings

__all__ = ["default_dispatch", "plane_of", "set_default_plane"]

_default: dict[str, Plane] = {}


def default_dispatch() -> Plane:
    """Return the plane of this process, which is found once; later changes of the environment have no effect.

    It is the server at LAKESHORE_URL, with the token LAKESHORE_CLIENT_TOKEN. Without that variable it is the file
    `lakeshore.db` in the folder LAKESHORE_HOME.

    Raises:
        ValueError: LAKESHORE_URL is not a URL of a server.
    """
    # Not under a lock, which a forked child might inherit locked: a plane that was never opened costs nothing.
    return _default.get("plane") or _default.setdefault("plane", _from_environment())


def set_default_plane(plane: Plane) -> None:
    """Make `plane` that of this process, unless one was found before. The children of bodies submit to it, too."""
    _default.setdefault("plane", plane)


def plane_of(dispatch: Plane | None) -> Plane:
    """Return the plane that a `dispatch=` means: itself, or for None that of the process. Raises TypeError."""
    if dispatch is None:
        return default_dispatch()
    if not isinstance(dispatch, Plane):
        raise TypeError(f"expected dispatch= to be a plane such as dls.Dispatch(path), got {dispatch!r:.100}")
    return dispatch


def _from_environment() -> Plane:
    settings = read_settings()
    if settings.url is not None:
        from ..planes.http.store import HttpDispatch

        return HttpDispatch(settings.url, token=settings.client_token, namespace=settings.namespace)
    from ..planes.sqlite.store import Dispatch

    return Dispatch(settings.home / "lakeshore.db", ns=settings.namespace or "default")
