"""Container images made from this machine's own files: no registry, no build tool, no root.

`pause` and `busybox` are one small layer each. The Python images are three: the interpreter with the shared libraries
that anything in it needs, the packages, and Stretto itself, so that a change of ours costs a few megabytes. Layers are
kept in the cache beside the binaries, under a key that names what is in them.

An image is never written as one file: `archive` is the stream that `ctr images import -` reads.
"""

from __future__ import annotations

import compileall
import fcntl
import functools
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

from packaging.requirements import Requirement

import stretto
from stretto.testing.kubernetes.building import binaries, cache

PAUSE = "stretto.test/pause:1"
BUSYBOX = "stretto.test/busybox:1"
WORKER = "stretto.test/worker:1"
CONTROLLER = "stretto.test/controller:1"
USER = 65532

#: What a worker imports, next to its framework.
WORKER_PACKAGES = ("torch", "safetensors", "websockets", "msgspec", "numpy")
_KEPT_S = 2 * 24 * 3600
_HOME = "usr/local"
_PACKAGES = f"{_HOME}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
_STDLIB_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
_PACKAGES_LEFT_OUT = {"tests", "include", "share"}
_PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void leave(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0); }
int main(void) { signal(SIGTERM, leave); signal(SIGINT, leave); signal(SIGCHLD, reap); for (;;) pause(); }
"""


class Layer(NamedTuple):
    file: Path
    digest: str


class Image(NamedTuple):
    """Layers and how a container of them starts."""

    name: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...]
    user: str = ""

    def archive(self, into: IO[bytes]) -> None:
        """The image in Docker's format, block by block."""
        files = [f"{layer.digest}.tar" for layer in self.layers]
        settings = {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": list(self.entrypoint), "User": self.user, "WorkingDir": "/",
                "Env": [f"PATH=/{_HOME}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp", "LANG=C.UTF-8"],
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in self.layers]},
        }  # fmt: skip
        encoded = json.dumps(settings).encode()
        config = f"{hashlib.sha256(encoded).hexdigest()}.json"
        manifest = [{"Config": config, "RepoTags": [self.name], "Layers": files}]
        with tarfile.open(fileobj=into, mode="w|") as archive:
            _add_bytes(archive, config, encoded)
            for name, layer in zip(files, self.layers, strict=True):
                archive.add(layer.file, name)
            _add_bytes(archive, "manifest.json", json.dumps(manifest).encode())


def pause() -> Image:
    """What holds a pod's network: it only waits."""
    return Image(PAUSE, (_kept("pause", _PAUSE_SOURCE, _pause),), ("/pause",))


def busybox() -> Image:
    return Image(BUSYBOX, (_kept("busybox", "", _system),), ("/bin/sh",))


def worker() -> Image:
    """Python with torch and Stretto's runtime; runs as nobody in particular, on a read-only file system."""
    return _python(WORKER, WORKER_PACKAGES)


def controller() -> Image:
    """Python with everything that Stretto installs by default, and openssl, which makes its key."""
    needs = [requirement.name for requirement in _requirements("stretto")]
    return _python(CONTROLLER, needs, "-m", "stretto.cli", more=(_kept("openssl", "", _openssl),))


def _python(name: str, packages: Sequence[str], *arguments: str, more: Sequence[Layer] = ()) -> Image:
    found = sorted(_closure(packages))
    versions = json.dumps([f"{package}=={importlib.metadata.version(package)}" for package in found])
    interpreter = _kept("python", f"{sys.version} {sys.base_prefix}", _interpreter)
    installed = _kept(f"{name.split('/')[1].split(':')[0]}-packages", versions, functools.partial(_packages, found))
    system = _kept("busybox", "", _system)
    own = _kept("stretto", _own_digest(), _own)
    return Image(name, (system, interpreter, *more, installed, own), (f"/{_HOME}/bin/python3", *arguments), str(USER))


# Layers, kept in the cache.


def _kept(name: str, content: str, write: Callable[[tarfile.TarFile], None]) -> Layer:
    """A layer with this content, written unless it is there. How it is written is part of its key: this very file."""
    key = hashlib.sha256(Path(__file__).read_bytes() + str(cache()).encode() + content.encode()).hexdigest()[:16]
    folder = cache().parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    file, digest = folder / f"{name}-{key}.tar", folder / f"{name}-{key}.sha256"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not digest.exists():
            _prune(folder)
            with tarfile.open(file, "w") as layer:
                write(layer)
            with file.open("rb") as written:
                digest.write_text(hashlib.file_digest(written, "sha256").hexdigest())
        for used in (file, digest):
            used.touch()
        return Layer(file, digest.read_text())


def _prune(folder: Path) -> None:
    """What nobody used for days; a younger one may be somebody else's who runs now."""
    now_s = datetime.now(UTC).timestamp()
    for old in folder.glob("*-*.*"):
        if now_s - old.stat().st_mtime > _KEPT_S:
            old.unlink(missing_ok=True)


def _pause(layer: tarfile.TarFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pause"
        command = ["gcc", "-x", "c", "-Os", "-static", "-s", "-o", str(program), "-"]
        subprocess.run(command, input=_PAUSE_SOURCE, text=True, check=True)
        _add(layer, program, "pause")


def _system(layer: tarfile.TarFile) -> None:
    """A shell with its tools, users, and the folders that every container has."""
    for folder in ("bin", "etc", "proc", "sys", "dev", "tmp"):
        _add_folder(layer, folder, 0o1777 if folder == "tmp" else 0o755)
    _add_bytes(layer, "etc/passwd", f"root:x:0:0::/:/bin/sh\nworker:x:{USER}:{USER}::/tmp:/bin/sh\n".encode())
    _add_bytes(layer, "etc/group", f"root:x:0:\nworker:x:{USER}:\n".encode())
    _add_bytes(layer, "etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    program = binaries() / "busybox"
    _add(layer, program, "bin/busybox")
    for name in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            _add_link(layer, f"bin/{name}", "busybox")


def _interpreter(layer: tarfile.TarFile) -> None:
    """Python itself, and the machine's libraries that it or any package links to."""
    standard = Path(sysconfig.get_path("stdlib"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    executable = Path(sys.base_prefix) / "bin" / version
    _add(layer, executable, f"{_HOME}/bin/python3")
    for name in ("python", version):
        _add_link(layer, f"{_HOME}/bin/{name}", "python3")
    linked = [executable]
    for file in sorted(standard.rglob("*")):
        parts = file.relative_to(standard).parts
        if file.is_file() and not _STDLIB_LEFT_OUT & set(parts) and not parts[0].startswith("config-"):
            _add(layer, file, f"{_HOME}/lib/{version}/{file.relative_to(standard)}")
            if file.suffix == ".so":
                linked.append(file)
    for package in sorted(_closure([*WORKER_PACKAGES, *(found.name for found in _requirements("stretto"))])):
        linked += [path for path in _files(package) if ".so" in path.suffixes]
    for library in _libraries(linked):
        _add(layer, library.resolve(), _library_place(library))


def _openssl(layer: tarfile.TarFile) -> None:
    program = Path(shutil.which("openssl") or "openssl")
    _add(layer, program, "bin/openssl")
    for library in _libraries([program]):
        _add(layer, library.resolve(), _library_place(library))


def _libraries(linked: Sequence[Path]) -> list[Path]:
    """What the loader finds for them outside the packages."""
    packages = sysconfig.get_path("purelib")
    said = subprocess.run(["ldd", *map(str, linked)], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)
    return sorted({Path(path) for path in found if not path.startswith(packages)})


def _library_place(library: Path) -> str:
    """The loader has a fixed place, and looks for everything else in /usr/lib at last."""
    return f"lib64/{library.name}" if library.name.startswith("ld-linux") else f"usr/lib/{library.name}"


def _packages(names: Sequence[str], layer: tarfile.TarFile) -> None:
    root = Path(sysconfig.get_path("purelib"))
    for name in names:
        for file in _files(name):
            _add(layer, file, f"{_PACKAGES}/{file.relative_to(root)}")


def _files(package: str) -> list[Path]:
    """The files of an installed distribution that are needed to run it, compiled modules included."""
    root = Path(sysconfig.get_path("purelib"))
    found: set[Path] = set()
    for part in importlib.metadata.files(package) or ():
        path = Path(str(part.locate()))
        if not path.is_relative_to(root) or _PACKAGES_LEFT_OUT & set(part.parts[1:-1]) or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".py":
            compiled = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
            found |= {compiled} if compiled.exists() else set()
    return sorted(found)


def _own_digest() -> str:
    digest = hashlib.sha256()
    for file in _own_files():
        digest.update(f"{file} {file.stat().st_mtime_ns}".encode() + file.read_bytes())
    return digest.hexdigest()


def _own(layer: tarfile.TarFile) -> None:
    root = _own_root()
    compileall.compile_dir(root, quiet=2)
    for file in _own_files():
        _add(layer, file, f"{_PACKAGES}/stretto/{file.relative_to(root)}")
        if file.suffix == ".py":
            compiled = file.parent / "__pycache__" / f"{file.stem}.{sys.implementation.cache_tag}.pyc"
            if compiled.exists():
                _add(layer, compiled, f"{_PACKAGES}/stretto/{compiled.relative_to(root)}")
    described = importlib.metadata.distribution("stretto")
    for part in described.files or ():
        if part.parts[0].endswith(".dist-info"):
            _add(layer, Path(str(part.locate())), f"{_PACKAGES}/{part}")
    program = f"#!/{_HOME}/bin/python3\nfrom stretto.cli import main\nmain()\n"
    _add_bytes(layer, f"{_HOME}/bin/stretto", program.encode(), 0o755)


def _own_root() -> Path:
    return Path(stretto.__path__[0])


def _own_files() -> list[Path]:
    return sorted(file for file in _own_root().rglob("*") if file.is_file() and "__pycache__" not in file.parts)


# What a package needs.


def _closure(packages: Iterable[str]) -> set[str]:
    """These distributions and all that they need here."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = importlib.metadata.metadata(waiting.pop())["Name"]
        if name not in found:
            found.add(name)
            waiting += [requirement.name for requirement in _requirements(name)]
    return found


def _requirements(package: str) -> list[Requirement]:
    stated = [Requirement(line) for line in importlib.metadata.requires(package) or ()]
    return [need for need in stated if need.marker is None or need.marker.evaluate({"extra": ""})]


# Entries of a layer: owned by root, whoever makes it.


def _add(layer: tarfile.TarFile, file: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    status = file.stat()
    # Compiled modules name the second at which their source was changed.
    entry.size, entry.mtime = status.st_size, int(status.st_mtime)
    entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    with file.open("rb") as content:
        layer.addfile(entry, content)


def _add_folder(layer: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    layer.addfile(entry)


def _add_link(layer: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    layer.addfile(entry)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
