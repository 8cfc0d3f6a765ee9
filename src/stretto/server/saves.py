"""What a job has saved: when the newest of its files was written that can be a checkpoint.

By their names do not count: hidden files and folders, those that are still to be renamed, and what scripts write beside
their checkpoints (logs, tables, metrics, events of TensorBoard). A file that was written a moment ago may not be whole.

Dates come from file systems, which read the machine's clock; it may be set at any time, so a date is read once, when it
is first seen. A clock that is ahead, `touch` and unpacked archives make files of the future: such a file was written
when it was first seen with its date; one that was there from the beginning does not count.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_MOST_FILES = 10_000
_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", ".lock", "~")
_NOTES = (".log", ".txt", ".out", ".err", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".md", ".wandb")
_NOTES_WITHIN = ("tfevents", ".log.")
_OTHER_FOLDERS = ("__pycache__", "wandb", "mlruns")


class Saves:
    """One folder, looked at again and again, in any thread."""

    def __init__(
        self, folder: Path, clock: Callable[[], float], heard: Callable[[float], float] = lambda at_s: at_s
    ) -> None:
        """`heard`: what the machine's clock says, as `clock` has it."""
        self._folder, self._clock, self._heard = folder, clock, heard
        self._known: dict[str, tuple[float, float]] = {}
        """Files: their date, and when they were written."""
        self._looked = False
        self._lock = threading.Lock()

    def newest_s(self, at_rest_s: float = 0.0) -> float:
        """When the newest was written of those that nobody has written to for so long; 0: there is none."""
        with self._lock:
            now_s, before, self._known = self._clock(), self._known, {}
            written = [self._written_s(path, dated_s, before, now_s) for path, dated_s in _files(self._folder)]
            self._looked = True
        return max((written_s for written_s in written if written_s <= now_s - at_rest_s), default=0.0)

    def _written_s(self, path: str, dated_s: float, before: dict[str, tuple[float, float]], now_s: float) -> float:
        if path not in before or before[path][0] != dated_s:
            before[path] = dated_s, self._seen_first(self._heard(dated_s), now_s)
        self._known[path] = before[path]
        return before[path][1]

    def _seen_first(self, at_s: float, now_s: float) -> float:
        """When one was written that is dated so and is seen now; 0: in the future, before anybody looked."""
        if at_s <= now_s:
            return at_s
        return now_s if self._looked else 0.0


def _files(folder: Path) -> Iterator[tuple[str, float]]:
    """Those that can be checkpoints, each with its date."""
    seen = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _counts(name) and name not in _OTHER_FOLDERS]
        for name in names:
            seen += 1
            if seen > _MOST_FILES:
                return
            if not _counts(name):
                continue
            file = os.path.join(path, name)
            try:
                yield file, os.stat(file).st_mtime
            except OSError:
                # It was renamed or removed meanwhile.
                continue


def _counts(name: str) -> bool:
    name = name.lower()
    return not (
        name.startswith(".") or name.endswith((*_UNFINISHED, *_NOTES)) or any(part in name for part in _NOTES_WITHIN)
    )
