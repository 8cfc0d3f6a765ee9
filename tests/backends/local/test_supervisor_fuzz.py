"""What lies in a run directory may be anything by now: who reads it is told nothing, or something that makes sense."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_runs import made

from stretto.backends.local import supervisor
from stretto.backends.local.backend import _report
from stretto.backends.local.runs import BOOT, Runs

SHORT = settings(max_examples=60, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=15, suppress_health_check=list(HealthCheck))

NAMES = st.sampled_from(
    ["pid", "start", "worker", "worker_start", "how", "status", "text", "at_s", "asked", "never", "tree", "box", "mark",
     "log", "env", "command", "cwd", "groups", "refused", "passing"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
    | st.sampled_from(["exited", "lost", 10**30, -1, 1 << 31, 0, "\ud800", "/proc/self"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
WRITTEN = (
    st.binary(max_size=200)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(NAMES, VALUES, max_size=8).map(lambda words: json.dumps(words).encode())
    | st.sampled_from([b"[" * 100_000, b'{"pid":' * 50_000, b"9" * 10_000, b"\0" * 4096])
)


def nobody(data: bytes) -> bool:
    """Whether it names no process: by chance it might be somebody's, who would be killed."""
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        return True
    return not (isinstance(words, dict) and words.keys() & {"pid", "worker", "tree"})


@SHORT
@given(running=WRITTEN, exit=WRITTEN, tree=WRITTEN.filter(nobody), launch=WRITTEN)
def test_whatever_is_written_there_a_server_makes_sense_of_it(
    running: bytes, exit: bytes, tree: bytes, launch: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = made(Path(folder))
        path = runs.path("a")
        (path / supervisor.RUNNING).write_bytes(running)
        (path / supervisor.EXIT).write_bytes(exit)
        found = runs.exit("a")
        assert found is None or (0 <= found.status <= 255 and math.isfinite(found.at_s))
        runs.running("a")
        if found is None:
            (path / supervisor.RUNNING).write_bytes(running if nobody(running) else b"{}")
            (path / supervisor.TREE).write_bytes(tree)
            (path / supervisor.LAUNCH).write_bytes(launch if b'"box"' not in launch else b"{}")
            ended = runs.give_up("a", 5.0)
            assert ended is not None
            assert ended.how == "lost"
            assert runs.exit("a") == ended
        runs.remove("a")
        assert os.listdir(runs.folder) == []


@SHORT
@given(WRITTEN)
def test_whatever_a_supervisor_reports(line: bytes) -> None:
    word = _report(line)
    assert type(word.get("pid", 0)) is int
    assert isinstance(word.get("refused", ""), str)


@FEW
@given(WRITTEN)
def test_a_supervisor_with_whatever_launch_starts_nothing_or_says_why_and_ends(launch: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.mkdir()
        (path / supervisor.LAUNCH).write_bytes(launch)
        here = str(Path(supervisor.__file__).parent)
        command = [sys.executable, "-I", "-S", "-c", BOOT, here, str(path), "1", "why"]
        done = subprocess.run(command, capture_output=True, timeout=60, start_new_session=True)
        assert done.returncode in (0, 1)


@FEW
@given(st.lists(st.binary(max_size=30).filter(lambda said: b"terminate" not in said and b"kill" not in said)))
def test_a_supervisor_obeys_no_order_that_is_none(orders: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        path = made(Path(folder)).path("a")
        words = supervisor.read(str(path), supervisor.LAUNCH)
        assert words is not None
        words |= {"command": ["sleep", "1000"], "log": str(path / "log"), "log_bytes": 1 << 20, "away_s": 600.0}
        supervisor.write(str(path), supervisor.LAUNCH, {**words, "env": {"PATH": os.environ["PATH"]}})
        here = str(Path(supervisor.__file__).parent)
        command = [sys.executable, "-I", "-S", "-c", BOOT, here, str(path), "1", "why"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            assert _report(process.stdout.readline())["pid"]
            for order in orders:
                with open(path / supervisor.ORDERS, "ab") as file:
                    file.write(order + b"\n")
                process.send_signal(supervisor.WAKE)
            runs.order("a", "kill")
            process.send_signal(supervisor.WAKE)
            assert process.wait(60) == 0
        exit = runs.exit("a")
        assert exit is not None
        assert (exit.how, exit.status, exit.asked) == ("signalled", signal.SIGKILL, True)
