"""A worker, however it is started: its group, its status, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from living import alive, wait_until

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import Process, launch
from stretto.errors import UsageError

PYTHON = sys.executable


@pytest.fixture(params=["forked", "plain"])
def warm(request: pytest.FixtureRequest, bare: ForkServer) -> ForkServer | None:
    return bare if request.param == "forked" else None


def start(tmp_path: Path, text: str, warm: ForkServer | None) -> Process:
    (tmp_path / "script.py").write_text(text)
    process = launch([PYTHON, "script.py"], cwd=tmp_path, log=tmp_path / "log", warm=warm)
    assert process.how == ("plain" if warm is None else "forked"), process.why
    return process


def said(tmp_path: Path) -> str:
    log = tmp_path / "log"
    wait_until(lambda: log.read_text().endswith("\n"))
    return log.read_text().strip()


FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)\n"


def test_it_runs_in_a_group_of_its_own_and_its_status_comes_back(tmp_path: Path, warm: ForkServer | None) -> None:
    process = start(tmp_path, "import os, sys\nprint(os.getpid(), os.getpgrp(), os.getsid(0))\nsys.exit(3)", warm)
    assert process.wait(60.0) == 3
    assert process.poll() == process.exit_status == 3
    assert process.fileno() == -1
    assert said(tmp_path).split() == [str(process.pid)] * 3
    process.kill()
    process.close()


def test_it_can_be_asked_and_forced_to_end(tmp_path: Path, warm: ForkServer | None) -> None:
    for end, number in ((Process.terminate, signal.SIGTERM), (Process.kill, signal.SIGKILL)):
        with start(tmp_path, FOREVER, warm) as process:
            said(tmp_path)
            assert process.poll() is None
            with pytest.raises(TimeoutError):
                process.wait(0.0)
            end(process)
            assert process.wait(60.0) == -number
        (tmp_path / "log").unlink()


def test_what_is_left_of_its_group_is_killed(tmp_path: Path, warm: ForkServer | None) -> None:
    child = (
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
    )
    process = start(tmp_path, child, warm)
    assert process.wait(60.0) == 0
    wait_until(lambda: not alive(int(said(tmp_path))))


def test_a_signal_reaches_the_worker_and_not_its_children(tmp_path: Path, warm: ForkServer | None) -> None:
    process = start(
        tmp_path,
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(10 if child.poll() is None else 11))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.01)\n",
        warm,
    )
    said(tmp_path)
    process.terminate()
    assert process.wait(60.0) == 10


def test_a_thread_that_launched_it_may_end(tmp_path: Path, warm: ForkServer | None) -> None:
    processes: list[Process] = []
    thread = threading.Thread(target=lambda: processes.append(start(tmp_path, FOREVER, warm)))
    thread.start()
    thread.join()
    with processes[0] as process:
        said(tmp_path)
        assert process.poll() is None


def test_many_at_once(tmp_path: Path, warm: ForkServer | None) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    processes = [launch([PYTHON, "script.py", str(n)], cwd=tmp_path, warm=warm) for n in range(12)]
    assert [process.wait(60.0) for process in processes] == list(range(12))


def test_any_program_can_be_started(tmp_path: Path, bare: ForkServer) -> None:
    with launch(
        ["sh", "-c", "echo $HERE; exit 4"], env=os.environ | {"HERE": "x"}, log=tmp_path / "log", warm=bare
    ) as it:
        assert it.wait(60.0) == 4
    assert it.how == "plain"
    assert "sh is not the interpreter" in it.why
    assert said(tmp_path) == "x"


def test_the_log_is_added_to(tmp_path: Path) -> None:
    for _ in range(2):
        with launch(["sh", "-c", "echo out; echo err >&2"], log=tmp_path / "log") as process:
            process.wait(60.0)
    assert (tmp_path / "log").read_text() == "out\nerr\n" * 2


def test_what_cannot_be_started_is_said_at_once(tmp_path: Path) -> None:
    for command, cwd in (
        (["no-such-program"], tmp_path),
        (["./script.py"], tmp_path),
        ([], tmp_path),
        (["sh"], "/nowhere"),
    ):
        with pytest.raises(UsageError, match="there is no"):
            launch(command, cwd=cwd)
