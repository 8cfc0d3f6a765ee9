"""Checkpoints on disk: whole or not there, checked before they are used, bounded in number, fenced by generation.

A checkpoint is a folder `step-<n>-gen-<g>` with its parts and a manifest of their sizes and checksums. It is written
under another name, synced and renamed, so that a crash at any instant leaves the ones before it as they were. What
the parts contain is the caller's business. Saved again, the same step of the same generation gets a further `.<k>`.

*Newest* goes by generation first: after a restore a job may have done fewer steps than what it has left behind.

*Fencing* takes no lock, because a frozen writer would hold it. `fence(g)` writes a file that names the checkpoints
there are; from then on a checkpoint of a generation below g counts only if it is among them, whenever it arrives. So
a writer that was evicted, froze just before its rename and wakes up much later changes nothing.

*Leftovers* of crashed writers go at the next save. A writer holds a file lock on its temporary folder, so one whose
lock is free has no writer any more. Nobody ever waits for such a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)-gen-(\d+)(?:\.(\d+))?")
_FENCE = re.compile(r"fence-(\d+)")
_SAVING = re.compile(r"\.saving-(\d+)-[0-9a-f]+")
_FENCING = re.compile(r"\.fencing-(\d+)-[0-9a-f]+")
_REMOVED = ".removed-"
_PART = re.compile(r"\w[\w.-]*", re.ASCII)
_CHUNK = 1 << 20
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)

Part = bytes | bytearray | memoryview | Callable[[BinaryIO], None]
"""The content of a file, or a function that writes it to a stream, which cannot seek."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """What is on disk is not what was saved."""


class StaleGeneration(CheckpointError):
    """The writer is not of the job's current generation: it must stop, and nothing of it counts."""

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} is out: generation {current} has taken over these checkpoints")
        self.generation = generation
        self.current = current


class Entry(NamedTuple):
    """What the manifest says of a part."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    generation: int
    meta: Mapping[str, Any]
    parts: Mapping[str, Entry]

    def open(self, name: str) -> BinaryIO:
        """The part's file, unchecked."""
        self._entry(name)
        return open(self.path / name, "rb")

    def read(self, name: str) -> bytes:
        """The part's content, checked."""
        entry = self._entry(name)
        content = (self.path / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise CorruptCheckpoint(f"{self.path / name}: the content is not what was saved")
        return content

    def verify(self) -> None:
        """Reads everything; raises `CorruptCheckpoint` at the first part that is not what was saved."""
        for name, entry in self.parts.items():
            with open(self.path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise CorruptCheckpoint(f"{name}: the content is not what was saved")

    def _entry(self, name: str) -> Entry:
        if name not in self.parts:
            raise CheckpointError(f"{self.path} has no part {name!r}; it has {', '.join(self.parts)}")
        return self.parts[name]


@dataclass(frozen=True)
class Rejected:
    path: Path
    reason: str


@dataclass(frozen=True)
class Latest:
    """The newest checkpoint that can be used, if any, and the newer ones that cannot."""

    checkpoint: Checkpoint | None
    rejected: tuple[Rejected, ...] = ()


class _Fence(NamedTuple):
    generation: int
    kept: frozenset[str] | None
    """The checkpoints of lower generations that count; None: all there are."""

    def admits(self, name: _Name) -> bool:
        return name.generation >= self.generation or self.kept is None or name.text in self.kept


class _Name(NamedTuple):
    """A checkpoint's name, ordered from old to new."""

    generation: int
    step: int
    again: int
    text: str


class Store:
    """The checkpoints of one job in one folder. Any number of processes and threads may use the same folder."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self, step: int, generation: int, parts: Mapping[str, Part], meta: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes a checkpoint, durably, and removes what is older than the last `keep`; returns where it is.

        Raises `StaleGeneration` if a higher generation has fenced this one off or has saved.
        """
        if step < 0 or generation < 0:
            raise ValueError(f"step {step} and generation {generation} must not be negative")
        for name in parts:
            if not _PART.fullmatch(name) or name == MANIFEST:
                raise ValueError(f"{name!r} cannot be the name of a part: use letters, digits, '.', '_' and '-'")
        body = {"step": step, "generation": generation, "meta": dict(meta or {})}
        json.dumps(body)  # what cannot be written is refused before anything is
        self._refuse_stale(generation)
        self._make_folder()
        self.clean()
        path = self._write(body, parts)
        if not self._fence().admits(_parse(path.name)):
            self._remove(path.name)
            raise StaleGeneration(generation, self.generation())
        self._prune(_parse(path.name))
        return path

    def latest(self, validate: bool = True) -> Latest:
        """The newest usable checkpoint. Without `validate` only manifest and sizes are checked, not the contents."""
        while True:
            found = self._latest(validate)
            # One that went away was removed because there is a newer one now: look again.
            if all(os.path.lexists(one.path) for one in found.rejected):
                return found

    def fence(self, generation: int) -> None:
        """Takes the folder over: what lower generations have not saved by now will never count."""
        self._refuse_stale(generation)
        fence = self._fence()
        if fence.generation == generation:
            return
        self._make_folder()
        kept = [name.text for name in self._names() if fence.admits(name)]
        temporary = self.folder / f".fencing-{generation}-{secrets.token_hex(6)}"
        _write_file(temporary, json.dumps({"generation": generation, "kept": kept}).encode())
        with contextlib.suppress(FileNotFoundError):  # cleaned away by a higher generation
            os.rename(temporary, self.folder / f"fence-{generation}")
        _sync_folder(self.folder)
        self._refuse_stale(generation)
        for older in self._fences()[1:]:
            with contextlib.suppress(OSError):
                os.unlink(self.folder / f"fence-{older}")

    def generation(self) -> int:
        """The highest generation that has fenced or saved here; 0 if none has."""
        return max([*self._fences()[:1], *(name.generation for name in self._names())], default=0)

    def clean(self) -> None:
        """Removes what crashed writers have left; never what a live one is writing."""
        current = self.generation()
        for name in _list(self.folder):
            saving, fencing = _SAVING.fullmatch(name), _FENCING.fullmatch(name)
            with contextlib.suppress(OSError):
                if name.startswith(_REMOVED):
                    _delete(self.folder / name)
                elif saving:
                    self._remove_abandoned(name, otherwise=int(saving[1]) < current)
                elif fencing and int(fencing[1]) < current:
                    os.unlink(self.folder / name)

    def _latest(self, validate: bool) -> Latest:
        fence = self._fence()
        rejected: list[Rejected] = []
        for name in self._names():
            path = self.folder / name.text
            if not fence.admits(name):
                rejected.append(Rejected(path, f"arrived after generation {fence.generation} had taken over"))
                continue
            try:
                checkpoint = _load(path, name)
                if validate:
                    checkpoint.verify()
                return Latest(checkpoint, tuple(rejected))
            except (CorruptCheckpoint, OSError) as error:
                rejected.append(Rejected(path, str(error)))
        return Latest(None, tuple(rejected))

    def _refuse_stale(self, generation: int) -> None:
        current = self.generation()
        if generation < current:
            raise StaleGeneration(generation, current)

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            os.makedirs(self.folder, exist_ok=True)
            _sync_folder(self.folder.parent)

    def _write(self, body: dict[str, Any], parts: Mapping[str, Part]) -> Path:
        temporary, lock = self._temporary(body["generation"])
        try:
            written = {name: _write_file(temporary / name, part) for name, part in parts.items()}
            _write_file(temporary / MANIFEST, _manifest({**body, "parts": written}))
            _sync_folder(temporary)
            self._refuse_stale(body["generation"])
            return self._land(temporary, body["step"], body["generation"])
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(temporary.name)
            raise
        finally:
            os.close(lock)

    def _temporary(self, generation: int) -> tuple[Path, int]:
        """A folder to write into, and the descriptor that holds its lock."""
        while True:
            path = self.folder / f".saving-{generation}-{secrets.token_hex(6)}"
            os.mkdir(path)
            # Someone who cleans may take it for a leftover until it is locked: then it is gone, and another is made.
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if _lock(lock) is not False and _is_at(lock, path):
                    return path, lock
                os.close(lock)

    def _land(self, temporary: Path, step: int, generation: int) -> Path:
        again = max((n.again + 1 for n in self._names() if (n.step, n.generation) == (step, generation)), default=0)
        while True:
            path = self.folder / (f"step-{step}-gen-{generation}" + (f".{again}" if again else ""))
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                again += 1
            else:
                _sync_folder(self.folder)
                return path

    def _prune(self, saved: _Name) -> None:
        """Removes what is older than the last `keep`. Only what was just saved is known to be valid, so nothing newer
        than that is touched."""
        names, fence = self._names(), self._fence()
        spare = self.keep - sum(name >= saved for name in names)
        for name in (name for name in names if name < saved):
            superseded = name[:2] == saved[:2]
            if superseded or spare <= 0 or not fence.admits(name):
                with contextlib.suppress(OSError):
                    self._remove(name.text)
            else:
                spare -= 1

    def _remove(self, name: str) -> None:
        """Away at once, by a rename; then file by file."""
        removed = self.folder / (_REMOVED + secrets.token_hex(6))
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder / name, removed)
            _delete(removed)

    def _remove_abandoned(self, name: str, otherwise: bool) -> None:
        """Removes a temporary folder whose lock is free; or, where the file system has no locks, `otherwise`."""
        with _opened(self.folder / name) as file:
            locked = _lock(file)
            if (otherwise if locked is None else locked) and _is_at(file, self.folder / name):
                self._remove(name)

    def _names(self) -> list[_Name]:
        """The checkpoints there are, newest first, usable or not."""
        return sorted((_parse(name) for name in _list(self.folder) if _NAME.fullmatch(name)), reverse=True)

    def _fences(self) -> list[int]:
        found = (_FENCE.fullmatch(name) for name in _list(self.folder))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _fence(self) -> _Fence:
        while fences := self._fences():
            try:
                given = json.loads((self.folder / f"fence-{fences[0]}").read_bytes())
                return _Fence(fences[0], frozenset(given["kept"]))
            except FileNotFoundError:
                continue  # a higher one has replaced it
            except (ValueError, KeyError, TypeError):
                return _Fence(fences[0], None)  # damaged: its name still refuses what is saved from now on
        return _Fence(0, None)


class AsyncSaver:
    """Saves in a thread of its own. One save waits at most: a newer one takes its place.

    An error is raised by the next call, once. The parts must not change afterwards: copies are the caller's duty.
    """

    def __init__(self, store: Store, saved: Callable[[int], None] = lambda step: None) -> None:
        """`saved` is told, in the saver's thread, the step of every checkpoint that is whole on disk."""
        self.store, self._saved = store, saved
        self._change = threading.Condition()
        self._waiting: tuple[int, int, Mapping[str, Part], Mapping[str, Any] | None] | None = None
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._path: Path | None = None
        self._thread = threading.Thread(target=self._run, name="stretto-checkpoint", daemon=True)
        self._thread.start()

    def save(
        self, step: int, generation: int, parts: Mapping[str, Part], meta: Mapping[str, Any] | None = None
    ) -> None:
        """Asks for a save and returns. If an earlier one failed, raises its error and asks for nothing."""
        with self._change:
            self._raise()
            if self._closed:
                raise CheckpointError("the saver is closed")
            self._waiting = (step, generation, parts, meta)
            self._change.notify_all()

    @property
    def busy(self) -> bool:
        with self._change:
            return self._busy or self._waiting is not None

    def wait(self, timeout_s: float | None = None) -> Path | None:
        """Returns when nothing is left to do: the last checkpoint saved here, if any."""
        with self._change:
            if not self._change.wait_for(lambda: not self._busy and self._waiting is None, timeout_s):
                raise TimeoutError(f"the checkpoint was not written within {timeout_s} s")
            self._raise()
            return self._path

    def close(self) -> None:
        """Ends the thread after what was asked for."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
        with self._change:
            self._raise()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while self._next():
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _next(self) -> bool:
        """One save; its parts are let go on return."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._waiting is not None)
            if self._waiting is None:
                return False
            wanted, self._waiting, self._busy = self._waiting, None, True
        try:
            self._path = self.store.save(*wanted)
            self._saved(wanted[0])
        except BaseException as error:
            # A traceback would hold on to the parts: its text is enough.
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            with self._change:
                self._error = error.with_traceback(None)
        return True


class _Sink(io.RawIOBase):
    """Writes to a descriptor, and counts and hashes what goes through."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.size = 0
        self.hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.file >= 0:  # later, it is only a buffer that is thrown away after an error
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                self.hash.update(part)
                while part:
                    part = part[os.write(self.file, part) :]
            self.size += len(view)
        return len(view)


def _write_file(path: Path, part: Part) -> Entry:
    """A new file with this content, synced."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    sink = _Sink(file)
    try:
        if callable(part):
            stream = io.BufferedWriter(sink, _CHUNK)
            part(stream)
            if not stream.closed:
                stream.flush()
        else:
            sink.write(part)
        os.fsync(file)
        return Entry(sink.size, sink.hash.hexdigest())
    finally:
        sink.file = -1
        os.close(file)


def _manifest(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}).encode()


def _load(path: Path, name: _Name) -> Checkpoint:
    """Reads the manifest, and checks all but the contents."""
    try:
        given = json.loads((path / MANIFEST).read_bytes())
        if hashlib.sha256(given["body"].encode()).hexdigest() != given["sha256"]:
            raise ValueError("the checksum does not match")
        body = json.loads(given["body"])
        parts = {part: Entry(*entry) for part, entry in body["parts"].items()}
        found = Checkpoint(path, body["step"], body["generation"], body["meta"], parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST}: {error}") from None
    if (found.step, found.generation) != (name.step, name.generation):
        raise CorruptCheckpoint(f"it is step {found.step} of generation {found.generation}")
    for part, entry in parts.items():
        size = os.stat(path / part).st_size
        if size != entry.size:
            raise CorruptCheckpoint(f"{part}: {size} bytes instead of {entry.size}")
    return found


def _parse(text: str) -> _Name:
    match = cast("re.Match[str]", _NAME.fullmatch(text))
    return _Name(int(match[2]), int(match[1]), int(match[3] or 0), text)


def _list(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _delete(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)
        os.rmdir(folder)


def _sync_folder(folder: Path) -> None:
    with _opened(folder) as file:
        os.fsync(file)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _lock(file: int) -> bool | None:
    """Takes the lock unless somebody has it; None if there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether the folder that was opened is still there under its name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
