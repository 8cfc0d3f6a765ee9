"""`stretto run` from outside: a real process, real signals, and a terminal where it matters."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from servers import DEADLINE_S, Server, until
from stretto.cli.run import argv, sizes
from stretto.errors import UsageError

STUBBORN = "trap '' TERM; echo begun; while :; do sleep 0.1; done"


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert argv(("train.py", "--lr", "1")) == [sys.executable, "train.py", "--lr", "1"]
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    assert argv(("train.py", "--lr", "1")) == ["python", "train.py", "--lr", "1"]
    assert argv(("mpirun", "x.py")) == ["mpirun", "x.py"]
    with pytest.raises(UsageError):
        argv(())
    assert sizes("3") == {"workers": 3}
    assert sizes("1..4") == {"elastic": {"min": 1, "max": 4}}


def test_a_script_runs_as_if_it_ran_here(server: Server) -> None:
    folder = server.data.parent
    (folder / "train.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['MINE'])\nsys.exit(4)\n")
    done = server.stretto("run", "train.py", "--env", "MINE=x", "--name", "trained", "--", "--epochs", "3")
    assert (done.returncode, done.stdout) == (4, "['--epochs', '3'] x\n")
    assert "(trained) failed" in done.stderr
    assert "exit code 4" in done.stderr


def test_the_logs_of_several_workers_are_told_apart(server: Server) -> None:
    done = server.stretto("run", "--workers", "2", "--", "sh", "-c", "echo rank $RANK; printf end")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["w0 | end", "w0 | rank 0", "w1 | end", "w1 | rank 1"]


def test_json_is_one_object_a_line(server: Server) -> None:
    import json

    done = server.stretto("run", "--json", "--", "echo", "hello")
    *pieces, last = map(json.loads, done.stdout.splitlines())
    assert "".join(piece["text"] for piece in pieces) == "hello\n"
    assert last["job"]["phase"] == "succeeded"


def test_detached(server: Server) -> None:
    done = server.stretto("run", "-d", "--name", "left-alone", "--", "sleep", "600")
    assert done.stdout.endswith("(left-alone) submitted\n")
    with server.client() as client:
        assert client.cancel("left-alone").name == "left-alone"


def begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"


def test_ctrl_c_cancels(server: Server) -> None:
    process = server.begin("run", "--name", "interrupted", "--", "sh", "-c", "echo begun; exec sleep 600")
    begun(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert "(interrupted) was cancelled" in err
    with server.client() as client:
        assert client.job("interrupted").phase == "cancelled"


def test_ctrl_c_twice_does_not_wait_for_the_end(server: Server) -> None:
    process = server.begin("run", "--name", "stubborn", "--grace", "5m", "--", "sh", "-c", STUBBORN)
    begun(process)
    process.send_signal(signal.SIGINT)
    with server.client() as client:
        until(lambda: client.job("stubborn").wish == "cancel")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, err
        job = client.job("stubborn")
        assert (job.phase, job.wish) == ("running", "cancel"), "it has its grace"
        os.kill(job.workers[0]["pid"], signal.SIGKILL)
        assert client.wait("stubborn", timeout_s=DEADLINE_S).phase == "cancelled"


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, server: Server, *words: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        self.process = server.begin(*words, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.shown = ""

    def reads(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self.master, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self.master)


def test_at_a_terminal_it_asks_first(server: Server) -> None:
    terminal = Terminal(server, "run", "--name", "asked", "--", "sh", "-c", "echo begun; exec sleep 600")
    terminal.reads("begun")
    terminal.reads("asked: running · 1/1 workers")
    terminal.process.send_signal(signal.SIGINT)
    terminal.reads("[c]ancel it, or [d]etach")
    os.write(terminal.master, b"d\n")
    terminal.reads("goes on; `stretto logs -f")
    assert terminal.process.wait(DEADLINE_S) == 130
    terminal.close()
    with server.client() as client:
        assert client.job("asked").wish == "run"
        client.cancel("asked")


def test_at_a_terminal_ctrl_c_twice_cancels(server: Server) -> None:
    terminal = Terminal(server, "run", "--name", "insisted", "--", "sh", "-c", "echo begun; exec sleep 600")
    terminal.reads("begun")
    terminal.process.send_signal(signal.SIGINT)
    terminal.reads("[c]ancel it, or [d]etach")
    terminal.process.send_signal(signal.SIGINT)
    terminal.reads("was cancelled")
    assert terminal.process.wait(DEADLINE_S) == 130
    terminal.close()


def test_a_restart_of_the_server_is_not_noticed(server: Server, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"echo begun; while [ ! -e '{go}' ]; do sleep 0.05; done; echo over"
    process = server.begin("run", "--name", "outlives", "--", "sh", "-c", script)
    begun(process)
    server.kill()
    server.start()
    go.touch()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "over\n"), err


def test_ctrl_c_works_while_the_server_is_away(server: Server) -> None:
    process = server.begin("run", "--name", "deserted", "--", "sh", "-c", "echo begun; exec sleep 600")
    begun(process)
    server.kill()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert "no server answers" in err
    server.start()
    with server.client() as client:
        assert client.cancel("deserted").wish == "cancel"


def test_following_ends_quietly_with_ctrl_c(server: Server) -> None:
    process = server.begin("events", "-f", "-n", "1")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
