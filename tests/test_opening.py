"""What a job can replace is opened by `jobfiles` alone: whoever opens something else says here what it is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "stretto"
PARTS = ("api", "backends", "control", "server", "store")

NAMES = frozenset({"open", "listdir", "scandir", "walk", "fwalk", "rmtree", "copytree", "mkdir", "makedirs", "touch"})
METHODS = frozenset({"read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "FileIO"})

ALLOWED: dict[str, dict[str, tuple[int, str]]] = {
    "api/process.py": {
        "data.mkdir": (1, "the data directory"),
        "os.makedirs": (1, "the data directory"),
        "open": (1, "a pipe of ours"),
        "os.open": (1, "/dev/null"),
    },
    "api/tightening.py": {"mkdir": (1, "folders of ours in the data directory")},
    "backends/local/backend.py": {
        "open": (2, "a descriptor of `jobfiles`, and /dev/null"),
        "os.makedirs": (1, "the folder of a log that is none of a job's"),
    },
    "backends/local/containment.py": {
        "open": (10, "/proc and control groups"),
        "os.open": (1, "control groups"),
        "os.mkdir": (3, "control groups"),
        "os.listdir": (4, "/proc and control groups"),
        "os.scandir": (1, "control groups"),
    },
    "backends/local/forkhost.py": {
        "open": (6, "as the worker's own user, before there is a worker"),
        "os.listdir": (2, "/proc"),
        "os.open": (1, "/dev/null"),
        "os.makedirs": (1, "the cache of whoever it is"),
        "shutil.rmtree": (1, "the fork server's own folder"),
    },
    "backends/local/forkserver.py": {
        "open": (5, "a new folder of ours, memfds and /proc"),
        "os.scandir": (2, "folders of packages; nothing in them is opened"),
        "cache.mkdir": (1, "the cache of whoever owns the interpreter"),
        "shutil.rmtree": (1, "that folder"),
    },
    "backends/local/gpus.py": {"root.glob": (2, "/sys"), "read_text": (2, "/sys")},
    "backends/local/launch.py": {"open": (2, "for whoever starts a process in a library's way; not the server")},
    "backends/local/machine.py": {"open": (1, "/proc")},
    "backends/local/runs.py": {
        "data.mkdir": (1, "the data directory"),
        "self.folder.mkdir": (1, "the folder of all launches"),
        "path.mkdir": (1, "a new launch's own; that it is there already is an error"),
    },
    "backends/local/supervisor.py": {
        "open": (5, "descriptors, and /proc"),
        "os.open": (5, "/dev/null, the server's lock, a new file that replaces another, and a folder"),
    },
    "control/coordination.py": {"options.token_file.read_text": (1, "named by whoever starts it by hand")},
    "control/journal.py": {"open": (2, "descriptors of `jobfiles`"), "os.open": (1, "a folder, to sync it")},
    "server/disk.py": {"os.scandir": (1, "a descriptor of `jobfiles`; in a thread of its own, a slice at a time")},
    "server/load.py": {"open": (1, "/proc")},
    "server/saves.py": {"os.scandir": (1, "bounded; in a thread of its own; nothing is opened but folders")},
    "store/sqlite.py": {
        "os.open": (2, "the store's own"),
        "path.open": (1, "the store's own"),
        "self._path.parent.mkdir": (1, "the store's own"),
    },
}


def called(path: Path) -> Iterator[str]:
    """What of it opens or makes something by a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        by_name = name == "open" or (last in NAMES and name.startswith(("os.", "shutil.")))
        of_path = last in METHODS or last in {"mkdir", "touch"} or (last == "open" and _has_a_mode(node))
        if (by_name or of_path) and not name.startswith("jobfiles."):
            yield name if "(" not in name else last


def _has_a_mode(node: ast.Call) -> bool:
    """As methods of paths have it, and others that are called `open` have not."""
    given = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
    return any(isinstance(value, ast.Constant) and str(value.value).strip("rwabxt+") == "" for value in given)


def test_nothing_is_opened_in_another_way() -> None:
    found = {
        str(path.relative_to(SOURCES)): Counter(called(path))
        for part in PARTS
        for path in sorted((SOURCES / part).rglob("*.py"))
    }
    found = {name: calls for name, calls in found.items() if calls}
    known = {name: Counter({call: count for call, (count, _) in calls.items()}) for name, calls in ALLOWED.items()}
    new = {name: rest for name, calls in found.items() if (rest := calls - known.get(name, Counter()))}
    assert not new, f"use `stretto.jobfiles`, or say in ALLOWED what it is: {new}"
    gone = {name: rest for name, calls in known.items() if (rest := calls - found.get(name, Counter()))}
    assert not gone, f"no longer there: {gone}"


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "open(x)\nos.open(x, 0)\n(a / b).read_text()\na.open('rb')\nwebbrowser.open(x)\nasyncio.open_connection(x)\n"
        "shutil.rmtree(x)\nself.book.open()\njobfiles.read(x, 1)\nfor e in a.iterdir(): pass\n"
    )
    assert sorted(called(path)) == ["a.iterdir", "a.open", "open", "os.open", "read_text", "shutil.rmtree"]
