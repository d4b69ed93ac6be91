"""How a kubeconfig becomes credentials that stay valid: real TLS, proxies, plugins and issuers on loopback."""

import asyncio
import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import kopf
import pytest
import yaml
from kubernetes.config.kube_config import KubeConfigMerger

from dlrm_api.errors import DLRMError, NoInputError, NoPermissionError, TemporaryError
from dlrm_cluster.certificates import Certificates, write_certificates
from dlrm_operator.api_client import ClusterUnavailableError, KubernetesApi
from dlrm_operator.controller.handlers import next_login
from dlrm_operator.login import ClusterAccount
from dlrm_testing.operator.connect_proxy import ConnectProxy

Object = dict[str, Any]
PATH = "/api/v1/pods"


class Web(ThreadingHTTPServer):
    """Answers by a function of the request; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[["Request"], tuple[int, Object]], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.answer, self.asked = answer, list[Request]()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Request(BaseHTTPRequestHandler):
    server: Web
    body = b""

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self)
        code, found = self.server.answer(self)
        text = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""


@contextmanager
def web(answer: Callable[[Request], tuple[int, Object]], tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    server = Web(answer, tls)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class ApiServer:
    """Accepts some tokens; tells who else called, and how."""

    def __init__(self) -> None:
        self.accepted = {"first"}

    def __call__(self, request: Request) -> tuple[int, Object]:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and token not in self.accepted:
            return 401, {"message": "Unauthorized"}
        peer = request.connection.getpeercert() if isinstance(request.connection, ssl.SSLSocket) else None
        return 200, {"token": token, "certified": bool(peer)}


class Clock:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return write_certificates(tmp_path_factory.mktemp("certificates"), ["api.test"])


@pytest.fixture
def tls(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@pytest.fixture
def accepts() -> ApiServer:
    return ApiServer()


@pytest.fixture
def server(accepts: ApiServer) -> Iterator[Web]:
    with web(accepts) as server:
        yield server


def kubeconfig(folder: Path, cluster: Object, user: Object, name: str = "config", context: str = "here") -> Path:
    path = folder / name
    document = {
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": context, "user": context, "namespace": f"ns-{context}"}}],
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": context, "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def plugin(folder: Path, version: str = "client.authentication.k8s.io/v1") -> Object:
    """An exec plugin that prints ``credential`` of its folder, and notes each run with what it was told."""
    script = folder / "plugin"
    script.write_text(f'#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >> {folder}/runs\ncat {folder}/credential\n')
    script.chmod(0o755)
    return {"exec": {"apiVersion": version, "command": "./plugin", "interactiveMode": "Never"}}


def credential(folder: Path, version: str = "client.authentication.k8s.io/v1", **status: Any) -> None:
    (folder / "credential").write_text(json.dumps({"kind": "ExecCredential", "apiVersion": version, "status": status}))


def runs(folder: Path) -> list[Object]:
    return [json.loads(line) for line in (folder / "runs").read_text().splitlines()]


def call(account: ClusterAccount) -> Object:
    return KubernetesApi(account).call_now("GET", PATH)


def by_kopf(account: ClusterAccount) -> Object:
    """What the server answers to kopf's session."""

    async def ask() -> Object:
        login = account.login()
        async with account.session(login) as session, session.get(f"{login.server}{PATH}") as response:
            return dict(await response.json(content_type=None))

    return asyncio.run(ask())


def test_proxy_url_is_used_by_both_clients(
    tmp_path: Path, accepts: ApiServer, certificates: Certificates, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with web(accepts, tls) as server, ConnectProxy() as proxy:
        cluster = {
            "server": server.url,
            "certificate-authority": str(certificates.ca),
            "tls-server-name": "api.test",
            "proxy-url": proxy.url.replace("//", "//me:pass%20word@"),
        }
        account = ClusterAccount(str(kubeconfig(tmp_path, cluster, {"token": "first"})))

        assert call(account)["token"] == by_kopf(account)["token"] == "first"

        secret = f"Basic {base64.b64encode(b'me:pass word').decode()}"
        assert proxy.asked == [(server.url.removeprefix("https://"), secret)] * 2


def test_plain_http_goes_through_proxy_url(tmp_path: Path, accepts: ApiServer) -> None:
    with web(accepts) as proxy:
        cluster = {"server": "http://api.invalid", "proxy-url": proxy.url}
        account = ClusterAccount(str(kubeconfig(tmp_path, cluster, {"token": "first"})))

        assert call(account)["token"] == by_kopf(account)["token"] == "first"
        assert {asked.path for asked in proxy.asked} == {f"http://api.invalid{PATH}"}


def test_a_wrong_server_name_is_refused_by_both_clients(
    tmp_path: Path, accepts: ApiServer, certificates: Certificates, tls: ssl.SSLContext
) -> None:
    with web(accepts, tls) as server:
        cluster = {"server": server.url, "certificate-authority": str(certificates.ca), "tls-server-name": "other.test"}
        account = ClusterAccount(str(kubeconfig(tmp_path, cluster, {"token": "first"})))

        with pytest.raises(ClusterUnavailableError, match="other"):
            call(account)
        with pytest.raises(OSError, match="other"):
            by_kopf(account)


def test_a_rewritten_token_file_is_read_once_the_old_token_is_refused(
    tmp_path: Path, server: Web, accepts: ApiServer
) -> None:
    (tmp_path / "token").write_text("first\n")
    user = {"tokenFile": "token", "token": "less than the file"}
    account = ClusterAccount(str(kubeconfig(tmp_path, {"server": server.url}, user)))
    assert call(account)["token"] == "first"

    (tmp_path / "token").write_text("second\n")
    accepts.accepted = {"second"}

    assert call(account)["token"] == "second"
    assert by_kopf(account)["token"] == "second"
    assert [asked.headers["Authorization"] for asked in server.asked] == [
        "Bearer first",
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]


def test_a_token_file_is_read_again_in_time(tmp_path: Path, server: Web, accepts: ApiServer, clock: Clock) -> None:
    accepts.accepted = {"first", "second"}
    (tmp_path / "token").write_text("first")
    file = kubeconfig(tmp_path, {"server": server.url}, {"tokenFile": str(tmp_path / "token")})
    account = ClusterAccount(str(file), clock=clock)
    pool = account.login().pool
    (tmp_path / "token").write_text("second")
    assert call(account)["token"] == "first"

    clock.now += timedelta(minutes=1)

    assert call(account)["token"] == by_kopf(account)["token"] == "second"
    assert account.login().pool is pool


def test_an_exec_plugin_runs_again_once_its_credential_expires(
    tmp_path: Path, server: Web, accepts: ApiServer, clock: Clock
) -> None:
    credential(tmp_path, token="first", expirationTimestamp="2026-01-01T00:10:00Z")
    account = ClusterAccount(str(kubeconfig(tmp_path, {"server": server.url}, plugin(tmp_path))), clock=clock)
    assert [call(account)["token"] for _ in range(3)] == ["first"] * 3
    assert len(runs(tmp_path)) == 1
    accepts.accepted.add("second")

    credential(tmp_path, token="second", expirationTimestamp="2026-01-01T00:20:00Z")
    clock.now += timedelta(minutes=10)

    assert call(account)["token"] == by_kopf(account)["token"] == "second"
    assert [run["spec"] for run in runs(tmp_path)] == [{"interactive": False}] * 2


def test_an_exec_plugin_runs_once_for_all_whose_token_is_refused(
    tmp_path: Path, server: Web, accepts: ApiServer
) -> None:
    credential(tmp_path, token="first")
    account = ClusterAccount(str(kubeconfig(tmp_path, {"server": server.url}, plugin(tmp_path))))
    login = account.login()
    credential(tmp_path, token="second")
    accepts.accepted = {"second"}

    threads = [threading.Thread(target=account.renew, args=(login,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert call(account)["token"] == "second"
    assert len(runs(tmp_path)) == 2


def test_certificates_of_an_exec_plugin_are_used_by_both_clients(
    tmp_path: Path, accepts: ApiServer, certificates: Certificates, tls: ssl.SSLContext
) -> None:
    certificate, key = certificates.kubelet_client_cert.read_text(), certificates.kubelet_client_key.read_text()
    credential(tmp_path, clientCertificateData=certificate, clientKeyData=key)
    spec = plugin(tmp_path)
    spec["exec"] |= {"provideClusterInfo": True, "args": None}
    with web(accepts, tls) as server:
        ca = base64.b64encode(certificates.ca.read_bytes()).decode()
        cluster = {"server": server.url, "certificate-authority-data": ca, "tls-server-name": "api.test"}
        account = ClusterAccount(str(kubeconfig(tmp_path, cluster, spec)))

        assert call(account)["certified"]
        assert by_kopf(account)["certified"]
        assert runs(tmp_path)[0]["spec"]["cluster"] == cluster


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"command": "no-such-plugin", "installHint": "get it from example.org"}, NoInputError, "get it from example"),
        ({"command": "false"}, NoPermissionError, "false"),
        ({"command": "true"}, NoPermissionError, "true printed no valid ExecCredential"),
        ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, NoInputError, "v1alpha1' is not supported"),
        ({"interactiveMode": "Always"}, NoInputError, "terminal"),
    ],
)
def test_an_exec_plugin_that_gives_nothing_is_named(
    tmp_path: Path, change: Object, error: type[DLRMError], words: str
) -> None:
    spec = plugin(tmp_path)
    spec["exec"] |= change
    file = kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, spec)

    with pytest.raises(error, match=words) as met:
        ClusterAccount(str(file))

    assert "users[here].user.exec" in str(met.value)


class Issuer:
    """An OIDC issuer whose refresh tokens work once."""

    def __init__(self) -> None:
        self.number = 0
        self.url = ""

    def __call__(self, request: Request) -> tuple[int, Object]:
        if request.path == "/.well-known/openid-configuration":
            return 200, {"token_endpoint": f"{self.url}/token"}
        form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        secret = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        if (form["refresh_token"], secret) != (f"refresh-{self.number}", "me:my secret".replace(" ", "%20")):
            return 400, {"error": "invalid_grant", "error_description": "refresh token was used"}
        self.number += 1
        return 200, {"id_token": jwt(self.number, 3_600), "refresh_token": f"refresh-{self.number}"}


def jwt(number: int, left_s: float) -> str:
    body = json.dumps({"exp": time.time() + left_s, "number": number}).encode()
    return f"e30.{base64.urlsafe_b64encode(body).decode().rstrip('=')}.c2ln"


def oidc(issuer: str, ca: Path, **changes: Any) -> Object:
    config = {
        "idp-issuer-url": issuer,
        "idp-certificate-authority": str(ca),
        "client-id": "me",
        "client-secret": "my secret",
        "refresh-token": "refresh-0",
        "id-token": jwt(0, -10),
    }
    return {"auth-provider": {"name": "oidc", "config": {**config, **changes}}}


@pytest.fixture
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Issuer, Path]]:
    files = write_certificates(tmp_path_factory.mktemp("issuer"), ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.server_cert, files.server_key)
    answers = Issuer()
    with web(answers, context) as server:
        answers.url = server.url
        yield answers, files.ca


@pytest.mark.parametrize("writable", [True, False])
def test_an_expired_oidc_token_is_refreshed_and_saved(
    tmp_path: Path, issuer: tuple[Issuer, Path], writable: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ca = issuer
    file = kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, oidc(answers.url, ca))
    if not writable:
        monkeypatch.setattr(KubeConfigMerger, "save_config", read_only)
    clock.now = datetime.now(UTC)
    account = ClusterAccount(str(file), clock=clock)

    first = account.login()
    stored = yaml.safe_load(file.read_text())["users"][0]["user"]["auth-provider"]["config"]["refresh-token"]
    # As after a 401, which a valid token is not refreshed for.
    again = account.renew(first)
    clock.now += timedelta(hours=2)
    account.login()

    assert stored == ("refresh-1" if writable else "refresh-0")
    assert again == first
    assert answers.number == 2


def read_only(_: Any, path: str) -> None:
    raise PermissionError(13, "read-only", path)


def test_an_oidc_issuer_is_verified(tmp_path: Path, issuer: tuple[Issuer, Path]) -> None:
    answers, ca = issuer
    user = oidc(answers.url, ca)
    del user["auth-provider"]["config"]["idp-certificate-authority"]

    with pytest.raises(TemporaryError, match="certificate"):
        ClusterAccount(str(kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, user)))


@pytest.mark.parametrize(
    ("changes", "words"), [({"refresh-token": "used"}, "was used"), ({"refresh-token": ""}, "no refresh")]
)
def test_an_oidc_login_that_is_over_says_so(
    tmp_path: Path, issuer: tuple[Issuer, Path], changes: Object, words: str
) -> None:
    answers, ca = issuer

    with pytest.raises(NoPermissionError, match=f"{words}.*log in again"):
        ClusterAccount(str(kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, oidc(answers.url, ca, **changes))))


def test_of_several_files_the_first_decides(tmp_path: Path, server: Web, accepts: ApiServer) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
        kubeconfig(tmp_path / name, {"server": server.url}, {"tokenFile": "token"}, context=name)
    accepts.accepted = {"one", "two"}
    files = f"{tmp_path}/absent:{tmp_path}/one/config:{tmp_path}/two/config"

    current, chosen = ClusterAccount(files), ClusterAccount(files, context="two")

    assert (call(current)["token"], current.namespace) == ("one", "ns-one")
    assert (call(chosen)["token"], chosen.namespace) == ("two", "ns-two")
    with pytest.raises(NoInputError, match=r"contexts\[three\] not found; expected one of: one, two"):
        ClusterAccount(files, context="three")


def test_impersonation_is_sent_by_both_clients(tmp_path: Path, server: Web) -> None:
    user = {"token": "first", "as": "ann", "as-groups": ["a", "b"], "as-user-extra": {"scopes/x": ["read"]}}
    account = ClusterAccount(str(kubeconfig(tmp_path, {"server": server.url}, user)))

    call(account)
    by_kopf(account)

    for asked in server.asked:
        assert asked.headers.get_all("Impersonate-User") == ["ann"]
        assert asked.headers.get_all("Impersonate-Group") == ["a", "b"]
        assert asked.headers.get_all("Impersonate-Extra-scopes%2Fx") == ["read"]


@pytest.mark.parametrize(
    ("cluster", "user", "words"),
    [
        ({"proxy-url": "socks5://127.0.0.1:1"}, {}, r"clusters\[here\].cluster.proxy-url: 'socks5' .* not supported"),
        ({}, {"auth-provider": {"name": "gcp"}}, r"users\[here\].user.auth-provider: 'gcp' is not supported.*exec"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, cluster: Object, user: Object, words: str) -> None:
    with pytest.raises(NoInputError, match=words):
        ClusterAccount(str(kubeconfig(tmp_path, {"server": "http://127.0.0.1:1", **cluster}, user)))


def test_a_session_of_kopf_follows_only_new_credentials(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    account = ClusterAccount(str(kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, {"tokenFile": "token"})))
    used = next_login(account, None)

    with pytest.raises(kopf.PermanentError, match="rejected"):
        next_login(account, used)
    (tmp_path / "token").write_text("second")

    assert next_login(account, used).headers == (("Authorization", "Bearer second"),)
