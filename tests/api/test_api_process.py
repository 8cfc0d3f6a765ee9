"""The server as a process: who may have a data directory, how it comes and goes, what survives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from api_client import Api, alive_in, api_of, eventually, kill, options, serving

from disks import deep_below
from made_up_nvml import put
from stretto.api.process import Info, down, running, serve
from stretto.errors import NotFound, StrettoError


def test_a_second_server_is_told_who_is_there(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        info = running(tmp_path)
        assert info is not None
        with pytest.raises(StrettoError) as refused:
            serve(options(tmp_path), detach=True)
        assert (refused.value.code, refused.value.exit_code) == ("occupied", 10)
        assert str(info.pid) in refused.value.message
        assert info.url in refused.value.message
        assert api.get("/readyz").status == 200
        assert running(tmp_path) == info


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StrettoError) as refused:
        serve(options(tmp_path, port=taken.getsockname()[1]), detach=True)
    assert (refused.value.code, refused.value.exit_code) == ("occupied", 10)
    assert "--port" in refused.value.hint
    assert running(tmp_path) is None
    eventually(lambda: not alive_in(tmp_path))


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"nodes": "x"}, "usage"), ({"host": "203.0.113.1"}, "usage"), ({"policy": "none"}, "usage"),
     ({"port": 70000}, "usage"), ({"store": "/proc/nothing/db"}, "store-unreachable")],
)  # fmt: skip
def test_what_cannot_work_is_said_and_nothing_is_left(tmp_path: Path, changes: dict[str, object], code: str) -> None:
    with pytest.raises(StrettoError) as refused:
        serve(options(tmp_path, **changes), detach=True)
    assert refused.value.code == code
    assert refused.value.hint
    assert running(tmp_path) is None
    eventually(lambda: not alive_in(tmp_path))


def test_a_corrupted_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "stretto.db").write_bytes(b"not a database, however long one looks at it" * 100)
    with pytest.raises(StrettoError) as refused:
        serve(options(tmp_path), detach=True)
    assert (refused.value.code, refused.value.exit_code) == ("store-corrupted", 21)


def test_kill_and_restart_keep_everything(tmp_path: Path) -> None:
    """Jobs, their workers, the token, the port."""
    work = tmp_path / "work"
    work.mkdir()
    data = tmp_path / "data"
    with serving(data) as api:
        running_job = api.submit(f"echo begun; until [ -e {work}/go ]; do sleep 0.02; done; echo ended", workers=4)
        started = api.until(running_job["id"], "running")
        waiting = [api.submit("true", name=f"waiting-{number}", workers=4) for number in range(5)]
        eventually(lambda: api.job(running_job["id"])["workers"][0]["pid"])
        before = kill(data)
        assert running(data) is None
        serve(options(data, port=None), detach=True)
        again = api_of(data)
        assert (again.url, again.token) == (api.url, api.token)
        assert again.url == before.url
        found = again.job(running_job["id"])
        assert (found["phase"], found["started_s"]) == ("running", started["started_s"])
        assert {again.job(job["id"])["phase"] for job in waiting} == {"queued"}
        (work / "go").touch()
        for job in (running_job, *waiting):
            assert again.until(job["id"], "succeeded", "failed")["phase"] == "succeeded"
        assert again.job(running_job["id"])["starts"] == 1
        assert again.get(f"/v1/jobs/{running_job['id']}/logs", worker="w0").text == "begun\nended\n"


def test_a_clean_end_lets_workers_go_on(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    data = tmp_path / "data"
    with serving(data) as api:
        job = api.submit(f"until [ -e {work}/go ]; do sleep 0.02; done; touch {work}/done")
        api.until(job["id"], "running")
        eventually(lambda: api.job(job["id"])["workers"][0]["pid"])
        down(data)
        assert running(data) is None
        assert not (data / "server.json").exists()
        (work / "go").touch()
        eventually((work / "done").exists)
        serve(options(data, port=None), detach=True)
        assert api_of(data).until(job["id"], "succeeded", "failed")["phase"] == "succeeded"


TRAINING = """
import os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.batches(TensorDataset(torch.randn(64, 4)), size=16, epochs=10**6):
    optimizer.zero_grad(); model(batch[0]).square().mean().backward(); optimizer.step()
    if os.path.exists("go"):
        job.stop()
    time.sleep(0.02)
"""


def test_a_clean_end_puts_no_worker_out(tmp_path: Path) -> None:
    """The connections to the workers close one after the other, and none of them has died of that."""
    work, data = tmp_path / "work", tmp_path / "data"
    work.mkdir()
    (work / "train.py").write_text(TRAINING)
    with serving(data) as api:
        elastic = {"min": 3, "max": 3}
        job = api.submit(f"cd {work} && exec {sys.executable} train.py", elastic=elastic, env={"OMP_NUM_THREADS": "1"})
        eventually(lambda: api.job(job["id"])["steps"])
        down(data)
        serve(options(data, port=None), detach=True)
        again = api_of(data)
        before = again.job(job["id"])["steps"]
        eventually(lambda: again.job(job["id"])["steps"] > before)
        (work / "go").touch()
        assert again.until(job["id"], "succeeded", "failed")["phase"] == "succeeded"
        told = again.get(f"/v1/jobs/{job['id']}/events").text
        assert '"status":75' not in told
        assert '"w3"' not in told, "nobody had to be replaced"


def test_down_can_cancel_all_jobs(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        for _ in range(3):
            api.submit("sleep 600", workers=2)
        api.until("1", "running")
        down(tmp_path, cancel_jobs=True)
        eventually(lambda: not alive_in(tmp_path))
    with serving(tmp_path) as again:
        assert [job["phase"] for job in again.get("/v1/jobs").json["items"]] == ["cancelled"] * 3
    with pytest.raises(NotFound):
        down(tmp_path)


def test_streams_end_with_the_server(tmp_path: Path) -> None:
    """A listener does not hold up the end."""
    with serving(tmp_path) as api:
        host, _, port = api.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as listener:
            head = ["GET /v1/events/stream HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {api.token}"]
            listener.sendall("\r\n".join([*head, "", ""]).encode())
            assert b"200 OK" in listener.recv(65536)
            down(tmp_path)
            while listener.recv(65536):
                pass


def test_in_the_foreground_with_signals(tmp_path: Path) -> None:
    code = (
        "import sys, msgspec\n"
        "from stretto.api.process import *\n"
        "serve(msgspec.json.decode(sys.argv[1], type=Options), ready=lambda info: print(info.url, flush=True))\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-c", code, msgspec.json.encode(options(tmp_path)).decode()],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            url = process.stdout.readline().strip()
            info = running(tmp_path)
            assert info is not None
            assert (info.url, info.pid) == (url, process.pid)
            process.send_signal(number)
            assert process.wait(30) == 0
        assert running(tmp_path) is None


def test_the_token_is_made_anew_when_it_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        first = api.token
    (tmp_path / "token").unlink()
    with serving(tmp_path) as again:
        assert again.token != first
        assert again.get("/v1/tokens").status == 200
        assert again.as_(first).get("/v1/tokens").status == 200


def test_ended_jobs_are_forgotten_in_time(tmp_path: Path) -> None:
    with serving(tmp_path, retention_s=1.0) as api:
        job = api.submit("echo soon forgotten")
        kept = api.submit("sleep 600")
        api.until(job["id"], "succeeded")
        eventually(lambda: api.get(f"/v1/jobs/{job['id']}").status == 404)
        eventually(lambda: not (tmp_path / "jobs" / job["id"]).exists())
        assert api.job(kept["id"])["phase"] == "running"
        assert (tmp_path / "jobs" / kept["id"]).exists()
        assert api.submit("true")["number"] == kept["number"] + 1
        eventually(lambda: api.get("/v1/cluster").json["jobs"]["succeeded"] <= 1)


def test_what_was_learned_of_a_class_goes_with_its_last_job(tmp_path: Path) -> None:
    def classes(api: Api) -> list[str]:
        return [found["name"] for found in api.get("/v1/classes").json["items"]]

    serve(options(tmp_path), detach=True)
    api = api_of(tmp_path)
    for name in ("lasting", "passing"):
        api.until(api.submit("true", name=name)["id"], "succeeded")
    kept = api.submit("sleep 600", name="lasting")
    eventually(lambda: classes(api) == ["lasting", "passing"])
    down(tmp_path)
    with serving(tmp_path, retention_s=1.0) as api:
        eventually(lambda: classes(api) == ["lasting"])
        assert api.job(kept["id"])["phase"] == "running"
    with contextlib.closing(sqlite3.connect(tmp_path / "stretto.db")) as store, store:
        store.execute("INSERT INTO learned SELECT 'of nobody', value FROM learned WHERE key = 'lasting'")
    with serving(tmp_path) as api:
        # It has ended, and is still there.
        eventually(lambda: classes(api) == ["lasting"])


def test_no_folder_of_a_job_keeps_others_from_being_removed(tmp_path: Path) -> None:
    """However deep it is."""
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    (tmp_path / "deep.py").write_text(f"import os\nos.chdir(os.environ['STRETTO_JOB_FOLDER'])\n{deep}")
    data = tmp_path / "data"
    with deep_below(data / "jobs"):
        serve(options(data), detach=True)
        api = api_of(data)
        first, second = api.submit(f"{sys.executable} {tmp_path}/deep.py"), api.submit("true")
        for job in (first, second):
            api.until(job["id"], "succeeded")
        down(data)
        with serving(data, retention_s=1.0):
            for job in (first, second):
                eventually(lambda job=job: not (data / "jobs" / job["id"]).exists())
            eventually(lambda: os.listdir(data / "jobs") == [])


def test_a_data_directory_that_is_open_to_others_is_closed_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "jobs" / "1" / "logs").mkdir(parents=True)
    log, other = data / "jobs" / "1" / "logs" / "w0.log", data / "jobs" / "1" / "mine"
    for path in (log, other):
        path.write_text("x")
        path.chmod(0o644)
    folders = [data, data / "jobs", data / "jobs" / "1", data / "jobs" / "1" / "logs"]
    for path in folders:
        path.chmod(0o755)
    ours = data / "records"
    for times in (1, 1):
        with serving(data) as api:
            job = api.until(api.submit("echo x")["id"], "succeeded")
            new = ours / job["id"]
            for path in (*folders[:-1], ours, ours / "1" / "logs", data / "jobs" / job["id"], new, new / "logs"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
            for path in (
                ours / "1" / "logs" / "w0.log",
                new / "logs" / "w0.log",
                data / "token",
                data / "server.json",
                data / "stretto.db",
            ):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert stat.S_IMODE(other.stat().st_mode) == 0o644
        assert (data / "server.log").read_text().count("was open to others (0755)") == times


def test_a_data_directory_with_others_files_in_it_is_left_to_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "jobs").mkdir(parents=True)
    (data / "photos").mkdir()
    for path in (data, data / "jobs", data / "photos"):
        path.chmod(0o755)
    with serving(data):
        assert [stat.S_IMODE((data / name).stat().st_mode) for name in (".", "jobs", "photos")] == [0o755, 0o700, 0o755]
        assert "there is photos in it" in (data / "server.log").read_text()


def test_readyz_tells_of_jobs_that_are_in_trouble(tmp_path: Path) -> None:
    """And is ready all the same."""
    journal = tmp_path / "records" / "1" / "journal"
    with serving(tmp_path) as api:
        assert api.get("/readyz").json["troubled"] == 0
        journal.parent.mkdir(parents=True)
        journal.write_bytes(Path("/bin/sleep").read_bytes())
        journal.chmod(0o700)
        with subprocess.Popen(["sleep", "600"], executable=journal) as busy:
            job = api.submit("true", elastic={"min": 1, "max": 1}, retries=20)
            try:
                eventually(lambda: api.get("/readyz").json["troubled"] == 1)
                assert api.get("/readyz").status == 200
                eventually(lambda: "Text file busy" in api.get(f"/v1/jobs/{job['id']}/events").text)
                api.until(api.submit("true")["id"], "succeeded")
            finally:
                busy.kill()
        journal.unlink()
        api.until(job["id"], "succeeded")
        assert api.get("/readyz").json["troubled"] == 0


def test_what_is_written_about_the_server(tmp_path: Path) -> None:
    info = serve(options(tmp_path), detach=True)
    try:
        assert Info(**json.loads((tmp_path / "server.json").read_text())) == info
        assert os.getpgid(info.pid) != os.getpgid(0)
        assert "ready at" in (tmp_path / "server.log").read_text()
        assert "Traceback" not in (tmp_path / "server.log").read_text()
        assert Api(info.url, None).get("/healthz").status == 200
    finally:
        down(tmp_path)


def test_slots_of_the_processor_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", "GPU-2")))
    info = serve(options(tmp_path / "data", nodes="1x6", cpu=True), detach=True)
    try:
        assert info.slots == "6 CPU slots (--cpu)"
        assert "6 CPU slots (--cpu)" in (tmp_path / "data" / "server.log").read_text()
    finally:
        down(tmp_path / "data")


def test_gpus_that_cannot_be_counted_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", fails="LibRmVersionMismatch")))
    with pytest.raises(StrettoError) as refused:
        serve(options(tmp_path / "data", nodes=""), detach=True)
    assert refused.value.code == "unavailable"
    assert "NVMLError_LibRmVersionMismatch" in refused.value.message
    assert "`--cpu` uses the processor instead" in refused.value.hint
    assert running(tmp_path / "data") is None
