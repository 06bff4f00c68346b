"""Where the API server is and who asks it: kubeconfigs in their forms, the account of a pod, certificates, tokens."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import needs
from kube_server import NAMESPACE, TOKEN, Fault, Server, serving

from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.runners.kube.api import ApiUnavailable, KubeApi, RequestRejected, keep_trying
from dreamlake.lakeshore.runners.kube.config import Cluster, find_cluster
from dreamlake.lakeshore.runners.kube.json_fields import entries, meta, part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (`ca`), a server's certificate for 127.0.0.1 and `api.test`, and a user's, all with their keys."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", "-days", "2")
    for name in ("server", "user"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:api.test\n")
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)
    return folder


@pytest.fixture
def secure(certificates: Path) -> Iterator[Server]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # no real one is so strict
    with serving(context) as server:
        server.by_certificate = True
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def write(path: Path, cluster: dict[str, Any], user: dict[str, Any], **context: Any) -> Path:
    chosen = {"cluster": "c", "user": "u", **context}
    file = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": chosen}, {"name": "other", "context": {**chosen, "namespace": "o"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(file))
    return path


async def ask(cluster: Cluster) -> list[dict[str, Any]]:
    api = KubeApi(cluster, NAMESPACE)
    try:
        return await keep_trying(lambda: api.jobs({"a": "b"}), 3.0)  # as the runner does: a connection may break
    finally:
        await api.aclose()


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


# --- who asks ---------------------------------------------------------------------------------------------------------


async def test_certificates_in_files_and_as_data(secure: Server, certificates: Path, tmp_path: Path) -> None:
    for name in ("ca.crt", "user.crt", "user.key"):
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
    files = {"client-certificate": "user.crt", "client-key": "user.key"}  # found from the folder of the kubeconfig
    data = {f"{name}-data": encoded(certificates / path) for name, path in files.items()}
    for server, user in (
        ({"certificate-authority": "ca.crt"}, files),
        ({"certificate-authority-data": encoded(certificates / "ca.crt")}, data),
        ({"insecure-skip-tls-verify": True}, data),
        ({"certificate-authority": "ca.crt"}, {"token": TOKEN}),
    ):
        path = write(tmp_path / "config", {"server": f"{secure.url}/", **server}, user)
        cluster = find_cluster(str(path), None, {})
        assert (cluster.url, cluster.namespace) == (secure.url, "default")
        assert await ask(cluster) == []
    assert TOKEN not in repr(cluster)
    path = write(tmp_path / "config", {"server": secure.url, "certificate-authority": "ca.crt"}, {})
    with pytest.raises(
        RequestRejected, match=r"answered: Unauthorized \(status 401 Unauthorized\); it does not accept the cred"
    ):
        await ask(find_cluster(str(path), None, {}))


async def test_a_server_that_is_another(secure: Server, certificates: Path, tmp_path: Path) -> None:
    trusted = {"certificate-authority": str(certificates / "ca.crt")}
    user = {"token": TOKEN}
    path = write(tmp_path / "config", {"server": secure.url}, user)
    with pytest.raises(
        RequestRejected, match=f"API server {secure.url} has not answered: ConnectError: .*CERTIFICATE_VERIFY"
    ):
        await ask(find_cluster(str(path), None, {}))
    url = secure.url.replace("127.0.0.1", "localhost")
    path = write(tmp_path / "config", {"server": url, **trusted}, user)
    with pytest.raises(RequestRejected, match="Hostname mismatch"):
        await ask(find_cluster(str(path), None, {}))
    path = write(tmp_path / "config", {"server": url, "tls-server-name": "api.test", **trusted}, user)
    assert await ask(find_cluster(str(path), None, {})) == []


async def test_tokens_in_files_are_read_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    path = write(tmp_path / "config", {"server": server.url}, {"tokenFile": "token", "token": "not this one"})
    cluster = find_cluster(str(path), None, {})
    assert await ask(cluster) == []
    server.tokens = {"the next one"}
    (tmp_path / "token").write_text("the next one")
    assert await ask(cluster) == []
    (tmp_path / "token").unlink()
    with pytest.raises(DispatchError, match=f"the token for {server.url} cannot be read: .*No such file"):
        await ask(cluster)


async def test_the_account_of_a_pod(secure: Server, certificates: Path, tmp_path: Path) -> None:
    account = tmp_path / "account"
    account.mkdir()
    for name, data in (("token", TOKEN.encode()), ("ca.crt", (certificates / "ca.crt").read_bytes())):
        (account / name).write_bytes(data)
    host, _, port = secure.url.removeprefix("https://").partition(":")
    env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "HOME": str(tmp_path)}
    assert find_cluster(None, None, env, account=account).namespace == "default"
    (account / "namespace").write_text("lab\n")
    cluster = find_cluster(None, None, env, account=account)
    assert (cluster.url, cluster.namespace) == (secure.url, "lab")
    assert await ask(cluster) == []
    (account / "token").write_text("renewed")
    secure.tokens = {"renewed"}
    assert await ask(cluster) == []
    assert find_cluster(None, None, {**env, "KUBERNETES_SERVICE_HOST": "fd00::1"}, account=account).url.startswith(
        "https://[fd00::1]:"
    )
    with pytest.raises(ValueError, match="the runner option context=x needs a kubeconfig, and there is none here"):
        find_cluster(None, "x", env, account=account)


# --- a program that prints credentials ---------------------------------------------------------------------------------

PROGRAM = """#!/bin/sh
echo "$@ $REGION" >>{folder}/runs
echo "$KUBERNETES_EXEC_INFO" >{folder}/info
test -e {folder}/broken && {{ echo "no session" >&2; exit 3; }}
cat {folder}/answer
"""
V1 = "client.authentication.k8s.io/v1"


class Program:
    """A program beside a kubeconfig that names it, and what it prints."""

    def __init__(self, folder: Path, server: Server, **fields: Any) -> None:
        self.folder = folder
        path = folder / "get-token"
        path.write_text(PROGRAM.format(folder=folder))
        path.chmod(0o755)
        plugin = {"apiVersion": V1, "command": "./get-token", "args": ["token", "--cluster"], **fields}
        plugin["env"] = [{"name": "REGION", "value": "north"}]
        self.cluster = find_cluster(
            str(write(folder / "config", {"server": server.url}, {"exec": plugin})), None, dict(os.environ)
        )

    def prints(self, token: object, expires: str | None = None, version: str = V1) -> None:
        status = {"token": token, "expirationTimestamp": expires}
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        (self.folder / "answer").write_text(json.dumps(answer))

    def runs(self) -> list[str]:
        return (self.folder / "runs").read_text().splitlines()


async def test_a_program_prints_the_token(server: Server, tmp_path: Path) -> None:
    program = Program(tmp_path, server, provideClusterInfo=True)
    program.prints(TOKEN)
    api = KubeApi(program.cluster, NAMESPACE)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(api.jobs, {"a": "b"})
    assert program.runs() == ["token --cluster north"]  # once for all requests
    info = json.loads((tmp_path / "info").read_text())
    assert info == {
        "apiVersion": V1,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": server.url}},
    }
    server.tokens = {"the next one"}
    program.prints("the next one")
    assert await keep_trying(lambda: api.jobs({"a": "b"}), 3.0) == []  # one that is rejected is not used again
    assert len(program.runs()) == 2
    await api.aclose()


async def test_a_token_of_a_program_that_expires(server: Server, tmp_path: Path) -> None:
    program = Program(tmp_path, server)
    api = KubeApi(program.cluster, NAMESPACE)
    program.prints(TOKEN, "2020-01-01T00:00:00Z")
    for _ in range(2):
        await api.jobs({"a": "b"})
    program.prints(TOKEN, "2100-01-01T00:00:00Z")
    for _ in range(2):
        await api.jobs({"a": "b"})
    assert len(program.runs()) == 3
    await api.aclose()


async def test_a_program_that_fails_is_run_again(server: Server, tmp_path: Path) -> None:
    program = Program(tmp_path, server)
    (tmp_path / "broken").touch()
    api = KubeApi(program.cluster, NAMESPACE)
    with pytest.raises(ApiUnavailable) as caught:
        await api.jobs({"a": "b"})
    assert str(caught.value) == (
        f"the token for {server.url} cannot be read: `{tmp_path}/get-token` failed (exit code 3): no session"
    )
    (tmp_path / "broken").unlink()
    for token, version in ((None, V1), ("two\nlines", V1), (TOKEN, "v0")):
        program.prints(token, version=version)
        with pytest.raises(
            ApiUnavailable, match=f"to print an ExecCredential of {V1} with a token, got something else"
        ):
            await api.jobs({"a": "b"})
    program.prints(TOKEN, "tomorrow")
    with pytest.raises(ApiUnavailable, match="to print a time as expirationTimestamp, got 'tomorrow'"):
        await api.jobs({"a": "b"})
    program.prints(TOKEN)
    assert await api.jobs({"a": "b"}) == []
    await api.aclose()


# --- kubeconfigs ------------------------------------------------------------------------------------------------------


def test_where_kubeconfigs_are(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"server": "http://one"}, {}, namespace="n")
    two = write(tmp_path / "two", {"server": "http://two"}, {})
    usual = tmp_path / ".kube" / "config"
    usual.parent.mkdir()
    write(usual, {"server": "http://usual"}, {})
    home = {"HOME": str(tmp_path)}
    several = {**home, "KUBECONFIG": os.pathsep.join([str(tmp_path / "none"), str(one), str(two)])}
    assert find_cluster(None, None, home).url == "http://usual"
    assert (find_cluster(None, None, several).url, find_cluster(None, None, several).namespace) == ("http://one", "n")
    assert find_cluster(str(two), None, several).url == "http://two"
    assert find_cluster(str(two), "other", several).namespace == "o"
    # a context in one file, its cluster in another
    two.write_text(json.dumps({"contexts": [{"name": "far", "context": {"cluster": "c"}}]}))
    assert find_cluster(None, "far", several).url == "http://one"


async def test_a_kubeconfig_of_yaml(tmp_path: Path) -> None:
    needs("yaml")
    path = tmp_path / "config"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts:\n- name: a\n  context: {cluster: c, user: u}\n"
        "clusters:\n- name: c\n  cluster:\n    server: http://there\nusers:\n- name: u\n  user:\n    token: t\n"
    )
    cluster = find_cluster(str(path), None, {})
    assert (cluster.url, await cluster.credentials.token()) == ("http://there", "t")
    path.write_text("a: [")
    with pytest.raises(ValueError, match=f"the kubeconfig {path} is neither JSON nor YAML: while parsing"):
        find_cluster(str(path), None, {})


def test_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "config"
    path.write_text("a: b")
    with pytest.raises(
        ValueError, match=r"is not JSON, and to read YAML needs PyYAML: `pip install 'dreamlake-lakeshor"
    ):
        find_cluster(str(path), None, {})


PEM = base64.b64encode(b"-----BEGIN NOTHING-----").decode()
HTTPS: dict[str, Any] = {"server": "https://h"}


@pytest.mark.parametrize(
    ("cluster", "user", "context", "said"),
    [
        ({}, {}, None, "expected the URL of a server in the cluster of context here in .*config, got ''"),
        (
            {"server": "ftp://h"},
            {},
            None,
            "expected the URL of a server in the cluster of context here in .*, got 'ftp:",
        ),
        (HTTPS, {}, "there", "config has no context 'there': it has here, other$"),
        (
            HTTPS,
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such", "installHint": "get it"}},
            None,
            "`exec` of the user u in .*config names the program 'no-such', which is not here: get it$",
        ),
        (
            HTTPS,
            {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "true"}},
            None,
            "expected the apiVersion client.authentication.k8s.io/v1 or .*v1beta1 in `exec` of the user u in .*, got '",
        ),
        (
            HTTPS,
            {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1",
                    "command": "true",
                    "interactiveMode": "Always",
                }
            },
            None,
            r"`exec` of the user u in .* needs a terminal \(interactiveMode Always\), which a worker does not have",
        ),
        (
            HTTPS,
            {"auth-provider": {"name": "gcp"}},
            None,
            "authenticates with an auth-provider, which kubectl itself has given up",
        ),
        (
            HTTPS,
            {"username": "a", "password": "b"},
            None,
            "authenticates with a password, which API servers have given up, whi",
        ),
        (
            HTTPS,
            {"client-certificate": "x"},
            None,
            "expected client-certificate and client-key together in .*config, got",
        ),
        (
            HTTPS,
            {"client-certificate": "x", "client-key": "y"},
            None,
            "the certificates that .* gives or names cannot be",
        ),
        (
            {**HTTPS, "certificate-authority-data": "ä"},
            {},
            None,
            "expected base64 of a PEM in certificate-authority-data",
        ),
        (
            {**HTTPS, "certificate-authority-data": PEM},
            {},
            None,
            "the certificates that .* gives or names cannot be used",
        ),
        ({**HTTPS, "certificate-authority": "nowhere"}, {}, None, "gives or names cannot be used: .*No such file"),
    ],
)
def test_kubeconfigs_that_cannot_be(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], context: str | None, said: str
) -> None:
    path = write(tmp_path / "config", cluster, user)
    with pytest.raises(ValueError, match=said):
        find_cluster(str(path), context, {})


def test_files_that_are_no_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "config"
    with pytest.raises(ValueError, match=f"the kubeconfig {path} cannot be read: .*No such file"):
        find_cluster(str(path), None, {})
    path.write_text("[]")
    with pytest.raises(ValueError, match=f"expected a kubeconfig in {path}, got something else"):
        find_cluster(str(path), None, {})
    path.write_text("{}")
    with pytest.raises(
        ValueError, match=f"{path} has no current-context: name one with the runner option context=NAME"
    ):
        find_cluster(str(path), None, {})
    with pytest.raises(ValueError, match=f"{path} has no context 'x': it has none"):
        find_cluster(str(path), "x", {})
    with pytest.raises(ValueError, match="no Kubernetes cluster is known here: there is no kubeconfig"):
        find_cluster(None, None, {"HOME": str(tmp_path)}, account=tmp_path)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[KubeApi]:
    api = KubeApi(find_cluster(str(server.kubeconfig(tmp_path / "config")), None, {}), NAMESPACE)
    yield api
    await api.aclose()


async def test_what_answers_mean(server: Server, api: KubeApi) -> None:
    for status, reason, kind in (
        (500, "InternalError", ApiUnavailable),
        (429, "TooManyRequests", ApiUnavailable),
        (507, "", ApiUnavailable),
        (409, "Conflict", ApiUnavailable),
        (409, "AlreadyExists", RequestRejected),
        (403, "Forbidden", RequestRejected),
        (302, "", RequestRejected),
    ):
        server.faults.append(Fault("", status, reason, "so it is", times=1))
        with pytest.raises(kind) as caught:
            await api.job("x")
        assert str(caught.value) == (
            f"the API server {server.url} answered: so it is (status {status}{f' {reason}' if reason else ''})"
        )
        assert getattr(caught.value, "retry_after", None) == (
            1.0 if status == 429 else 0.0 if kind is ApiUnavailable else None
        )
    assert await api.job("x") is None
    assert not await api.delete_job("x")
    assert not await api.delete_pod("x", 0)
    assert await api.log("x", "child", 10) == ""
    server.faults.append(Fault("", 0, times=1))
    with pytest.raises(
        ApiUnavailable, match=f"the API server {server.url} has not answered: RemoteProtocolError: Server disconn"
    ):
        await api.job("x")


async def test_what_is_no_api_server(tmp_path: Path) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        group.start_soon(listener.serve, serve)
        with pytest.raises(
            ApiUnavailable, match="expected JSON of the API server, got something else: Expecting value"
        ):
            await ask(Cluster(f"http://127.0.0.1:{port}", "n", None))
        group.cancel_scope.cancel()
    with pytest.raises(
        ApiUnavailable, match=f"the API server http://127.0.0.1:{port} has not answered: ConnectError: "
    ):
        await ask(Cluster(f"http://127.0.0.1:{port}", "n", None))


async def test_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()

    async def away() -> None:
        asked.append(anyio.current_time())
        raise ApiUnavailable("not now", 0.2 if len(asked) == 1 else 0.0)

    async def comes_back() -> str:
        if len(asked) < 3:
            await away()
        return "there"

    assert await keep_trying(comes_back) == "there"
    assert asked[1] - asked[0] >= 0.2
    assert len(asked) == 3
    began = anyio.current_time()
    with pytest.raises(ApiUnavailable, match="not now"):
        await keep_trying(away, 0.5)
    assert asked[-1] - began >= 0.5
    with anyio.move_on_after(0.3) as scope:
        await keep_trying(away)
    assert scope.cancelled_caught


def test_reading_what_may_be_anything() -> None:
    found = {"metadata": {"name": "n", "labels": None}, "items": [1, {"a": 1}]}
    assert (meta(found, "name"), meta(found, "other"), meta(None, "name")) == ("n", "", "")
    assert (part(found, "metadata", "labels"), part(found, "items", "x"), part(3)) == ({}, {}, {})
    assert (entries(found["items"]), entries(None), entries("abc")) == ([{"a": 1}], [], [])
