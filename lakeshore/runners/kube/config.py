"""Which API server of a Kubernetes cluster to ask, and as whom: a kubeconfig, or the files that a pod is given.

Those are looked for in the order of kubectl: what an option names, the files in KUBECONFIG, `~/.kube/config`, and then
the account of the pod that this process runs in. A kubeconfig in JSON needs no other package, one in YAML needs PyYAML.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...errors import DispatchError
from .json_fields import entries, part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ACCOUNT", "Cluster", "find_cluster"]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod is given of its own account: token, ca.crt, namespace."""
_TOKEN, _NO_TOKEN = re.compile("[ -~]+"), "expected one line of printable ASCII in {}, got something else or nothing"
_PLUGINS = {
    "exec": "a program that prints credentials",
    "auth-provider": "an auth-provider, which kubectl itself has given up",
    "username": "a password, which API servers have given up",
}


@dataclass(frozen=True)
class Cluster:
    """An API server and who asks it.

    url: `https://host:port`, perhaps with a path. namespace: where it says nothing else. tls: None for plain HTTP.
    server_name: the name that the certificate has, where it is another than the host's.
    """

    url: str
    namespace: str
    tls: ssl.SSLContext | None = field(repr=False)
    server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)
    fixed_token: str | None = field(default=None, repr=False)
    token_file: Path | None = None

    def token(self) -> str | None:
        """The bearer token, read anew each time: those in files are replaced by others while they are valid.

        Raises DispatchError when the file cannot be read, or holds none.
        """
        if self.token_file is None:
            return self.fixed_token
        try:
            token = self.token_file.read_text().strip()
        except UnicodeDecodeError:
            token = ""
        except (OSError, ValueError) as exc:
            raise DispatchError(f"the token for {self.url} cannot be read: {exc}") from exc
        if not _TOKEN.fullmatch(token):
            raise DispatchError(f"the token for {self.url} cannot be read: {_NO_TOKEN.format(self.token_file)}")
        return token


def find_cluster(
    kubeconfig: str | None,
    context: str | None,
    environ: Mapping[str, str],
    *,
    account: Path = ACCOUNT,
) -> Cluster:
    """The cluster that these options and `environ` lead to. Raises ValueError with what is wrong, and where."""
    named = [kubeconfig] if kubeconfig else environ.get("KUBECONFIG", "").split(os.pathsep)
    paths = [Path(one).expanduser() for one in named if one]
    usual = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    if not paths and usual.exists():
        paths = [usual]
    if not kubeconfig:
        paths = [path for path in paths if path.exists()] or paths  # kubectl passes over those that are not there
    if paths:
        return _Kubeconfig([(path, _load(path)) for path in paths]).cluster(context)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        raise ValueError(
            "no Kubernetes cluster is known here: there is no kubeconfig (the runner option kubeconfig=FILE, KUBECONFIG, "
            f"or {usual}), and this is no pod with an account of its own ({account})"
        )
    if context is not None:
        raise ValueError(f"the runner option context={context} needs a kubeconfig, and there is none here")
    space = account / "namespace"
    return Cluster(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        space.read_text().strip() if space.exists() else "default",
        _tls(account / "ca.crt", None, False, str(account)),
        token_file=account / "token",
    )


class _Pair(NamedTuple):
    """A client certificate and its key: files, or what they would hold."""

    certificate: Path | str
    key: Path | str


class _Kubeconfig:
    """Several files as one: of what has the same name, the first counts."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
        self._files = files
        self._where = os.pathsep.join(str(path) for path, _ in files)

    def cluster(self, context: str | None) -> Cluster:
        if context is None:
            said = [text for _, file in self._files if isinstance(text := file.get("current-context"), str) and text]
            if not said:
                raise ValueError(f"{self._where} has no current-context: name one with the runner option context=NAME")
            context = said[0]
        chosen, _ = self._named("contexts", "context", context)
        server, where = self._named("clusters", "cluster", _text(chosen, "cluster") or "")
        user: Mapping[str, Any] = {}
        by = where
        if _text(chosen, "user"):
            user, by = self._named("users", "user", _text(chosen, "user") or "")
        url = (_text(server, "server") or "").rstrip("/")
        if not url.startswith(("https://", "http://")):
            raise ValueError(
                f"expected the URL of a server in the cluster of context {context} in {where}, got {url!r}"
            )
        token_file = _beside(by, _text(user, "tokenFile"))
        token = (_text(user, "token") or "").strip() or None
        if token is not None and token_file is None and not _TOKEN.fullmatch(token):
            raise ValueError(_NO_TOKEN.format(f"the token of the user {_text(chosen, 'user')} in {by}"))
        if user.get("as"):
            raise ValueError(
                f"the user {_text(chosen, 'user')} in {by} acts as {user['as']} (`as`), which this runner does not do: give "
                "it a kubeconfig with the token of that account (`kubectl create token`)"
            )
        self._refuse(user, _text(chosen, "user") or "", token is not None or token_file is not None)
        return Cluster(
            url,
            _text(chosen, "namespace") or "default",
            None if url.startswith("http:") else self._tls(server, where, user, by),
            _text(server, "tls-server-name"),
            _text(server, "proxy-url"),
            token,
            token_file,
        )

    def _named(self, kind: str, inner: str, name: str) -> tuple[Mapping[str, Any], Path]:
        known = list[str]()
        for path, file in self._files:
            for entry in entries(file.get(kind)):
                if entry.get("name") == name and isinstance(entry.get(inner), dict):
                    return part(entry, inner), path
                known.append(str(entry.get("name")))
        raise ValueError(f"{self._where} has no {inner} {name!r}: it has {', '.join(known) or 'none'}")

    def _refuse(self, user: Mapping[str, Any], name: str, has_token: bool) -> None:
        for kind, what in _PLUGINS.items():
            if user.get(kind) and not has_token and not _text(user, "client-certificate-data", "client-certificate"):
                program = part(user, kind).get("command")
                raise ValueError(
                    f"the user {name} in {self._where} gets in by {what}{f' ({program})' if program else ''}, which this "
                    "runner does not do: give it a kubeconfig with the token of a service account "
                    "(`kubectl create token`; tokenFile where something renews it), or run the worker in the cluster"
                )

    def _tls(self, server: Mapping[str, Any], where: Path, user: Mapping[str, Any], by: Path) -> ssl.SSLContext:
        trusted = _given(server, "certificate-authority", where)
        certificate, key = _given(user, "client-certificate", by), _given(user, "client-key", by)
        if (certificate is None) != (key is None):
            raise ValueError(f"expected client-certificate and client-key together in {by}, got one of them")
        pair = None if certificate is None or key is None else _Pair(certificate, key)
        blind = server.get("insecure-skip-tls-verify") is True
        return _tls(trusted, pair, blind, str(where))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except (OSError, ValueError) as exc:
        raise ValueError(f"the kubeconfig {path} cannot be read: {exc}") from None
    found: Any
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = _yaml(path, text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a kubeconfig in {path}, got something else")
    return cast("Mapping[str, Any]", found)


def _yaml(path: Path, text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"{path} is not JSON, and to read YAML needs PyYAML: `pip install 'dreamlake-lakeshore[kube]'`, or give the "
            "runner what `kubectl config view --raw --minify --output json` prints"
        ) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as exc:
        raise ValueError(f"the kubeconfig {path} is neither JSON nor YAML: {exc}") from None


def _text(fields: Mapping[str, Any], *names: str) -> str | None:
    return next((value for name in names if isinstance(value := fields.get(name), str) and value), None)


def _beside(file: Path, name: str | None) -> Path | None:
    """What a kubeconfig names is found from its own folder."""
    return None if name is None else file.parent / name


def _given(fields: Mapping[str, Any], name: str, file: Path) -> Path | str | None:
    """A certificate or a key: the text in `NAME-data`, which counts first, or the file that NAME names."""
    data = _text(fields, f"{name}-data")
    if data is None:
        return _beside(file, _text(fields, name))
    try:
        return base64.b64decode(data, validate=False).decode("ascii")
    except (binascii.Error, ValueError) as exc:
        raise ValueError(f"expected base64 of a PEM in {name}-data in {file}, got something else: {exc}") from None


def _tls(trusted: Path | str | None, pair: _Pair | None, blind: bool, where: str) -> ssl.SSLContext:
    try:
        text = trusted.read_text() if isinstance(trusted, Path) else trusted
        context = ssl.create_default_context(cadata=text)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which many a cluster's own authority does not pass
        if blind:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if pair is not None:
            with tempfile.TemporaryDirectory(prefix="lakeshore-") as folder:
                certificate, key = Path(folder, "certificate"), Path(folder, "key")
                context.load_cert_chain(_file(certificate, pair.certificate), _file(key, pair.key), _no_password)
    except (OSError, ValueError) as exc:  # of which ssl's errors are one kind
        raise ValueError(f"the certificates that {where} gives or names cannot be used: {exc}") from None
    return context


def _file(path: Path, given: Path | str) -> Path:
    """A file with it: `ssl` reads certificates and keys from nowhere else. The folder is this user's only."""
    if isinstance(given, str):
        path.write_text(given)
        return path
    return given


def _no_password() -> str:
    return ""  # or OpenSSL would ask for one at the terminal
