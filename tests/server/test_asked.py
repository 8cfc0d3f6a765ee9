"""From a job file to what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.jobs.model import Context, Job
from stretto.server.asked import argv, class_of, command, environment, workdir
from stretto.spec.model import JobFile


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/bin/echo one 'two three'", ("/bin/echo", "one", "two three")),
        (("a", "b c"), ("a", "b c")),
    ],
)
def test_a_line_that_needs_no_shell_gets_none(line: str | tuple[str, ...], words: tuple[str, ...]) -> None:
    assert argv(line, os.environ) == words


@pytest.mark.parametrize(
    "line", ["a | b", "a; b", "echo $HOME", "X=1 a", "exit 3", "cd x", "echo 'not closed", "ls *.py", "a\nb"]
)
def test_a_line_that_needs_a_shell_gets_one(line: str) -> None:
    found = argv(line, os.environ)
    assert found[:2] == ("/bin/sh", "-c")
    assert line in found[2]


def test_python_is_ours_where_there_is_no_other() -> None:
    assert argv("python train.py", {"PATH": "/nowhere"}) == (sys.executable, "train.py")


def test_a_shell_ends_with_the_program_that_was_asked_to_end(tmp_path: Path) -> None:
    """And starts no other."""
    line = f"{sys.executable} -c 'import os, signal; os.kill(os.getppid(), 15)'; echo more"
    done = subprocess.run(argv(line, os.environ), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")


def run(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_setup_runs_once_for_all_workers(tmp_path: Path) -> None:
    file = JobFile.model_validate({"run": "cat made", "setup": "echo setting up; echo it >> made"})
    words = command(file, tmp_path, os.environ)
    workers = [subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = sorted(worker.communicate(timeout=60)[0] for worker in workers)
    assert outputs == ["it\n", "it\n", "it\n", "setting up\nit\n"]


def test_a_setup_that_fails_fails_the_worker_and_is_tried_again(tmp_path: Path) -> None:
    file = JobFile.model_validate({"run": "echo never", "setup": "exit 5"})
    words = command(file, tmp_path, os.environ)
    for _ in range(2):
        assert (run(words).returncode, run(words).stdout) == (5, "")
    several = JobFile.model_validate({"run": "echo never", "setup": "false\ntrue"})
    assert run(command(several, tmp_path, os.environ)).returncode == 1


def test_variables_come_from_server_submitter_and_job_file_in_this_order() -> None:
    file = JobFile.model_validate({"run": "x", "env": {"B": "job"}, "workdir": "sub"})
    job = Job(
        number=7, name="a", user="me", submitted_s=0.0, spec={}, level="rigid",
        context=Context(cwd="/home/me", env={"A": "mine", "B": "mine", "HOME": "/home/me"}),
    )  # fmt: skip
    env = environment(job, file, {"HOME": "/root", "PATH": "/bin", "SECRET": "x", "A": "server"})
    assert (env["A"], env["B"], env["HOME"], env["PATH"], env["STRETTO_JOB"]) == (
        "mine",
        "job",
        "/home/me",
        "/bin",
        "7",
    )
    assert "SECRET" not in env
    assert workdir(job, file) == "/home/me/sub"


@pytest.mark.parametrize(
    "fields", [{"run": "train --fast"}, {"run": ["train", "--fast"]}, {"run": "train", "name": "digits"}]
)
def test_the_class_of_a_stored_job_is_what_it_asked_for(fields: dict[str, object]) -> None:
    file = JobFile.model_validate(fields)
    spec = file.model_dump(mode="json", exclude_unset=True)
    job = Job(number=1, name="x", user="me", submitted_s=0.0, spec=spec, context=Context(cwd="/"), level="rigid")
    assert class_of(job) == file.request("x").klass
