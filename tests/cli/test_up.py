"""`stretto up` says what its slots are, and what is wrong with its options."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from made_up_nvml import put
from servers import until
from stretto.cli import main
from stretto.cli.server import quotas_of
from stretto.client import Client
from stretto.errors import UsageError
from stretto.server.view import Quota


def test_cpu_slots_on_a_machine_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", "GPU-2")))
    data = ["--data", str(tmp_path / "data")]
    assert main(["up", "-d", "--port", "0", "--cpu", "--slots", "3", *data]) == 0
    try:
        assert ": 3 CPU slots (--cpu)" in capfd.readouterr().out
        assert main(["nodes", *data]) == 0
        assert capfd.readouterr().out.splitlines()[1].split()[:3] == ["local", "cpu", "0/3"]
    finally:
        assert main(["down", *data]) == 0


def test_more_gpus_than_there_are_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", "GPU-2")))
    assert main(["up", "-d", "--port", "0", "--nodes", "1x2", "--data", str(tmp_path / "data")]) == 2
    said = capfd.readouterr().err
    assert "1 nodes of 2 GPUs cannot be made of 1 h200" in said
    assert "`--cpu` uses the processor instead" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a=-1"], "-1 devices"),
        (["a=nan"], "nan devices"),
        (["a=1e400"], "inf devices"),
        (["a=1,-2"], "-2 jobs"),
        (["a=1", "a=2"], "twice for a"),
        (["a="], "sets no limit"),
        (["=1"], "whose"),
        ([""], "whose"),
        (["a=1,2,3"], "cannot be understood"),
    ],
)
def test_quotas_that_cannot_be(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        quotas_of(given)
    assert error.value.hint


def test_quotas() -> None:
    assert quotas_of(["a=2", "b=0.5,3", "*=,7"]) == {"a": Quota(2.0), "b": Quota(0.5, 3), "*": Quota(jobs=7)}


@pytest.mark.parametrize("command", ["up", "controller"])
@pytest.mark.parametrize("file", ["nowhere/record.jsonl", "folder", "record.jsonl.gz", "/proc/version", "/proc/new"])
def test_a_record_that_cannot_be_written_is_told_at_once(
    command: str, file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    more = ["--data", str(tmp_path / "data")] if command == "up" else []
    assert main([command, "--port", "0", "--record", str(tmp_path / file), *more]) == 2
    said = capfd.readouterr().err
    assert str(tmp_path / file) in said
    assert "hint" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ana:s3cret@host/db", "postgres://ana:s3cret@/db", "postgresql://host/db?password=s3cret",
        "postgresql+psycopg://ana:s3cret@host:1/db", "postgresql://host/db?sslmode=require&sslpassword=s3cret",
        "postgresql://ana:s3cret@[host/db",
    ],
)  # fmt: skip
def test_a_password_in_an_argument_is_refused(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--db", url, "--data", str(tmp_path / "data")]) == 2
    said = capfd.readouterr().err
    assert "--db-file" in said
    assert "STRETTO_DATABASE" in said
    assert "s3cret" not in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("contents", ["", "a\nb", None])
def test_a_file_that_holds_no_database(contents: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if contents is not None:
        (tmp_path / "db").write_text(contents)
    assert main(["up", "--db-file", str(tmp_path / "db"), "--data", str(tmp_path / "data")]) == 2
    assert str(tmp_path / "db") in capfd.readouterr().err


@pytest.mark.parametrize("how", ["file", "variable"])
def test_nobody_else_sees_the_password(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in the arguments nor in the variables of the server, its supervisors and its workers."""
    url = f"sqlite:///{tmp_path}/elsewhere.db?password=s3cret-{how}"
    data = ["--data", str(tmp_path / "data")]
    given: list[str] = []
    if how == "file":
        (tmp_path / "db").write_text(url + "\n")
        given = ["--db-file", str(tmp_path / "db")]
    else:
        monkeypatch.setenv("STRETTO_DATABASE", url)
    assert main(["up", "-d", "--port", "0", "--cpu", "--slots", "2", *given, *data]) == 0
    try:
        assert (tmp_path / "elsewhere.db").exists()
        assert main(["run", *data, "-d", "--", "sleep", "600"]) == 0
        with Client(data=tmp_path / "data") as client:
            until(lambda: [job for job in client.jobs(phase="running") if job.workers and job.workers[0]["pid"]])
        told = _told()
        mine = [words for words in told if str(tmp_path).encode() in words]
        assert len(mine) > 1
        assert [words for words in told if f"s3cret-{how}".encode() in words] == []
    finally:
        assert main(["down", "--cancel-jobs", *data]) == 0


def _told() -> list[bytes]:
    """The arguments and variables of every other process."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                found.append((process / "cmdline").read_bytes() + (process / "environ").read_bytes())
    return found
