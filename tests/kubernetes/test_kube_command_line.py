"""Commands of containers: run for real, told to end for real. Kubernetes' own replacement is played by a function."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.kubernetes.command_line import container_command, literally, set_up_first

DEADLINE_S = 60.0
LEAVES = """\
import signal, sys
def leave(number, frame):
    print("leaving", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    signal.pause()
"""


def expanded(text: str) -> str:
    """As the kubelet has it: `$$` is a dollar, `$(NAME)` a variable; a name that is not known stays."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda match: "$" if match[0] == "$$" else "REPLACED", text)


def started(command: list[str]) -> subprocess.Popen[str]:
    words = [expanded(word) for word in command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


def outcome(command: list[str]) -> tuple[int, str]:
    with started(command) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out


def test_a_plain_line_needs_no_shell() -> None:
    assert container_command("python train.py --lr 0.1 'a b'") == ["python", "train.py", "--lr", "0.1", "a b"]
    assert container_command(("python", "a b", "$X")) == ["python", "a b", "$$X"]


@pytest.mark.parametrize("line", ["cd /x", "A=1 python x", "a | b", "echo $A", "a 'open", "exec python x", "# nothing"])
def test_what_a_shell_alone_understands_gets_one(line: str) -> None:
    assert container_command(line)[:2] == ["/bin/sh", "-c"]


@pytest.mark.parametrize(
    ("line", "status", "out"),
    [
        ("echo a && echo b", 0, "a\nb\n"),
        ("echo a; exit 7", 7, "a\n"),
        ("false || exit 3", 3, ""),
        ("echo $((1 + 1)) # said", 0, "2\n"),
        ("A=1; echo $A$(echo x)", 0, "1x\n"),
        ("cat <<END\n$(echo y)\nEND", 0, "y\n"),
        ("exec echo gone", 0, "gone\n"),
        ("kill -9 $(sh -c 'echo $PPID')", 137, ""),
    ],
)
def test_a_line_does_what_it_does_in_a_shell(line: str, status: int, out: str) -> None:
    assert outcome(container_command(line)) == (status, out)


def test_setup_comes_first_and_its_failure_is_the_end() -> None:
    assert outcome(container_command("echo run", "echo setup")) == (0, "setup\nrun\n")
    assert outcome(container_command(("echo", "a b"), "echo setup")) == (0, "setup\na b\n")
    assert outcome(container_command("echo run", "echo setup; exit 4")) == (4, "setup\n")


def test_setup_before_a_command_of_kubernetes() -> None:
    assert outcome(set_up_first("echo setup", ["echo", "a b", "$(NAME)", "*"])) == (0, "setup\na b REPLACED *\n")


def test_the_program_is_told_to_end_and_nothing_else_is_started(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    with started(container_command(f"true; {sys.executable} {script}; echo never")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == "leaving\n"
    assert process.returncode == 143


def test_a_program_that_leaves_is_waited_for(tmp_path: Path) -> None:
    gate, script = tmp_path / "gate", tmp_path / "leaves.py"
    os.mkfifo(gate)
    script.write_text(LEAVES.replace("    sys.exit", f"    open({str(gate)!r}).read()\n    sys.exit"))
    with started(container_command(f"A=1; exec {sys.executable} {script}")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "leaving\n"
        assert process.poll() is None
        gate.write_text("go")
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 5


@given(st.text(max_size=30))
def test_kubernetes_replaces_nothing(text: str) -> None:
    assert expanded(literally(text)) == text
