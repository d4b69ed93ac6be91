"""Find the API server and prove who calls, as kubectl does. The only module that imports ``kubernetes``.

The library reads files, finds the environment's proxies and makes the connection pool. What it lacks is here:
``proxy-url``, impersonation, and credentials that change while a process runs. It reads a ``tokenFile`` once, refreshes
OIDC tokens at the start only and without verifying an issuer that names no CA, calls as nobody if an exec plugin
fails, and takes the last file's ``current-context`` where kubectl takes the first (36.0.3).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import aiohttp
import urllib3  # type: ignore[import-untyped]
import yaml
from kubernetes import client, config
from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.config.kube_config import FileOrData, KubeConfigMerger

from dlrm_api.errors import DLRMError, NoInputError, NoPermissionError, TemporaryError

logger = logging.getLogger(__name__)

DEFAULT_KUBECONFIG = "~/.kube/config"
SERVICE_ACCOUNT_TOKEN = Path(SERVICE_TOKEN_FILENAME)
TOKEN_FILE_INTERVAL = timedelta(minutes=1)
"""As kubectl does. A token that the server refuses is read again at once."""
PLUGIN_TIMEOUT_S = 60.0
"""Time for an exec plugin that cannot ask its user anything."""
ISSUER_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 24
EXEC_GROUP = "client.authentication.k8s.io"
EXEC_VERSIONS = (f"{EXEC_GROUP}/v1", f"{EXEC_GROUP}/v1beta1")
PLUGIN_CLUSTER_FIELDS = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
PROXY_SCHEMES = ("http", "https")

Document = dict[str, Any]
Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Say how the server is verified, and with which certificate the client answers."""

    ca_file: str | None = None
    verify: bool = True
    server_name: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context for aiohttp."""
        context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif self.ca_file:
            context.load_verify_locations(self.ca_file)
        else:
            context.load_default_certs()
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class _NamedContext(ssl.SSLContext):
    """Verify the server by ``tls-server-name``, which aiohttp does not know behind a proxy."""

    server_name: str | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return the TLS state of one connection."""
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)


@dataclass(frozen=True, kw_only=True)
class Login:
    """Hold what one read of the configuration gave. Two are equal if they call the same server as the same user."""

    server: str
    namespace: str
    """Default namespace."""
    headers: Headers = field(repr=False)
    """Token or password, and impersonation."""
    tls: TlsOptions
    proxy: str | None = field(repr=False)
    """URL; it may hold a password."""
    renew_at: datetime | None = field(compare=False)
    """When the credentials must be read again; None: once they are refused."""
    pool: Any = field(compare=False, repr=False)
    """urllib3's connection pool."""

    @property
    def root(self) -> str:
        """Return what stands before the path of a request. A proxy for plain HTTP needs the whole URL."""
        return self.server if self.proxy and self.server.startswith("http:") else urlsplit(self.server).path


@dataclass(frozen=True, kw_only=True)
class UserCredentials:
    """Hold what one source knows of a user."""

    authorization: str | None = None
    """The header."""
    certificate: str | None = None
    """PEM, from an exec plugin."""
    key: str | None = None
    renew_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class KubeconfigEntry:
    """Hold a context, cluster or user of a kubeconfig."""

    where: str
    """Its path, for messages."""
    value: Document
    folder: Path
    """Of its file: relative paths start there."""

    def file(self, name: str) -> str | None:
        """Return the path of a file that is named or embedded (``<name>-data``)."""
        path = FileOrData(self.value, name, file_base_path=str(self.folder)).as_file()
        return None if path is None else str(path)


class ClusterAccount:
    """Keep one user of one cluster logged in. The threads and connections of a process share it.

    The configuration is that of a kubeconfig (one file, or several separated by colons); without one, of this pod or
    of ``~/.kube/config``.

    Raises:
        NoInputError: no usable configuration was found, or it asks for what is not supported.
        NoPermissionError: an exec plugin or an OIDC issuer gave no credentials.
        TemporaryError: an OIDC issuer did not answer.
    """

    def __init__(
        self,
        kubeconfig: str | None = None,
        *,
        in_cluster: bool = False,
        context: str | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._in_pod = in_cluster and not kubeconfig and not context
        self._files = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
        self._context, self._clock = context, clock
        self._oidc_tokens: dict[str, Document] = {}
        """The newest tokens of a user, by the refresh token in the kubeconfig, which may be read-only."""
        self._lock = threading.Lock()
        self._login = self._read()

    @property
    def server(self) -> str:
        """Return the URL of the API server."""
        return self._login.server

    @property
    def namespace(self) -> str:
        """Return the default namespace of the configuration."""
        return self._login.namespace

    def login(self) -> Login:
        """Return the current login; renew one that has expired."""
        login = self._login
        if login.renew_at is None or self._clock() < login.renew_at:
            return login
        return self._replace(login, keep_pool=True)

    def renew(self, refused: Login) -> Login:
        """Return the login after one that the server refused, with new connections."""
        return self._replace(refused, keep_pool=False)

    def session(self, login: Login) -> aiohttp.ClientSession:
        """Return an aiohttp session for kopf. Each request carries the credentials of its time."""

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            try:
                current = await asyncio.to_thread(self.login)
            except DLRMError as error:
                # kopf retries errors of the network.
                raise aiohttp.ClientConnectionError(str(error)) from error
            request.headers.extend(current.headers)
            return await handler(request)

        connector = aiohttp.TCPConnector(limit=0, ssl=login.tls.context())
        return aiohttp.ClientSession(connector=connector, proxy=login.proxy, middlewares=[authorize])

    def _replace(self, stale: Login, *, keep_pool: bool) -> Login:
        with self._lock:
            # Otherwise another thread was faster.
            if self._login is stale:
                fresh = self._read()
                same = (fresh.server, fresh.tls, fresh.proxy) == (stale.server, stale.tls, stale.proxy)
                self._login = replace(fresh, pool=stale.pool) if keep_pool and same else fresh
            return self._login

    def _read(self) -> Login:
        return _read_service_account(self._clock()) if self._in_pod else self._read_kubeconfig()

    def _read_kubeconfig(self) -> Login:
        with _explained(self._files):
            merged = KubeConfigMerger(self._files)
            files: dict[str, Document] = merged.config_files
            name = self._context or next((n for file in files.values() if (n := file.get("current-context"))), None)
            if not name:
                raise config.ConfigException("current-context not found")
            context = _entry(files, "contexts", name).value
            cluster = _entry(files, "clusters", context["cluster"])
            user = _entry(files, "users", context["user"]) if context.get("user") else None
            settings = client.Configuration()
            settings.host = str(cluster.value["server"]).rstrip("/")
            settings.verify_ssl = not cluster.value.get("insecure-skip-tls-verify")
            settings.tls_server_name = cluster.value.get("tls-server-name")
            settings.ssl_ca_cert = cluster.file("certificate-authority")
            if proxy := cluster.value.get("proxy-url"):
                # NO_PROXY is about the environment's proxies only.
                settings.proxy, settings.no_proxy = _supported_proxy(proxy, cluster.where), None
            found, impersonation = UserCredentials(), Headers()
            if user is not None:
                found, impersonation = self._credentials(user, cluster, merged), _impersonation(user.value)
                settings.cert_file, settings.key_file = user.file("client-certificate"), user.file("client-key")
            if found.certificate:
                settings.cert_file, settings.key_file = _file_of(found.certificate), _file_of(found.key or "")
            return _login(settings, str(context.get("namespace") or "default"), found, impersonation)

    def _credentials(
        self, user: KubeconfigEntry, cluster: KubeconfigEntry, merged: KubeConfigMerger
    ) -> UserCredentials:
        """Return who a user is. A token file comes before a token, and a token before a plugin, as in kubectl."""
        known = user.value
        if known.get("tokenFile"):
            return _read_token_file(user.folder / known["tokenFile"], self._clock())
        if known.get("token"):
            return UserCredentials(authorization=f"Bearer {known['token']}")
        if provider := known.get("auth-provider"):
            if provider.get("name") != "oidc":
                raise NoInputError(
                    f"invalid kubeconfig: {user.where}.auth-provider: {provider.get('name')!r} is not supported; "
                    "use an exec plugin"
                )
            return self._oidc(replace(user, value=provider["config"], where=f"{user.where}.auth-provider"), merged)
        if known.get("exec"):
            return _run_plugin(replace(user, value=known["exec"], where=f"{user.where}.exec"), cluster)
        if known.get("username"):
            basic = urllib3.util.make_headers(basic_auth=f"{known['username']}:{known.get('password') or ''}")
            return UserCredentials(authorization=basic["authorization"])
        return UserCredentials()

    def _oidc(self, provider: KubeconfigEntry, merged: KubeConfigMerger) -> UserCredentials:
        """Return the id-token. Refresh an expired one, and save what replaces it: refresh tokens may work once only."""
        tokens, stored = provider.value, provider.value.get("refresh-token")
        tokens |= self._oidc_tokens.get(str(stored), {})
        if not (expires_at := _expiry_of(str(tokens.get("id-token")))) or expires_at <= self._clock():
            fresh = _refresh(provider)
            tokens |= fresh
            self._oidc_tokens = {str(stored): fresh}
            expires_at = _expiry_of(fresh["id-token"])
            try:
                merged.save_changes()
            except OSError as error:
                logger.warning("failed to save refreshed OIDC tokens in the kubeconfig", extra={"error": str(error)})
        return UserCredentials(authorization=f"Bearer {tokens['id-token']}", renew_at=expires_at)


def _login(settings: client.Configuration, namespace: str, found: UserCredentials, more: Headers) -> Login:
    settings.connection_pool_maxsize = MAX_CONNECTIONS
    pools = _pools(settings)
    return Login(
        server=settings.host,
        namespace=namespace,
        headers=((("Authorization", found.authorization),) if found.authorization else ()) + more,
        tls=TlsOptions(
            ca_file=settings.ssl_ca_cert,
            verify=settings.verify_ssl,
            server_name=settings.tls_server_name,
            cert_file=settings.cert_file,
            key_file=settings.key_file,
        ),
        proxy=settings.proxy if pools.proxy is not None else None,
        renew_at=found.renew_at,
        pool=pools.connection_from_url(settings.host),
    )


def _pools(settings: client.Configuration) -> Any:
    if settings.proxy and (login := urlsplit(settings.proxy)).username:
        secret = f"{unquote(login.username or '')}:{unquote(login.password or '')}"
        settings.proxy_headers = urllib3.util.make_headers(proxy_basic_auth=secret)
    return client.ApiClient(settings).rest_client.pool_manager


def _read_service_account(now: datetime) -> Login:
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
        namespace = SERVICE_ACCOUNT_TOKEN.with_name("namespace").read_text().strip()
        return _login(settings, namespace, _read_token_file(SERVICE_ACCOUNT_TOKEN, now), ())
    except (config.ConfigException, OSError, UnicodeDecodeError) as error:
        raise NoInputError(f"failed to read the pod's service account: {error}; set KUBECONFIG") from error


@contextmanager
def _explained(files: str) -> Iterator[None]:
    """Name the kubeconfig in errors of the library, which does not check the shape of the file."""
    try:
        yield
    except (config.ConfigException, OSError, UnicodeDecodeError) as error:
        raise NoInputError(f"failed to read kubeconfig {files}: {error}; set KUBECONFIG") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise NoInputError(f"invalid kubeconfig {files}: {problem}; set KUBECONFIG") from error


def _entry(files: Mapping[str, Document], kind: str, name: str) -> KubeconfigEntry:
    """Return a context, cluster or user; the first file that has it wins."""
    found = [(path, each) for path, file in files.items() for each in file.get(kind) or ()]
    for path, each in found:
        if each["name"] == name:
            one = kind.removesuffix("s")
            return KubeconfigEntry(
                where=f"{kind}[{name}].{one}", value=each.get(one) or {}, folder=Path(path).absolute().parent
            )
    known = ", ".join(sorted({str(each["name"]) for _, each in found}))
    raise config.ConfigException(f"{kind}[{name}] not found; expected one of: {known}")


def _supported_proxy(url: str, where: str) -> str:
    if (scheme := urlsplit(url).scheme) not in PROXY_SCHEMES:
        raise NoInputError(
            f"invalid kubeconfig: {where}.proxy-url: {scheme!r} proxies are not supported; use an http or https proxy"
        )
    return url


def _impersonation(user: Document) -> Headers:
    """Return the headers that ask the API server to treat the call as another user's."""
    named = [("Impersonate-User", user.get("as")), ("Impersonate-Uid", user.get("as-uid"))]
    groups = [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    extra = [
        (f"Impersonate-Extra-{quote(key, safe='')}", value)
        for key, values in (user.get("as-user-extra") or {}).items()
        for value in values
    ]
    return tuple((name, str(value)) for name, value in (*named, *groups, *extra) if value)


def _read_token_file(path: Path, now: datetime) -> UserCredentials:
    if not (token := path.read_text().strip()):
        raise NoInputError(f"token not found: {path} is empty")
    return UserCredentials(authorization=f"Bearer {token}", renew_at=now + TOKEN_FILE_INTERVAL)


def _file_of(pem: str) -> str:
    return str(FileOrData({"pem-data": base64.b64encode(pem.encode()).decode()}, "pem").as_file())


def _run_plugin(spec: KubeconfigEntry, cluster: KubeconfigEntry) -> UserCredentials:
    """Return what an exec plugin prints."""
    version, name = spec.value.get("apiVersion"), str(spec.value["command"])
    if version not in EXEC_VERSIONS:
        raise NoInputError(
            f"invalid kubeconfig: {spec.where}.apiVersion: {version!r} is not supported; "
            f"expected {' or '.join(EXEC_VERSIONS)}"
        )
    mode = spec.value.get("interactiveMode", "IfAvailable")
    interactive = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if mode == "Always" and not interactive:
        raise NoInputError(f"{spec.where}.interactiveMode: {name} must ask its user; run the command on a terminal")
    asked: Document = {"interactive": interactive}
    if spec.value.get("provideClusterInfo"):
        asked["cluster"] = _plugin_cluster(cluster)
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": asked}
    given = {str(each["name"]): str(each["value"]) for each in spec.value.get("env") or ()}
    # A path with a slash is relative to the kubeconfig.
    command = str(spec.folder / name) if "/" in name else name
    try:
        done = subprocess.run(
            [command, *map(str, spec.value.get("args") or ())],
            env={**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            # Its messages to the user, such as where to log in, go to stderr. Our stdin may be a manifest.
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=None if interactive else PLUGIN_TIMEOUT_S,
            check=True,
        )
        answer = json.loads(done.stdout)
        status = answer["status"]
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if answer["apiVersion"] != version or not (status.get("token") or (certificate and key)):
            raise ValueError("expected a token, or a certificate and its key")
        expires_at = status.get("expirationTimestamp")
        return UserCredentials(
            authorization=f"Bearer {status['token']}" if status.get("token") else None,
            certificate=certificate,
            key=key,
            renew_at=_time_of(expires_at) if expires_at else None,
        )
    except OSError as error:
        hint = " ".join(str(spec.value.get("installHint") or "install it, or correct its path").split())
        raise NoInputError(f"{spec.where}.command: failed to run {command}: {error.strerror}; {hint}") from error
    except subprocess.SubprocessError as error:
        raise NoPermissionError(f"{spec.where}: {error}; run {name} by hand to see why, and log in again") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise NoPermissionError(
            f"{spec.where}: {name} printed no valid ExecCredential of {version} ({type(error).__name__}: {error})"
        ) from error


def _plugin_cluster(cluster: KubeconfigEntry) -> Document:
    found = {name: cluster.value[name] for name in PLUGIN_CLUSTER_FIELDS if name in cluster.value}
    if ca := cluster.file("certificate-authority"):
        found["certificate-authority-data"] = base64.b64encode(Path(ca).read_bytes()).decode()
    for each in cluster.value.get("extensions") or ():
        if each["name"] == f"{EXEC_GROUP}/exec":
            found["config"] = each["extension"]
    return found


def _time_of(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _expiry_of(token: str) -> datetime | None:
    """Return when a JWT expires; None if it does not say."""
    try:
        body = token.split(".")[1]
        return datetime.fromtimestamp(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"], UTC)
    except (ValueError, TypeError, LookupError):
        return None


def _refresh(provider: KubeconfigEntry) -> Document:
    """Return the tokens that an OIDC issuer gives for a refresh token."""
    given = provider.value
    if not given.get("refresh-token"):
        raise NoPermissionError(f"{provider.where}: the id-token has expired and has no refresh-token; log in again")
    settings, issuer = client.Configuration(), str(given["idp-issuer-url"]).rstrip("/")
    settings.host, settings.ssl_ca_cert = issuer, provider.file("idp-certificate-authority")
    pools = _pools(settings)
    form = {"grant_type": "refresh_token", "refresh_token": given["refresh-token"], "client_id": given["client-id"]}
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    secret = given.get("client-secret")
    try:
        found = _answer(pools.request("GET", f"{issuer}/.well-known/openid-configuration", timeout=ISSUER_TIMEOUT_S))
        # What OpenID Connect Discovery says of an issuer that names no method.
        methods = found.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if secret and "client_secret_basic" in methods:
            headers |= urllib3.util.make_headers(basic_auth=f"{quote(given['client-id'])}:{quote(secret)}")
        elif secret:
            form["client_secret"] = secret
        endpoint, body = found["token_endpoint"], urlencode(form)
        tokens = _answer(
            pools.request("POST", endpoint, body=body, headers=headers, redirect=False, timeout=ISSUER_TIMEOUT_S)
        )
        return {"id-token": tokens["id_token"], "refresh-token": tokens.get("refresh_token") or given["refresh-token"]}
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise TemporaryError(f"{provider.where}: failed to refresh the id-token at {issuer}: {error}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise NoPermissionError(f"{provider.where}: no id-token from {issuer} ({problem}); log in again") from error


def _answer(response: Any) -> Document:
    if response.status >= 500:
        raise urllib3.exceptions.HTTPError(f"status {response.status}")
    found: Document = json.loads(response.data)
    if response.status != 200:
        raise ValueError(found.get("error_description") or found.get("error") or f"status {response.status}")
    return found
