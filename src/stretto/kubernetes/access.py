"""Where the API server is, whom to trust and who we are: a kubeconfig context, or the pod's own service account.

The rules are kubectl's: an explicit file or context comes first, then `KUBECONFIG` (several files are merged, the
first to name a thing wins), then the service account of the pod we run in, then `~/.kube/config`. Credentials that
change while we run are followed: token files are read again, exec plugins are asked again before their answer expires
and after a refusal.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
import yaml

from stretto.errors import UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_FILE_AGE = timedelta(minutes=1)
"""Kubelet renews a projected token long before it ends; reading it once a minute is what others do too."""
EXEC_MARGIN = timedelta(seconds=30)
EXEC_TIMEOUT_S = 60.0

Now = Callable[[], datetime]


class Credentials(Protocol):
    """Who we are, as the value of the Authorization header; empty where a client certificate says it."""

    async def header(self) -> str: ...

    async def renew(self) -> bool:
        """After the server refused the header: whether there is a new one that is worth trying."""
        ...


class Access(msgspec.Struct, kw_only=True):
    """How to reach one API server as one user."""

    server: str
    namespace: str = "default"
    credentials: Credentials
    tls: ssl.SSLContext | None = None
    """None for plain HTTP."""
    server_name: str = ""
    """The name to expect in the server's certificate, where it is not the host."""
    proxy: str = ""


def find(context: str = "", path: str | Path = "") -> Access:
    """The access that kubectl would use here."""
    named = os.environ.get("KUBECONFIG", "")
    default = Path("~/.kube/config").expanduser()
    if path:
        return from_kubeconfig([Path(path)], context)
    if named:
        return from_kubeconfig([Path(part) for part in named.split(os.pathsep) if part], context)
    if not context and in_a_pod():
        return from_service_account()
    if not default.is_file():
        raise UsageError(
            "no Kubernetes cluster is configured here",
            hint="set KUBECONFIG, or write ~/.kube/config; inside a pod a service account token must be mounted",
        )
    return from_kubeconfig([default], context)


def in_a_pod(folder: Path = SERVICE_ACCOUNT) -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (folder / "token").is_file()


def from_service_account(folder: Path = SERVICE_ACCOUNT) -> Access:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = folder / "namespace"
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace.read_text().strip() if namespace.is_file() else "default",
        credentials=TokenFile(folder / "token"),
        tls=_trusting(_Cluster(certificate_authority=str(folder / "ca.crt")), folder),
    )


def from_kubeconfig(paths: list[Path], context: str = "") -> Access:
    """The access of one context (the current one unless named) of the merged files."""
    files = [_read(path.expanduser()) for path in paths if path.expanduser().is_file()]
    if not files:
        raise UsageError(f"no kubeconfig at {', '.join(map(str, paths))}", hint="check KUBECONFIG")
    wanted = context or next((file.current_context for file in files if file.current_context), "")
    if not wanted:
        raise UsageError("the kubeconfig has no current context", hint="name one: kubectl config get-contexts")
    chosen, _ = _named(files, "contexts", wanted)
    cluster, cluster_folder = _named(files, "clusters", chosen.get("cluster", ""))
    user, user_folder = _named(files, "users", chosen["user"]) if chosen.get("user") else ({}, Path())
    return _access(
        msgspec.convert(cluster, _Cluster), cluster_folder, msgspec.convert(user, _User), user_folder,
        chosen.get("namespace") or "default",
    )  # fmt: skip


class FixedCredentials:
    """A token or password that never changes, or nothing (`header` empty)."""

    def __init__(self, header: str = "") -> None:
        self._header = header

    async def header(self) -> str:
        return self._header

    async def renew(self) -> bool:
        return False


class TokenFile:
    """A token that somebody else renews in a file."""

    def __init__(self, path: Path, now: Now = lambda: datetime.now(UTC)) -> None:
        self._path = path
        self._now = now
        self._header = ""
        self._read_at: datetime | None = None

    async def header(self) -> str:
        if self._read_at is None or self._now() - self._read_at >= TOKEN_FILE_AGE:
            self._read()
        return self._header

    async def renew(self) -> bool:
        before = self._header
        self._read()
        return self._header != before

    def _read(self) -> None:
        try:
            token = self._path.read_text().strip()
        except OSError as error:
            raise UsageError(f"cannot read the token file {self._path}: {error.strerror}") from error
        self._header, self._read_at = f"Bearer {token}", self._now()


class ExecPlugin:
    """A command that prints a token or a client certificate (client.authentication.k8s.io)."""

    def __init__(self, command: _Exec, folder: Path, tls: ssl.SSLContext | None, cluster: dict[str, Any]) -> None:
        self._command = command
        self._folder = folder
        self._tls = tls
        self._cluster = cluster
        self._header = ""
        self._known = False
        self._until: datetime | None = None
        self._lock = asyncio.Lock()

    async def header(self) -> str:
        async with self._lock:
            if not self._known or (self._until is not None and datetime.now(UTC) >= self._until):
                await self._ask()
            return self._header

    async def renew(self) -> bool:
        async with self._lock:
            before = self._header
            await self._ask()
            return self._header != before or not self._header

    async def _ask(self) -> None:
        status = await self._run()
        token = status.get("token") or ""
        self._header = f"Bearer {token}" if token else ""
        if self._tls is not None and status.get("clientCertificateData"):
            _load_certificate(self._tls, status["clientCertificateData"], status.get("clientKeyData") or "")
        expires = status.get("expirationTimestamp")
        self._until = msgspec.convert(expires, datetime) - EXEC_MARGIN if expires else None
        self._known = True

    async def _run(self) -> dict[str, Any]:
        command = self._command
        given = {
            "apiVersion": command.api_version,
            "kind": "ExecCredential",
            "spec": {"interactive": False, **({"cluster": self._cluster} if command.provide_cluster_info else {})},
        }
        extra = {pair["name"]: pair["value"] for pair in command.env or ()}
        program = str(self._folder / command.command) if os.sep in command.command else command.command
        problem = f"the credential plugin {command.command}"
        try:
            process = await asyncio.create_subprocess_exec(
                program, *(command.args or ()),
                env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(given)},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{problem} cannot be run: {error.strerror}", hint=command.install_hint or "") from error
        try:
            async with asyncio.timeout(EXEC_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise UsageError(f"{problem} did not answer within {EXEC_TIMEOUT_S:.0f} s") from error
        if process.returncode != 0:
            said = err.decode(errors="replace").strip()[-500:]
            raise UsageError(f"{problem} ended with {process.returncode}: {said}", hint=command.install_hint or "")
        try:
            return dict(json.loads(out)["status"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{problem} printed no ExecCredential with a status") from error


class _Cluster(msgspec.Struct, rename="kebab", kw_only=True):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _Exec(msgspec.Struct, rename="camel", kw_only=True):
    api_version: str
    command: str
    args: list[str] | None = None
    env: list[dict[str, str]] | None = None
    install_hint: str | None = None
    provide_cluster_info: bool = False


class _User(msgspec.Struct, rename="kebab", kw_only=True):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: _Exec | None = None
    auth_provider: dict[str, Any] | None = None


class _File(msgspec.Struct, rename="kebab", kw_only=True):
    current_context: str | None = None
    contexts: list[dict[str, Any]] | None = None
    clusters: list[dict[str, Any]] | None = None
    users: list[dict[str, Any]] | None = None
    folder: Path = Path()


def _read(path: Path) -> _File:
    try:
        file = msgspec.convert(yaml.safe_load(path.read_text()) or {}, _File)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"cannot read the kubeconfig {path}: {error}") from error
    file.folder = path.parent
    return file


def _named(files: list[_File], what: str, name: str) -> tuple[dict[str, Any], Path]:
    """The entry of that name in the first file that has it, and the folder its relative paths start from."""
    for file in files:
        for entry in getattr(file, what) or ():
            if entry.get("name") == name:
                return dict(entry.get(what[:-1]) or {}), file.folder
    known = sorted({str(entry.get("name")) for file in files for entry in getattr(file, what) or ()})
    raise UsageError(f"the kubeconfig has no {what[:-1]} {name!r}", hint=f"known: {', '.join(known)}" if known else "")


def _access(cluster: _Cluster, cluster_folder: Path, user: _User, user_folder: Path, namespace: str) -> Access:
    server = urlsplit(cluster.server)
    if server.scheme not in ("http", "https") or not server.hostname:
        raise UsageError(f"the kubeconfig's server {cluster.server!r} is no http(s) address")
    tls = _trusting(cluster, cluster_folder) if server.scheme == "https" else None
    if tls is not None and (user.client_certificate or user.client_certificate_data):
        _load_certificate(
            tls,
            _pem(user.client_certificate_data, user.client_certificate, user_folder),
            _pem(user.client_key_data, user.client_key, user_folder),
        )
    return Access(
        server=cluster.server.rstrip("/"),
        namespace=namespace,
        credentials=_credentials(user, user_folder, tls, cluster, cluster_folder),
        tls=tls,
        server_name=cluster.tls_server_name or "",
        proxy=cluster.proxy_url or _proxy_of_environment(server.scheme, server.hostname),
    )


def _credentials(
    user: _User, folder: Path, tls: ssl.SSLContext | None, cluster: _Cluster, cluster_folder: Path
) -> Credentials:
    if user.token_file:
        return TokenFile(folder / user.token_file)
    if user.token:
        return FixedCredentials(f"Bearer {user.token}")
    if user.exec is not None:
        return ExecPlugin(user.exec, folder, tls, _told_to_plugins(cluster, cluster_folder))
    if user.username and user.password:
        pair = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
        return FixedCredentials(f"Basic {pair}")
    if user.auth_provider is not None:
        raise UsageError("auth-provider entries were removed from Kubernetes", hint="use an exec plugin")
    return FixedCredentials()


def _told_to_plugins(cluster: _Cluster, folder: Path) -> dict[str, Any]:
    authority = _pem(cluster.certificate_authority_data, cluster.certificate_authority, folder)
    told: dict[str, Any] = {"server": cluster.server, "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify}
    if authority:
        told["certificate-authority-data"] = base64.b64encode(authority.encode()).decode()
    if cluster.tls_server_name:
        told["tls-server-name"] = cluster.tls_server_name
    return told


def _trusting(cluster: _Cluster, folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster.certificate_authority_data, cluster.certificate_authority, folder)
    try:
        context = ssl.create_default_context(cadata=authority or None)
    except ssl.SSLError as error:
        raise UsageError(f"the cluster's certificate authority cannot be used: {error.reason}") from error
    # Certificates that cluster installers made often lack extensions which newer Pythons insist on.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _pem(data: str | None, path: str | None, folder: Path) -> str:
    """What a `…-data` entry holds, else what the file holds; empty when there is neither."""
    try:
        if data:
            return base64.b64decode(data).decode()
        return (folder / path).read_text() if path else ""
    except (OSError, ValueError) as error:
        raise UsageError(f"a certificate of the kubeconfig cannot be read: {error}") from error


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Present this certificate from now on. Python takes it from files only: private ones that are gone at once."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as name:
        both = Path(name) / "pair.pem"
        both.touch(mode=0o600)
        both.write_text(f"{certificate}\n{key}\n")
        try:
            context.load_cert_chain(both)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"the client certificate cannot be used: {error}") from error


def _proxy_of_environment(scheme: str, host: str) -> str:
    return "" if proxy_bypass(host) else getproxies().get(scheme, "")
