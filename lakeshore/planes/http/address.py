"""The address of a control plane: what is a URL and a token, and whether a proxy stands in between."""

from __future__ import annotations

import re
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

__all__ = ["check_address", "uses_proxy"]


def uses_proxy(scheme: str, host: str) -> bool:
    """Whether the environment sends requests of this scheme to this host through a proxy."""
    proxies = getproxies()
    return (scheme in proxies or "all" in proxies) and not proxy_bypass(host)


def check_address(url: str, token: str | None) -> None:
    """Raises ValueError for a url or a token that cannot be a line of an HTTP request. The sentence shows no secret."""
    expected = "expected the URL of a control plane, such as http://127.0.0.1:8750"
    sentence = f"{expected}, got {url.rpartition('@')[2]!r}"
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(
            f"{sentence}: a port is a number from 1 to 65535, an IPv6 address stands in brackets"
        ) from None
    if "@" in url or parts.query or parts.fragment:
        if parts.hostname:
            safe = f"{parts.scheme}://{parts.hostname}"
        else:
            safe = re.split("[?#]", url.rpartition("@")[2])[0]
        raise ValueError(
            f"{expected}, without a user or a query in it, got {safe!r}: "
            "give a token with token=, LAKESHORE_CLIENT_TOKEN or --token-file"
        )
    if parts.scheme not in ("http", "https"):
        hint = f": write http://{url}" if re.fullmatch(r"[\w.-]+(:[0-9]+)?(/\S*)?", url, re.ASCII) else ""
        raise ValueError(f"{sentence}: it begins with http:// or https://{hint}")
    if not has_host or not _is_printable(url):
        raise ValueError(f"{sentence}: after http:// or https:// comes the name of a host, in ASCII without spaces")
    if token is not None and (not token or not _is_printable(token)):
        raise ValueError(
            f"expected a token, printable ASCII without spaces, got {len(token)} characters of another kind: "
            "use the one line that `lakeshore token create` printed"
        )


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
