"""A real Kubernetes control plane as child processes: etcd, the API server, the controller manager, the scheduler.

    with ControlPlane(folder) as cluster:
        cluster.kubectl("apply", "-f", "-", text=manifest)
        environment["KUBECONFIG"] = str(cluster.kubeconfig)

Several can run on one machine. etcd's data is kept in memory, the logs and certificates in the folder that is given.
The API server listens on the loopback; with a `PodNetwork` it listens at the address of the Service `kubernetes`
instead, so that programs in pods find it as in any cluster.
"""

from __future__ import annotations

import json
import secrets
import shutil
import ssl
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from stretto.testing.kubernetes.building import binaries
from stretto.testing.kubernetes.certificates import Authority
from stretto.testing.kubernetes.guard import Guard
from stretto.testing.kubernetes.pod_network import PodNetwork
from stretto.testing.kubernetes.processes import Program, free_port, run, wait_until

START_S = 120.0
_ADMIN_GROUP = "system:masters"
_COMPONENTS = ("kube-controller-manager", "kube-scheduler")


class ControlPlane:
    """A context manager; what it started is gone afterwards, also when this process is killed."""

    def __init__(
        self,
        folder: Path,
        *,
        controller_manager: bool = True,
        scheduler: bool = True,
        network: PodNetwork | None = None,
        node_grace_s: float = 40.0,
        api_server_flags: Sequence[str] = (),
        controller_manager_flags: Sequence[str] = (),
        scheduler_flags: Sequence[str] = (),
    ) -> None:
        self.folder, self.network, self.node_grace_s = folder.resolve(), network, node_grace_s
        self._flags = {
            "kube-apiserver": tuple(api_server_flags),
            "kube-controller-manager": tuple(controller_manager_flags),
            "kube-scheduler": tuple(scheduler_flags),
        }
        self._wanted = [
            name for name, wanted in zip(_COMPONENTS, (controller_manager, scheduler), strict=True) if wanted
        ]
        self.address = network.api_address if network is not None else "127.0.0.1"
        self.port = 443 if network is not None else free_port()
        self.url = f"https://{self.address}:{self.port}"
        self.admin_token = secrets.token_hex(16)
        self.programs: dict[str, Program] = {}

    def __enter__(self) -> ControlPlane:
        self.bin = binaries()
        self._guard = Guard()
        try:
            self._prepare()
            self._start_etcd()
            self.start_api_server()
            for name in self._wanted:
                self.start(name)
            self._wait_controllers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._guard.close()
        for program in self.programs.values():
            program.process.wait()

    # Using it.

    @property
    def ca(self) -> Path:
        return self.authority.certificate

    def kubectl(self, *words: str, text: str | None = None, timeout_s: float = 120.0) -> str:
        """As the administrator; what it printed. It raises what kubectl complains of."""
        return run(
            str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder / 'kubectl'}",
            *words, text=text, timeout_s=timeout_s,
        )  # fmt: skip

    def kubeconfig_for(self, token: str, name: str) -> Path:
        """A kubeconfig of whoever has that token, for instance a ServiceAccount."""
        return self._kubeconfig(name, {"token": token})

    def kubeconfig_as(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig of a user with these groups, who shows a certificate."""
        certificate, key = self.authority.client(user, groups)
        return self._kubeconfig(
            user.replace(":", "-"), {"client-certificate": str(certificate), "client-key": str(key)}
        )

    def token(self, service_account: str, namespace: str, *, lifetime_s: int = 24 * 3600) -> str:
        """A token of a ServiceAccount that exists."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": lifetime_s},
        }
        answer = json.loads(self.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(asked)))
        return str(answer["status"]["token"])

    def create_namespace(self, name: str) -> None:
        """A namespace in which pods can be made: its ServiceAccount is there."""
        self.kubectl("create", "namespace", name)
        if "kube-controller-manager" in self.programs:
            self._wait_service_account(name)

    def delete_namespace(self, name: str) -> None:
        """What is in it is gone on return; itself follows, but takes Kubernetes five seconds more.

        Objects of our own kinds are included: their definition has the category `all`.
        """
        # Kinds that were defined meanwhile are not in it.
        shutil.rmtree(self.folder / "kubectl", ignore_errors=True)
        within = ("--namespace", name, "--timeout=60s")
        self.kubectl("delete", "all", "--all", "--force", "--grace-period=0", *within)
        self.kubectl("delete", "namespace", name, "--wait=false")

    # Hurting it.

    def start_api_server(self) -> None:
        """Start it, or start it again at the same address after `stop_api_server`."""
        self._run("kube-apiserver", self._api_server())
        self._wait(self._api_ready, "the API server is ready")

    def stop_api_server(self) -> None:
        self.programs["kube-apiserver"].kill()

    @contextmanager
    def without_api_server(self) -> Iterator[None]:
        """As long as it takes: nobody reaches it, everything else goes on."""
        self.stop_api_server()
        try:
            yield
        finally:
            self.start_api_server()

    def start(self, name: str) -> None:
        """`kube-scheduler` or `kube-controller-manager`; also again after `stop`."""
        self._run(name, self._scheduler() if name == "kube-scheduler" else self._controller_manager())

    def stop(self, name: str) -> None:
        self.programs.pop(name).kill()

    # How it is made.

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(self.folder / "pki")
        service = self.network.api_address if self.network is not None else "10.0.0.1"
        self._certificate = self.authority.server(
            "kube-apiserver",
            addresses=sorted({self.address, service, "127.0.0.1"}),
            names=("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"),
        )
        tokens = {"admin": self.admin_token} | {name: secrets.token_hex(16) for name in _COMPONENTS}
        rows = [f"{token},system:{name},{name}" for name, token in tokens.items() if name != "admin"]
        rows.append(f'{self.admin_token},admin,admin,"{_ADMIN_GROUP}"')
        (self.folder / "tokens.csv").write_text("".join(f"{row}\n" for row in rows))
        configurations = {name: self.kubeconfig_for(token, name) for name, token in tokens.items()}
        self.kubeconfig = configurations["admin"]
        self._context = ssl.create_default_context(cafile=str(self.ca))

    def _kubeconfig(self, name: str, user: dict[str, str]) -> Path:
        file = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        file.write_text(json.dumps(content, indent=1))
        file.chmod(0o600)
        return file

    def _start_etcd(self) -> None:
        """Its data is kept in memory: nobody needs it afterwards, and it waits for the disk at every write."""
        self.data = Path(tempfile.mkdtemp(prefix="stretto-etcd-", dir="/dev/shm"))
        self._guard.folder(self.data)
        self._etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd",
            [
                "--name=test", f"--data-dir={self.data}", f"--listen-client-urls={self._etcd}",
                f"--advertise-client-urls={self._etcd}", f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=test={peers}",
                f"--quota-backend-bytes={4 << 30}", "--log-level=warn", "--logger=zap",
            ],
        )  # fmt: skip

    def _api_server(self) -> list[str]:
        certificate, key = self._certificate
        services = self.network.services if self.network is not None else "10.0.0.0/24"
        signing = self.authority.service_accounts
        flags = [
            f"--etcd-servers={self._etcd}", f"--bind-address={self.address}", f"--advertise-address={self.address}",
            f"--secure-port={self.port}", "--endpoint-reconciler-type=none", f"--service-cluster-ip-range={services}",
            f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}", f"--client-ca-file={self.ca}",
            f"--token-auth-file={self.folder / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={signing}",
            f"--service-account-signing-key-file={signing}", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ]  # fmt: skip
        if "kube-controller-manager" not in self._wanted:
            # Nobody makes the ServiceAccounts that it would ask pods for.
            flags.append("--disable-admission-plugins=ServiceAccount")
        return flags

    def _controller_manager(self) -> list[str]:
        return [
            *self._as("kube-controller-manager"), "--use-service-account-credentials", f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={self.authority.service_accounts}",
            f"--node-monitor-grace-period={self.node_grace_s:g}s",
            f"--node-startup-grace-period={max(60.0, self.node_grace_s):g}s",
            f"--flex-volume-plugin-dir={self.folder / 'flex'}",
        ]  # fmt: skip

    def _scheduler(self) -> list[str]:
        return self._as("kube-scheduler")

    def _as(self, name: str) -> list[str]:
        own = self.folder / f"{name}.kubeconfig"
        return [
            f"--kubeconfig={own}", f"--authentication-kubeconfig={own}", f"--authorization-kubeconfig={own}",
            "--bind-address=127.0.0.1", "--port=0", f"--secure-port={free_port()}", "--leader-elect=false",
        ]  # fmt: skip

    def _run(self, name: str, flags: list[str]) -> None:
        command = [str(self.bin / name), *flags, *self._flags.get(name, ())]
        self.programs[name] = Program(name, command, self.folder / f"{name}.log", self._guard, {})

    def _api_ready(self) -> bool:
        asked = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.admin_token}"})
        try:
            with urllib.request.urlopen(asked, timeout=5, context=self._context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _wait_controllers(self) -> None:
        if "kube-controller-manager" in self._wanted:
            self._wait_service_account("default")

    def _wait_service_account(self, namespace: str) -> None:
        def there() -> bool:
            path = ("get", "serviceaccount", "default", "--namespace", namespace, "--ignore-not-found")
            return self.kubectl(*path, "--output", "jsonpath={.secrets[*].name}") != ""

        self._wait(there, f"the controller manager has made the ServiceAccount of namespace {namespace}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, deadline_s=START_S, programs=tuple(self.programs.values()))
