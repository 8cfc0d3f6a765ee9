"""A real Kubernetes from Debian's own packages: fetched and compiled once, kept in a cache.

Debian bookworm's source package `kubernetes` is a whole vendored tree of version 1.20.2. Three things stand between
it and the binaries: the OpenAPI definitions are generated (upstream's generator is in the tree), the vendored
`reflect2` is too old for Debian's Go (Debian's own is laid over it), and the version is told to the linker.
etcd, containerd, runc, the CNI plugins, busybox and kubectl are Debian's binaries. Nothing is installed on the
machine: packages are unpacked below the cache, whose key is this file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import Unavailable

VERSION = "1.20.2"
COMPILED = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
PACKAGES = (
    "golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev", "etcd-server", "kubernetes-client",
    "containerd", "runc", "containernetworking-plugins", "busybox-static",
)  # fmt: skip
#: What is taken as it is: where Debian keeps it, and the name it has here.
TAKEN = {
    "usr/bin/etcd": "etcd", "usr/bin/kubectl": "kubectl", "usr/bin/containerd": "containerd", "usr/bin/ctr": "ctr",
    "usr/bin/containerd-shim-runc-v2": "containerd-shim-runc-v2", "usr/sbin/runc": "runc", "bin/busybox": "busybox",
    "usr/lib/cni/bridge": "bridge", "usr/lib/cni/host-local": "host-local", "usr/lib/cni/loopback": "loopback",
}  # fmt: skip
TREE = "gopath/src/k8s.io/kubernetes"
REFLECT2 = "github.com/modern-go/reflect2"


def binaries() -> Path:
    """The folder of the binaries; built first if they are not there. Several may ask at once."""
    folder = cache()
    with _alone(folder):
        if not (folder / "complete").exists():
            _build(folder)
    return folder / "bin"


def cache() -> Path:
    root = os.environ.get("STRETTO_KUBERNETES") or Path.home() / ".cache" / "stretto" / "kubernetes"
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return Path(root) / f"{VERSION}-{key}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise Unavailable("a real Kubernetes is built from Debian's packages, and there is no apt-get here")
    began_s = time.monotonic()
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    _say(began_s, "fetching Debian's sources of Kubernetes, Go, etcd and containerd")
    _fetch(work)
    environment = _go(work)
    _say(began_s, "generating the OpenAPI definitions")
    _generate(work, environment)
    _say(began_s, f"compiling {', '.join(COMPILED)}; this takes some minutes, once")
    _compile(work, folder / "bin", environment)
    for source, name in TAKEN.items():
        shutil.copy2(work / "root" / source, folder / "bin" / name)
    (folder / "complete").write_text("".join(sorted(f"{deb.name}\n" for deb in (work / "debs").iterdir())))
    shutil.rmtree(work)
    _say(began_s, f"Kubernetes {VERSION} is in {folder}")


def _say(began_s: float, text: str) -> None:
    print(f"kubernetes [{time.monotonic() - began_s:4.0f} s] {text}", flush=True)


def _fetch(work: Path) -> None:
    """The machine's own mirror and key, with sources; the machine's package lists stay as they are."""
    apt = work / "apt"
    for part in ("lists/partial", "cache/archives/partial", "etc"):
        (apt / part).mkdir(parents=True)
    (apt / "etc" / "bookworm.sources").write_text(
        f"Types: deb deb-src\nURIs: {_mirror()}\nSuites: bookworm\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
    (apt / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{apt}/etc";\nDir::State::lists "{apt}/lists";\n'
        f'Dir::Cache "{apt}/cache";\nAcquire::Languages "none";\nAcquire::Retries "3";\nAPT::Sandbox::User "root";\n'
    )
    debs = work / "debs"
    debs.mkdir()
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf")}
    _run(["apt-get", "-qq", "update"], debs, environment)
    _run(["apt-get", "-qq", "source", "--download-only", "kubernetes"], debs, environment)
    _run(["apt-get", "-qq", "download", *PACKAGES], debs, environment)
    for deb in debs.glob("*.deb"):
        _run(["dpkg", "-x", str(deb), str(work / "root")], work)
    tree = work / TREE
    tree.mkdir(parents=True)
    (source,) = debs.glob("kubernetes_1.20*.orig.tar.*")
    _run(["tar", "xf", str(source), "-C", str(tree), "--strip-components=1"], work)
    vendored = tree / "vendor" / REFLECT2
    shutil.rmtree(vendored)
    shutil.copytree(work / "root/usr/share/gocode/src" / REFLECT2, vendored)


def _mirror() -> str:
    for file in sorted(Path("/etc/apt").rglob("*")):
        if file.suffix in (".sources", ".list"):
            found = re.search(r"^(?:URIs:|deb(?: \[.*\])?)\s+(\S+/debian)/?(?:\s|$)", file.read_text(), re.MULTILINE)
            if found is not None:
                return found[1]
    raise Unavailable("no Debian mirror is named below /etc/apt; Kubernetes is built from Debian's sources")


def _go(work: Path) -> dict[str, str]:
    root = work / "root/usr/lib/go-1.19"
    return os.environ | {
        "GOROOT": str(root),
        "GOPATH": str(work / "gopath"),
        "GOCACHE": str(work / "gocache"),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
        "PATH": f"{root}/bin:{os.environ['PATH']}",
    }


def _generate(work: Path, environment: dict[str, str]) -> None:
    """`pkg/generated/openapi`: the one generated file that the source package leaves out."""
    tree = work / TREE
    generator = work / "openapi-gen"
    _run(["go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], tree, environment)
    marked = {_package(tree, file.parent) for file in _marked(tree)}
    violations = work / "violations"
    _run(
        [
            str(generator), "--logtostderr", "-i", ",".join(sorted(marked)),
            "-p", "k8s.io/kubernetes/pkg/generated/openapi", "-O", "zz_generated.openapi",
            "-h", "hack/boilerplate/boilerplate.generatego.txt", "-r", str(violations),
        ],
        tree, environment,
    )  # fmt: skip
    if violations.read_bytes() != (tree / "api/api-rules/violation_exceptions.list").read_bytes():
        raise Unavailable("the OpenAPI definitions of Kubernetes were not generated as upstream generates them")


def _marked(tree: Path) -> Iterator[Path]:
    left_out = {"code-generator", "sample-apiserver"}
    staging = [folder for folder in (tree / "staging/src/k8s.io").iterdir() if folder.name not in left_out]
    for folder in (tree / "pkg", *staging):
        for file in folder.rglob("*.go"):
            if not {"testdata", "_examples"} & set(file.parts) and b"+k8s:openapi-gen=" in file.read_bytes():
                yield file


def _package(tree: Path, folder: Path) -> str:
    return "k8s.io/kubernetes/" + str(folder.relative_to(tree)).replace("staging/src/", "vendor/", 1)


def _compile(work: Path, into: Path, environment: dict[str, str]) -> None:
    major, minor, _ = VERSION.split(".")
    told = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
    flags = ["-s", "-w"]
    named = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for package in (*named, *(f"k8s.io/kubernetes/vendor/{name}" for name in named)):
        flags += [f"-X {package}.{name}={value}" for name, value in told.items()]
    into.mkdir(exist_ok=True)
    _run(
        [
            "go", "build", "-trimpath", "-tags", "providerless dockerless", "-ldflags", " ".join(flags),
            "-o", f"{into}/", *(f"./cmd/{name}" for name in COMPILED),
        ],
        work / TREE, environment,
    )  # fmt: skip


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise Unavailable(f"{' '.join(command[:3])} failed: " + "\n".join(said))


if __name__ == "__main__":
    binaries()
