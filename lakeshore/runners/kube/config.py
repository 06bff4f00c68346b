"""Find the API server of a Kubernetes cluster and the credentials for it: in a kubeconfig, or in the files of a pod.

They are looked for in the order of kubectl: the file that an option names, the files in KUBECONFIG, `~/.kube/config`, and
then the account of the pod that this process runs in. A kubeconfig in JSON needs no other package, one in YAML PyYAML.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .credentials import NOT_A_TOKEN, CredentialProgram, Credentials, FixedToken, TokenFile, is_token
from .json_fields import entries, items, part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ACCOUNT_FOLDER", "Cluster", "find_cluster"]

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The files of a pod's own account: token, ca.crt, namespace."""
_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
"""The extension of a cluster that is passed on to the program."""
_UNSUPPORTED = {
    "auth-provider": "an auth-provider, which kubectl itself has given up",
    "username": "a password, which API servers have given up",
}


@dataclass(frozen=True)
class Cluster:
    """An API server, and how to authenticate to it."""

    url: str
    """`https://host:port`, perhaps with a path."""
    namespace: str
    """The namespace where no option names another."""
    tls: ssl.SSLContext | None = field(repr=False)
    """None for plain HTTP."""
    server_name: str | None = None
    """The name in the certificate, where it is not the host's."""
    proxy: str | None = field(default=None, repr=False)
    credentials: Credentials = field(default_factory=FixedToken, repr=False)


@dataclass(frozen=True, slots=True)
class _Pem:
    """A certificate or a key: a file, or the text that it would hold."""

    path: Path | None
    text: str | None

    def read(self) -> str:
        return self.path.read_text() if self.path is not None else self.text or ""


def find_cluster(
    kubeconfig: str | None,
    context: str | None,
    environ: Mapping[str, str],
    *,
    account: Path = ACCOUNT_FOLDER,
) -> Cluster:
    """Return the cluster that the options and the environment lead to.

    Args:
        kubeconfig: The file that an option names.
        context: The context that an option names.
        environ: The environment of this process.
        account: The folder with the account of a pod.

    Raises:
        ValueError: There is none, or something is wrong with its kubeconfig.
    """
    home_config = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    if kubeconfig:
        paths = [Path(kubeconfig).expanduser()]
    else:
        named = [Path(name).expanduser() for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
        if not named and home_config.exists():
            named = [home_config]
        paths = [path for path in named if path.exists()] or named  # kubectl passes over those that do not exist
    if paths:
        return _Kubeconfig([(path, _load(path)) for path in paths], environ).cluster(context)
    host = environ.get("KUBERNETES_SERVICE_HOST")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        raise ValueError(
            "no Kubernetes cluster is known here: there is no kubeconfig (the runner option kubeconfig=FILE, KUBECONFIG, "
            f"or {home_config}), and this is no pod with an account of its own ({account})"
        )
    if context is not None:
        raise ValueError(f"the runner option context={context} needs a kubeconfig, and there is none here")
    namespace = account / "namespace"
    return Cluster(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace.read_text().strip() if namespace.exists() else "default",
        _tls_context(_Pem(account / "ca.crt", None), None, verify=True, where=str(account)),
        credentials=TokenFile(account / "token"),
    )


class _Kubeconfig:
    """Several files as one: of entries with the same name, the first counts."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, Any]]], environ: Mapping[str, str]) -> None:
        self._files = files
        self._environ = environ
        self._where = os.pathsep.join(str(path) for path, _ in files)

    def cluster(self, context: str | None) -> Cluster:
        """Return the cluster of a context; None: of the current one. Raises ValueError."""
        if context is None:
            context = self._current_context()
        chosen, _ = self._find("contexts", "context", context)
        server, server_path = self._find("clusters", "cluster", _text(chosen, "cluster") or "")
        user: Mapping[str, Any] = {}
        user_path = server_path
        user_name = _text(chosen, "user") or ""
        if user_name:
            user, user_path = self._find("users", "user", user_name)
        url = (_text(server, "server") or "").rstrip("/")
        if not url.startswith(("https://", "http://")):
            raise ValueError(
                f"expected the URL of a server in the cluster of context {context} in {server_path}, got {url!r}"
            )
        if user.get("as"):
            raise ValueError(
                f"the user {user_name} in {user_path} acts as {user['as']} (`as`), which this runner does not do: give "
                "it a kubeconfig with the token of that account (`kubectl create token`)"
            )
        return Cluster(
            url,
            _text(chosen, "namespace") or "default",
            None if url.startswith("http:") else self._tls(server, server_path, user, user_path),
            _text(server, "tls-server-name"),
            _text(server, "proxy-url"),
            self._credentials(user, user_name, user_path, server, server_path),
        )

    def _current_context(self) -> str:
        for _, file in self._files:
            name = _text(file, "current-context")
            if name is not None:
                return name
        raise ValueError(f"{self._where} has no current-context: name one with the runner option context=NAME")

    def _find(self, kind: str, inner: str, name: str) -> tuple[Mapping[str, Any], Path]:
        """Return the entry of that name, and the file that it is in."""
        known = list[str]()
        for path, file in self._files:
            for entry in entries(file.get(kind)):
                if entry.get("name") == name and isinstance(entry.get(inner), dict):
                    return part(entry, inner), path
                known.append(str(entry.get("name")))
        raise ValueError(f"{self._where} has no {inner} {name!r}: it has {', '.join(known) or 'none'}")

    def _credentials(
        self, user: Mapping[str, Any], name: str, path: Path, server: Mapping[str, Any], server_path: Path
    ) -> Credentials:
        """Return where the user's tokens come from, in the order of kubectl."""
        token_file = _text(user, "tokenFile")
        if token_file is not None:
            return TokenFile(path.parent / token_file)
        token = (_text(user, "token") or "").strip()
        if token:
            if not is_token(token):
                raise ValueError(NOT_A_TOKEN.format(f"the token of the user {name} in {path}"))
            return FixedToken(token)
        if _text(user, "client-certificate-data", "client-certificate") is not None:
            return FixedToken()
        for kind, what in _UNSUPPORTED.items():
            if user.get(kind):
                raise ValueError(
                    f"the user {name} in {self._where} authenticates with {what}, which this runner does not support: give "
                    "it a kubeconfig with the token of a service account (`kubectl create token`; tokenFile where "
                    "something renews it), or run the worker in the cluster"
                )
        if user.get("exec"):
            return self._program(part(user, "exec"), name, path, server, server_path)
        return FixedToken()

    def _program(
        self, plugin: Mapping[str, Any], name: str, path: Path, server: Mapping[str, Any], server_path: Path
    ) -> CredentialProgram:
        """Return the program that prints the user's tokens."""
        where = f"`exec` of the user {name} in {path}"
        version = str(plugin.get("apiVersion"))
        if version not in _EXEC_VERSIONS:
            raise ValueError(f"expected the apiVersion {' or '.join(_EXEC_VERSIONS)} in {where}, got {version!r}")
        if plugin.get("interactiveMode") == "Always":
            raise ValueError(f"{where} needs a terminal (interactiveMode Always), which a worker does not have")
        command = _text(plugin, "command") or ""
        program = str(path.parent / command) if os.sep in command else command
        if not command or shutil.which(program, path=self._environ.get("PATH")) is None:
            hint = _text(plugin, "installHint")
            raise ValueError(f"{where} names the program {command!r}, which is not here: {hint or 'install it'}")
        environ = dict(self._environ)
        for variable in entries(plugin.get("env")):
            environ[str(variable.get("name"))] = str(variable.get("value") or "")
        spec: dict[str, Any] = {"interactive": False}
        if plugin.get("provideClusterInfo") is True:
            spec["cluster"] = _cluster_info(server, server_path)
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
        environ["KUBERNETES_EXEC_INFO"] = json.dumps(info)
        return CredentialProgram([program, *map(str, items(plugin.get("args")))], environ, version)

    def _tls(
        self, server: Mapping[str, Any], server_path: Path, user: Mapping[str, Any], user_path: Path
    ) -> ssl.SSLContext:
        authority = _pem(server, "certificate-authority", server_path)
        certificate = _pem(user, "client-certificate", user_path)
        key = _pem(user, "client-key", user_path)
        if (certificate is None) != (key is None):
            raise ValueError(f"expected client-certificate and client-key together in {user_path}, got one of them")
        pair = None if certificate is None or key is None else (certificate, key)
        verify = server.get("insecure-skip-tls-verify") is not True
        return _tls_context(authority, pair, verify=verify, where=str(server_path))


def _cluster_info(server: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what a program is given about the cluster. Raises ValueError."""
    names = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    found = {name: server[name] for name in names if server.get(name)}
    authority = _pem(server, "certificate-authority", path)
    if authority is not None:
        try:
            found["certificate-authority-data"] = base64.b64encode(authority.read().encode()).decode()
        except (OSError, ValueError) as exc:
            raise ValueError(f"the certificates that {path} names cannot be read: {exc}") from None
    for extension in entries(server.get("extensions")):
        if extension.get("name") == _EXEC_EXTENSION:
            found["config"] = extension.get("extension")
    return found


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except (OSError, ValueError) as exc:
        raise ValueError(f"the kubeconfig {path} cannot be read: {exc}") from None
    found: Any
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = _load_yaml(path, text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a kubeconfig in {path}, got something else")
    return cast("Mapping[str, Any]", found)


def _load_yaml(path: Path, text: str) -> object:
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
    """Return the first of these fields that is a text and not empty."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def _pem(fields: Mapping[str, Any], name: str, file: Path) -> _Pem | None:
    """Return a certificate or a key: the text in `NAME-data`, which counts first, or the file that NAME names.

    A relative name starts from the folder of the kubeconfig.
    """
    data = _text(fields, f"{name}-data")
    if data is None:
        path = _text(fields, name)
        return None if path is None else _Pem(file.parent / path, None)
    try:
        return _Pem(None, base64.b64decode(data, validate=False).decode("ascii"))
    except (binascii.Error, ValueError) as exc:
        raise ValueError(f"expected base64 of a PEM in {name}-data in {file}, got something else: {exc}") from None


def _tls_context(authority: _Pem | None, pair: tuple[_Pem, _Pem] | None, *, verify: bool, where: str) -> ssl.SSLContext:
    """Return the TLS context for an API server.

    Args:
        authority: What its certificate is checked against; None: what this machine trusts.
        pair: The certificate and the key of the client.
        verify: Whether to check its certificate.
        where: Where the certificates come from, for errors.
    """
    try:
        context = ssl.create_default_context(cadata=None if authority is None else authority.read())
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the authorities of many clusters do not pass it
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if pair is not None:
            # `ssl` reads certificates and keys from files only. This folder is readable for this user only.
            with tempfile.TemporaryDirectory(prefix="lakeshore-") as folder:
                certificate, key = (_as_file(pem, Path(folder)) for pem in pair)
                context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as exc:  # an SSLError is an OSError
        raise ValueError(f"the certificates that {where} gives or names cannot be used: {exc}") from None
    return context


def _as_file(pem: _Pem, folder: Path) -> Path:
    """Return a file with the certificate or the key; one is made in the folder where there is none."""
    if pem.path is not None:
        return pem.path
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(pem.read())
    return Path(file.name)


def _no_password() -> str:
    return ""  # otherwise OpenSSL would ask for one at the terminal
