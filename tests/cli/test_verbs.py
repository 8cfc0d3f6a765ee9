"""The verbs of the control plane against a real server: what they print, where, and with which exit code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Server, until
from stretto.cli import main

FOREVER = "run: [sleep, '600']\n"


class Line:
    """The command line of one server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __call__(self, *words: str, text: str | None = None, code: int = 0) -> str:
        done = self.server.stretto(*words, text=text)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        if code:
            assert done.stderr.startswith("error: ")
            return done.stderr
        return done.stdout

    def json(self, *words: str, text: str | None = None) -> Any:
        return json.loads(self(*words, "--json", text=text), parse_constant=pytest.fail)

    def phase(self, ref: str) -> str:
        with self.server.client() as client:
            return client.job(ref).phase


@pytest.fixture(scope="module")
def stretto(server: Server) -> Line:
    return Line(server)


@pytest.fixture
def job(stretto: Line) -> Iterator[str]:
    """The number of a job that runs until it is cancelled."""
    number = stretto("submit", "-q", "-", text=FOREVER).strip()
    until(lambda: stretto.phase(number) == "running")
    yield number
    if stretto.phase(number) in ("running", "suspended", "queued"):
        stretto("cancel", number)


def test_submit_and_look(stretto: Line, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: looked-at\nrun: echo $COLOUR\nlabels: {team: a}\n")
    job = stretto.json("submit", str(file), "--env", "COLOUR=red")
    assert job["name"] == "looked-at"
    until(lambda: stretto.phase("looked-at") == "succeeded")
    assert [each["id"] for each in stretto.json("ps", "-a", "--label", "team=a")] == [job["id"]]
    assert stretto.json("ps", "--name", "looked-*") == [], "it has ended"
    table = stretto("ps", "--all", "--name", "looked-at").splitlines()
    assert table[0].split() == ["JOB", "NAME", "PHASE", "WORKERS", "STEPS", "STEPS/S", "ETA", "AGE", "USER", "NOTE"]
    assert table[1].split()[:4] == [job["id"], "looked-at", "succeeded", "0/1"]
    assert stretto.json("show", "looked-at")["phase"] == "succeeded"
    shown = stretto("show", job["id"])
    assert f"job              {job['id']} (looked-at)\n" in shown
    assert "labels           team=a\n" in shown
    assert stretto("logs", "looked-at") == "red\n"
    assert stretto("logs", "-f", "looked-at") == "red\n"
    assert stretto.json("logs", job["id"]) == {"job": job["id"], "worker": None, "text": "red\n"}
    assert json.loads(stretto("logs", job["id"], "-f", "--json")) == {"worker": "w0", "text": "red\n"}
    kinds = [each["event"]["kind"] for each in stretto.json("events", "looked-at")]
    assert (kinds[0], kinds[-1]) == ("submitted", "ended")
    lines = stretto("events", job["id"]).splitlines()
    assert lines[0].split() == ["EVENT", "WHEN", "JOB", "WHAT"]
    assert lines[-1].endswith("succeeded")


def test_an_empty_list_says_so_beside_the_result(stretto: Line) -> None:
    done = stretto.server.stretto("ps", "--user", "nobody")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no jobs" in done.stderr


def test_submit_with_settings_and_a_wait(stretto: Line, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("run: exit 0\n")
    done = stretto.server.stretto(
        "submit", str(file), "--set", "run=exit 7", "--set", "labels.team=b", "--wait", "--json"
    )
    assert done.returncode == 7
    ended = json.loads(done.stdout)
    assert (ended["phase"], ended["exit_code"], ended["labels"]) == ("failed", 7, {"team": "b"})


def test_a_dry_run_submits_nothing(stretto: Line) -> None:
    told = stretto("submit", "-", "--dry-run", text="name: imagined\nrun: x\nworkers: 2\n")
    assert told.startswith("imagined would be accepted\nstarts ")
    found = stretto.json("submit", "-", "--dry-run", text="name: imagined\nrun: x\n")
    assert found["job"]["name"] == "imagined"
    assert stretto.json("ps", "--all", "--name", "imagined") == []


def test_changes(stretto: Line, job: str) -> None:
    assert stretto("suspend", job) == f"job {job} (job-{job}) is being suspended\n"
    until(lambda: stretto.phase(job) == "suspended")
    assert stretto.json("resume", job)["wish"] == "run"
    until(lambda: stretto.phase(job) == "running")
    assert stretto.json("cancel", job)["wish"] == "cancel"
    until(lambda: stretto.phase(job) == "cancelled")
    assert "has been cancelled" in stretto("cancel", job, code=6)


def test_several_jobs_at_once(stretto: Line, job: str) -> None:
    done = stretto.server.stretto("cancel", "nobody", job)
    assert done.returncode == 5
    assert done.stdout == f"job {job} (job-{job}) is being cancelled\n"
    assert "there is no job 'nobody'" in done.stderr
    assert "no job was given" in stretto("cancel", code=2)


def test_scale(stretto: Line, job: str) -> None:
    assert "rigid" in stretto("scale", job, "1..2", code=6)
    assert "not a number of workers" in stretto("scale", job, "2..1", code=2)
    number = stretto("submit", "-q", "-", text=FOREVER + "elastic: {max: 2}\nlevel: restart\n").strip()
    assert stretto("scale", number, "1..3") == f"job {number} (job-{number}) may have 1..3 workers now\n"
    assert stretto.json("scale", number, "2")["min_workers"] == 2
    stretto("cancel", number)


def test_why(stretto: Line, job: str) -> None:
    found = stretto.json("why", job)
    assert (found["phase"], found["workers"]) == ("running", 1)
    assert stretto("why", job).startswith(f"job {job} (job-{job}) {found['text']}\nworkers  ")


def test_migrate(stretto: Line) -> None:
    number = stretto("submit", "-q", "-", text=FOREVER + "level: restart\n").strip()
    until(lambda: stretto.phase(number) == "running")
    assert "there is no node 'nowhere'" in stretto("migrate", number, "--to", "nowhere", code=5)
    here = stretto.json("show", number)["workers"][0]["node"]
    there = next(node["name"] for node in stretto.json("nodes") if node["name"] != here)
    assert stretto("migrate", number, "--to", there) == f"job {number} (job-{number}) moves to {there}\n"
    stretto("cancel", number)


def test_nodes(stretto: Line, job: str) -> None:
    found = stretto.json("nodes")
    assert [node["devices"] for node in found] == [4, 4]
    name = found[0]["name"]
    assert stretto.json("nodes", "--drain", name, "--within", "10m")[0]["leaves_s"] > 0
    assert stretto.json("nodes", "--drain", name, "--now")[0]["drained"]
    assert "add --drain" in stretto("nodes", "--within", "10m", code=2)
    assert "keep one" in stretto("nodes", "--drain", name, "--within", "10m", "--now", code=2)
    assert stretto.json("nodes", "--drain", name)[0]["drained"]
    assert "drained" in stretto("nodes")
    assert not stretto.json("nodes", "--undrain", name)[0]["drained"]
    assert f"{job} (job-{job})" in stretto("nodes")
    assert "there is no node" in stretto("nodes", "--drain", "nowhere", code=5)


def test_policy(stretto: Line) -> None:
    before = stretto.json("policy", "get")
    assert stretto.json("policy", "set", "tiresias", "--set", "queues=10,20")["name"] == "tiresias"
    assert stretto("policy", "get").splitlines()[0] == "policy     tiresias"
    assert "did you mean 'fifo'" in stretto("policy", "set", "fifoo", code=2)
    assert "queues" in stretto("policy", "set", "tiresias", "--set", "qeues=1", code=2)
    assert "known: " in stretto("policy", "set", "fifo", "--placement", "nowhere", code=2)
    stretto("policy", "set", before["name"], "--placement", before["placement"])
    assert stretto.json("policy", "get") == before


def test_classes(stretto: Line) -> None:
    text = "name: learned\nrun: 'true'\nhyperparameters: {epochs: 3}\n"
    stretto("submit", "--wait", "-", text=text)
    assert stretto("class", "list", "--name", "lear*").splitlines()[1].split()[:2] == ["learned", "1"]
    shown = stretto("class", "show", "learned")
    assert "epochs=3" in shown
    assert stretto.json("class", "show", "learned")["variants"][0]["runs"] == 1
    number = stretto("submit", "-q", "-", text="name: learned\nrun: [sleep, '600']\nexpect: 1h\n").strip()
    assert "(1 earlier run of its class)" in stretto("show", number)
    assert stretto.json("why", number)["facts"]["expected_from"] == "class"
    assert stretto("class", "forget", "learned") == "class learned is forgotten\n"
    assert "(as its job file says)" in stretto("show", number)
    stretto("cancel", number)
    assert "learned" in stretto("class", "show", "learned", code=5)
    assert stretto("class", "show", "..", code=2)


def test_forecast(stretto: Line, job: str) -> None:
    assert job in [str(entry["job"]) for entry in stretto.json("forecast")["items"]]
    assert stretto("forecast").splitlines()[0].split() == ["JOB", "NAME", "PHASE", "WORKERS", "STARTS", "ENDS"]


def test_tokens(stretto: Line) -> None:
    made = stretto.json("token", "create", "ann", "--role", "viewer", "--expires", "1h")
    assert made["secret"]
    assert made["expires_s"] > made["created_s"]
    listed = stretto("token", "list")
    assert made["id"] in listed
    assert made["secret"] not in listed
    environment = {**stretto.server.environment, "STRETTO_SERVER": stretto.server.url, "STRETTO_TOKEN": made["secret"]}
    command = [sys.executable, "-m", "stretto.cli", "submit", "-"]
    refused = subprocess.run(
        command, env=environment, input=FOREVER, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 7, refused.stderr
    stretto("token", "revoke", made["id"])
    assert made["id"] not in [each["id"] for each in stretto.json("token", "list")]
    assert "there is no token" in stretto("token", "revoke", made["id"], code=5)


def test_events_as_they_happen(stretto: Line) -> None:
    number = stretto("submit", "-q", "-", text="run: 'true'\n").strip()
    lines = [json.loads(line) for line in stretto("events", number, "-f", "--json").splitlines()]
    assert (lines[0]["event"]["kind"], lines[-1]["event"]["kind"]) == ("submitted", "ended")
    assert [line["seq"] for line in lines] == sorted({line["seq"] for line in lines})


def test_a_name_that_is_nearly_right(stretto: Line) -> None:
    stretto("submit", "-", text="name: mnist-large\nrun: 'true'\n")
    assert "did you mean 'mnist-large'?" in stretto("show", "mnist-lrage", code=5)
    assert "did you mean" not in stretto("show", "123456", code=5)


@pytest.mark.parametrize(
    ("words", "text", "code", "said"),
    [
        ("submit none.yaml", None, 2, "none.yaml: cannot be read"),
        (
            "submit -",
            "run: a\nworkrs: 2\n",
            2,
            "standard input: line 2, workrs: unknown field; did you mean 'workers'?",
        ),
        ("submit -", "run: [a\n", 2, "line "),
        ("submit -", "", 2, "is empty"),
        ("submit - --set run", "run: a", 2, "not a pair"),
        ("submit - --set run.x=1", "run: a", 2, "run is no section"),
        ("submit - --set workers=none", "run: a", 2, "workers"),
        ("submit - --env NOT_SET_ANYWHERE", "run: a", 2, "no variable 'NOT_SET_ANYWHERE'"),
        ("submit -", "run: a\nworkers: 99\n", 9, "could never be placed here"),
        ("submit -", "run: a\nafter: nobody-yet\n", 5, "no job called 'nobody-yet'"),
        ("run", None, 2, "nothing to run"),
        ("run train.py --workers 0", None, 2, "not a number of workers"),
        ("run train.py --wrokers 1", None, 2, "--wrokers"),
        ("run train.py --memory lots", None, 2, "memory"),
        ("ps --limit 0", None, 2, "above 0"),
        ("ps --phase sleeping", None, 2, "phase"),
        ("ps --label team", None, 2, "not a pair"),
        ("logs 123456", None, 5, "no job '123456'"),
        ("logs 123456 --tail -3", None, 2, "-3"),
        ("events 123456", None, 5, "no job '123456'"),
        ("events --limit 0", None, 2, "1..1000"),
        ("top", None, 2, "needs a terminal"),
        ("token create ann --expires soon", None, 2, "length of time"),
        ("up --nodes 1x1 --slots 1", None, 2, "twice"),
        ("up --port 70000", None, 2, "not a port"),
        ("up --quota ann=many", None, 2, "--quota"),
        ("completion csh", None, 2, "csh"),
    ],
)
def test_bad_input(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    text: str | None,
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv("STRETTO_HOME", str(server.data))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    found = main(words.split())
    out, err = capsys.readouterr()
    assert (found, out) == (code, ""), err
    assert err.startswith("error: ")
    assert said in err


def test_a_second_server_on_the_same_folder(stretto: Line) -> None:
    assert "another server" in stretto("up", "--port", "0", code=10)
    assert "another server" in stretto("up", "-d", "--port", "0", code=10)


def test_a_port_that_is_taken(stretto: Line, tmp_path: Path) -> None:
    port = stretto.server.url.rpartition(":")[2]
    assert port in stretto("up", "-d", "--data", str(tmp_path / "other"), "--port", port, code=10)


def test_up_and_down_in_the_background(tmp_path: Path) -> None:
    stretto = Line(Server(tmp_path / "data"))
    assert "stretto up" in stretto("ps", code=8)
    assert "no server works" in stretto("down", code=5)
    info = stretto.json("up", "-d", "--port", "0", "--slots", "3", "--cold")
    try:
        assert [node["devices"] for node in stretto.json("nodes")] == [3]
        assert info["url"] == json.loads((tmp_path / "data" / "server.json").read_text())["url"]
    finally:
        assert stretto("down") == "the server has ended; jobs that run go on for a while\n"
    assert "no server is known" in stretto("ps", code=8)
    (tmp_path / "data" / "server.json").write_text(json.dumps({"url": info["url"]}))
    assert "no server answers" in stretto("ps", code=8)


@pytest.mark.parametrize("words", ["ps", "show 1", "nodes", "why 1", "events", "policy get", "logs 1", "token list"])
def test_looking_imports_nothing_heavy(stretto: Line, words: str) -> None:
    stretto("submit", "-q", "-", text="run: 'true'\n")
    code = (
        f"import sys; from stretto.cli import main; assert main({words.split()!r}) == 0; print(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=stretto.server.environment, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "stretto.client.sync" in loaded
    heavy = {
        "fastapi", "sqlalchemy", "scipy", "numpy", "pydantic", "torch", "httpx2", "asyncio", "textual", "websockets",
        "yaml", "stretto.core", "stretto.server", "stretto.spec",
    }  # fmt: skip
    assert not loaded & heavy


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(stretto: Line, shell: str) -> None:
    script = stretto("completion", shell)
    for word in ("suspend", "forecast", "--workers"):
        assert word.lstrip("-") in script
