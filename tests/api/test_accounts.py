"""Jobs of real accounts on a server that root has started: each runs as its submitter, and reaches nobody else's."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from api_client import Api, alive_in, api_of, eventually, kill, options, serving

from people import CLEO, NAMES, account, interpreter, need_root, open_folder, processes_of
from stretto.api.process import serve
from stretto.jobs.model import Account


class World(NamedTuple):
    """A server, and two people with an account each."""

    data: Path
    root: Api
    ana: Api
    bob: Api
    accounts: tuple[Account, Account]


@pytest.fixture(scope="module")
def people() -> Iterator[tuple[Account, Account]]:
    need_root()
    with account(NAMES[0]) as ana, account(NAMES[1]) as bob:
        yield ana, bob


@pytest.fixture(scope="module")
def world(people: tuple[Account, Account]) -> Iterator[World]:
    with open_folder() as folder, serving(folder / "data", shared=False) as root:
        ana, bob = (root.as_(token_of(root, each)) for each in people)
        yield World(folder / "data", root, ana, bob, people)


def token_of(root: Api, who: Account, **more: Any) -> str:
    answer = root.post("/v1/tokens", {"user": who.name, "role": "user", **more})
    assert answer.status == 201, answer.text
    assert answer.json["account"] == more.get("account", who.name)
    secret: str = answer.json["secret"]
    return secret


def ended(api: Api, run: str, phase: str = "succeeded", **fields: Any) -> dict[str, Any]:
    job = api.until(api.submit(run, **fields)["id"], "succeeded", "failed")
    assert job["phase"] == phase, (job["message"], api.get(f"/v1/jobs/{job['id']}/logs").text)
    return job


def said(api: Api, job: dict[str, Any]) -> str:
    return api.get(f"/v1/jobs/{job['id']}/logs").text


def test_a_job_has_everything_of_its_account_and_nothing_of_the_server(world: World) -> None:
    for api, who in zip((world.ana, world.bob), world.accounts, strict=True):
        run = "id -u; id -ru; id -G; echo $HOME $USER $LOGNAME $SHELL; pwd"
        run += "; grep -E '^(Uid|CapEff)' /proc/self/status; echo x > /dev/stderr"
        job = ended(api, run, workdir="~")
        entry = pwd.getpwnam(who.name)
        groups = os.getgrouplist(who.name, entry.pw_gid)
        uid, real, all_groups, names, folder, ids, caps, last = said(api, job).splitlines()
        assert uid == real == str(who.uid)
        assert sorted(map(int, all_groups.split())) == sorted(groups)
        assert names == f"{entry.pw_dir} {who.name} {who.name} /bin/sh"
        assert folder == entry.pw_dir
        assert ids.split() == ["Uid:"] + 4 * [str(who.uid)]
        assert caps.split() == ["CapEff:", "0000000000000000"]
        assert last == "x"


def test_the_servers_own_token_submits_as_root_and_that_is_said(world: World) -> None:
    job = ended(world.root, "id -u")
    assert said(world.root, job) == "0\n"
    notes = json.loads((world.data / "server.json").read_text())["notes"]
    assert any("submits as root" in note for note in notes)


CANARY = "canary-5b1f"


def test_nothing_of_one_account_is_reached_by_a_job_of_another(world: World) -> None:
    """Neither the folder of its job, nor its log, environment, notice or run directory; nor anything of the server."""
    ana, data = world.ana, world.data
    job = ana.until(
        ana.submit(f"echo {CANARY}; echo {CANARY} > $STRETTO_JOB_FOLDER/mine; sleep 600", env={"SECRET": CANARY})["id"],
        "running",
    )
    eventually(lambda: CANARY in said(ana, job))
    pid = job["workers"][0]["pid"]
    assert os.stat(f"/proc/{pid}").st_uid == world.accounts[0].uid
    looks = f"""
for place in {data}/jobs/{job["id"]} {data}/records {data}/records/{job["id"]}/logs {data}/runs {data}/token \
        {data}/stretto.db {data}/stretto.db-wal {data}/lock {data}/server.log {data}/jobs {data} /proc/{pid}/fd; do
    ls "$place/" >/dev/null 2>&1 && echo "listed $place"
    cat "$place" >/dev/null 2>&1 && echo "read $place"
done
cat /proc/{pid}/environ 2>/dev/null && echo environment
for pid in $(ls /proc | grep '^[0-9]'); do cat /proc/$pid/environ 2>/dev/null | grep -q {CANARY} && echo "in $pid"; done
grep -r {CANARY} {data} 2>/dev/null
kill -9 {pid} 2>/dev/null && echo killed
touch {data}/mine {data}/jobs/mine 2>/dev/null && echo made
echo over
"""
    assert said(world.bob, ended(world.bob, looks)) == "over\n"
    assert ana.job(job["id"])["phase"] == "running"
    ana.post(f"/v1/jobs/{job['id']}/cancel")
    ana.until(job["id"], "cancelled")
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_modes_and_owners_of_what_is_there(world: World) -> None:
    job = ended(world.ana, "true")
    data, uid = world.data, world.accounts[0].uid
    expected = {
        data: (0, 0o711),
        data / "jobs": (0, 0o711),
        data / "jobs" / job["id"]: (uid, 0o700),
        data / "records": (0, 0o700),
        data / "runs": (0, 0o700),
        data / "records" / job["id"] / "logs": (0, 0o700),
        data / "records" / job["id"] / "logs" / "w0.log": (uid, 0o600),
    }
    found = {path: (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) for path in expected}
    assert found == expected


REFUSED = {
    "nobody-of-that-name": "there is no account",
    "root": "may do everything",
    "daemon": "one of the system's",
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_for_these_are_refused(world: World, name: str) -> None:
    for asked in ({"user": name}, {"user": "somebody", "account": name}):
        answer = world.root.post("/v1/tokens", {"role": "user", **asked})
        assert (answer.status, REFUSED[name] in answer.text) == (422, True), answer.text


def test_a_token_may_name_another_account(world: World) -> None:
    ana = world.accounts[0]
    secret = token_of(world.root, Account(name="annie", uid=0), account=ana.name)
    annie = world.root.as_(secret)
    job = ended(annie, "id -un")
    assert (job["user"], said(annie, job)) == ("annie", f"{ana.name}\n")


def test_what_the_account_may_not_enter_is_not_looked_up_for_it(world: World) -> None:
    """And nothing of it is told: it is as if root had not been there."""
    with open_folder() as folder:
        closed = folder / "closed"
        (closed / "inner").mkdir(parents=True)
        closed.chmod(0o700)
        job = ended(world.ana, "true", "failed", workdir=str(closed / "inner"))
        assert "Permission denied" in job["message"]
        missing = ended(world.ana, "true", "failed", workdir=str(closed / "no-such-folder"))
        assert "Permission denied" in missing["message"]


def test_a_job_that_left_processes_behind_has_none_when_it_has_ended(world: World) -> None:
    job = ended(world.ana, "setsid sleep 601 & env -i setsid sleep 602 & exit 0")
    assert job["phase"] == "succeeded"
    assert processes_of(world.accounts[0].uid) == []


def test_the_worker_of_a_supervisor_that_is_killed_ends_with_it(world: World) -> None:
    job = world.ana.until(world.ana.submit("sleep 600", retries=0)["id"], "running")
    pid = job["workers"][0]["pid"]
    stat_line = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    supervisor = int(stat_line[1])
    assert os.stat(f"/proc/{supervisor}").st_uid == 0
    # The server looks on, and cannot do it in its stead.
    server = json.loads((world.data / "server.json").read_text())["pid"]
    os.kill(server, signal.SIGSTOP)
    try:
        os.kill(supervisor, 9)
        eventually(lambda: not processes_of(world.accounts[0].uid, 0))
    finally:
        os.kill(server, signal.SIGCONT)
    world.ana.until(job["id"], "failed")


def test_jobs_of_accounts_outlive_their_server_and_can_be_cancelled_by_the_next(
    people: tuple[Account, Account],
) -> None:
    with open_folder() as folder, serving(folder / "data", shared=False) as root:
        data = folder / "data"
        secrets = [token_of(root, each) for each in people]
        jobs = [root.as_(secret).submit("sleep 600") for secret in secrets]
        pids = [root.until(job["id"], "running")["workers"][0]["pid"] for job in jobs]
        kill(data)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        serve(options(data, shared=False), detach=True)
        again = api_of(data)
        assert [again.until(job["id"], "running")["workers"][0]["pid"] for job in jobs] == pids
        assert again.as_(secrets[0]).post(f"/v1/jobs/{jobs[1]['id']}/cancel").status == 403
        for job, secret in zip(jobs, secrets, strict=True):
            assert again.as_(secret).post(f"/v1/jobs/{job['id']}/cancel").status == 202
            again.until(job["id"], "cancelled")
        assert [processes_of(each.uid) for each in people] == [[], []]
        eventually(lambda: len(alive_in(data)) == 1)


def test_an_account_that_got_another_number_meanwhile_runs_nothing(people: tuple[Account, Account]) -> None:
    """Nor one that is gone."""
    with open_folder() as folder, serving(folder / "data", shared=False, nodes="1x1") as root:
        with account(CLEO) as cleo:
            secret = token_of(root, cleo)
            first = root.until(root.submit("sleep 600")["id"], "running")
            waiting = root.as_(secret).submit("true", name="waiting")
            subprocess.run(["usermod", "--uid", str(cleo.uid + 5000), cleo.name], check=True, capture_output=True)
            root.post(f"/v1/jobs/{first['id']}/cancel")
            failed = root.until(waiting["id"], "succeeded", "failed")
            assert failed["phase"] == "failed"
            assert f"had {cleo.uid} when the job came" in failed["message"]
        gone = root.as_(secret).submit("true", name="gone")
        failed = root.until(gone["id"], "succeeded", "failed")
        assert failed["phase"] == "failed"
        assert f"there is no account '{CLEO}' on this machine any more" in failed["message"]


def test_tokens_and_jobs_of_a_server_that_told_nobody_apart(people: tuple[Account, Account]) -> None:
    """Their tokens are good for reading; the answer says what to do. What runs goes on, and is not started again."""
    ana = people[0]
    with open_folder() as folder, serving(folder / "data", shared=True) as before:
        data = folder / "data"
        old = before.post("/v1/tokens", {"user": ana.name, "role": "user"}).json["secret"]
        running = before.until(before.as_(old).submit("sleep 600", name="runs")["id"], "running")
        before.as_(old).submit("true", name="waits", workers=4)
        kill(data)
        serve(options(data, shared=False), detach=True)
        root = api_of(data)
        assert root.until(running["id"], "running")["workers"] == running["workers"]
        answer = root.as_(old).post("/v1/jobs", {"run": "true"})
        assert answer.status == 403
        assert f"stretto token create {ana.name} --role user" in answer.text
        assert root.as_(old).get("/v1/jobs").status == 200
        assert root.as_(old).post(f"/v1/jobs/{running['id']}/cancel").status == 403
        root.post(f"/v1/jobs/{running['id']}/cancel")
        root.until(running["id"], "cancelled")
        failed = root.until("waits", "failed", "succeeded")
        assert failed["phase"] == "failed"
        assert "did not run jobs as their submitters" in failed["message"]
        assert said(root, ended(root, "id -u")) == "0\n"


def test_a_token_for_root_needs_a_flag_of_the_server(people: tuple[Account, Account]) -> None:
    with open_folder() as folder, serving(folder / "data", shared=False, allow_root=True) as root:
        data = folder / "data"
        secret = token_of(root, Account(name="boss", uid=0), account="root")
        assert said(root, ended(root.as_(secret), "id -u")) == "0\n"
        kill(data)
        serve(options(data, shared=False), detach=True)
        again = api_of(data)
        answer = again.as_(secret).post("/v1/jobs", {"run": "true"})
        assert (answer.status, "--allow-root" in answer.text) == (403, True)
        assert ended(again, "true")


def test_an_account_that_cannot_reach_the_data_directory_gets_no_token(
    people: tuple[Account, Account], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with serving(tmp_path / "data", shared=False) as root:
        answer = root.post("/v1/tokens", {"user": people[0].name, "role": "user"})
        assert (answer.status, "--data" in answer.text) == (422, True), answer.text


def test_a_server_of_an_ordinary_user_is_that_users(people: tuple[Account, Account]) -> None:
    """Others get a token only when somebody says that they may do what its account can."""
    ana, bob = people
    with open_folder() as folder:
        home = pwd.getpwnam(ana.name).pw_dir
        python, more = interpreter(folder, ana)
        env = {"PATH": os.environ["PATH"], "HOME": home, "USER": ana.name, "LOGNAME": ana.name, **more}

        def stretto(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [python, "-m", "stretto.cli", *words], user=ana.uid, group=pwd.getpwnam(ana.name).pw_gid,
                extra_groups=[], env=env, cwd=home, capture_output=True, text=True,
            )  # fmt: skip

        up = stretto("up", "-d", "--port", "0", "--cpu", "--cold")
        try:
            assert up.returncode == 0, up.stderr
            assert f"all jobs run as {ana.name}" in up.stderr
            assert stretto("token", "create", ana.name).returncode == 0
            refused = stretto("token", "create", bob.name)
            assert refused.returncode != 0
            assert f"can do what {ana.name} can" in refused.stderr
            assert "--shared" in refused.stderr
            allowed = stretto("token", "create", bob.name, "--shared")
            assert allowed.returncode == 0, allowed.stderr
            assert f"{bob.name} can do what that one can" in allowed.stderr
            assert stretto("token", "create", bob.name, "--shared", "--account", bob.name).returncode != 0
        finally:
            stretto("down", "--cancel-jobs")


TRAINS = """
import os, sys, time
import torch
import torch.nn.functional as F
import stretto.torch as stretto

torch.manual_seed(1)
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.arange(4000.).reshape(1000, 4) / 4000, torch.ones(1000, 1))
print("uid", os.getuid(), os.geteuid(), sorted(os.getgroups()), "home", os.environ["HOME"], flush=True)
with open("/proc/self/environ") as shown:
    print("shown", *sorted(each.partition("=")[0] for each in shown.read().split("\\0") if each), flush=True)
for batch in job.batches(data, size=8, epochs=2, seed=0, per_worker=8):
    x, y = batch
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.01)
print("sum", f"{sum(p.double().sum().item() for p in model.parameters()):.12f}", flush=True)
"""


def test_elastic_jobs_of_two_accounts_are_forks_of_their_own_and_end_alike(people: tuple[Account, Account]) -> None:
    """At once, resized while they train: each a fork of a warm interpreter of its account, none of another's; their
    supervisors are root's own programs."""
    with open_folder() as folder, serving(folder / "data", shared=False, warm=True, nodes="1x4") as root:
        script = folder / "trains.py"
        script.write_text(TRAINS)
        script.chmod(0o644)
        jobs = []
        for who in people:
            python, env = interpreter(folder, who)
            api, fields = root.as_(token_of(root, who)), {"env": env, "elastic": {"min": 1, "max": 2}, "workdir": "~"}
            jobs.append((who, api, [python, str(script)], fields))
        # The first ones of an account wait for its imports, and so find them done.
        first = [(who, api, api.submit(run, **fields)) for who, api, run, fields in jobs]
        for who, api, job in first:
            running = api.until(job["id"], "running", "failed")
            assert running["phase"] == "running", (running["message"], said(api, job))
            pid = running["workers"][0]["pid"]
            supervisors = [
                int(entry)
                for entry in os.listdir("/proc")
                if entry.isdecimal() and _supervises(int(entry), folder / "data", job["id"])
            ]
            assert len(supervisors) == len(running["workers"])
            assert {os.stat(f"/proc/{each}").st_uid for each in supervisors} == {0}
            assert os.stat(f"/proc/{pid}").st_uid == who.uid
        for _, api, job in first:
            api.post(f"/v1/jobs/{job['id']}/scale", {"min": 2, "max": 2})
        sums: list[float] = []
        for who, api, job in first:
            done = api.until(job["id"], "succeeded", "failed")
            text = said(api, job)
            assert done["phase"] == "succeeded", (done["message"], text)
            entry = pwd.getpwnam(who.name)
            ids = f"uid {who.uid} {who.uid} {sorted(os.getgrouplist(who.name, entry.pw_gid))} home {entry.pw_dir}"
            assert ids in text
            assert "STRETTO_TOKEN" not in next(line for line in text.splitlines() if line.startswith("shown"))
            sums += [float(line.split()[1]) for line in text.splitlines() if line.startswith("sum")]
            launched = [each["event"] for each in api.get(f"/v1/jobs/{job['id']}/events").json["items"]]
            how = [(each["how"], each["why"]) for each in launched if each["kind"] == "running"]
            assert len(how) >= 2, how
            assert set(how) == {("forked", "")}
        # Resized at different steps they add in another order.
        assert len(sums) >= 2
        assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-6)
    assert [processes_of(each.uid) for each in people] == [[], []]


def _supervises(pid: int, data: Path, job: str) -> bool:
    """Whether this is a supervisor of the job, and a program of its own."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"-I" in words and any(word.startswith(os.fsencode(data / "runs" / f"{job}.")) for word in words)


HOSTILE = """
import ctypes, os, signal, subprocess, sys, time
for way in sys.argv[1:]:
    if way == "daemons":
        for n in range(5):
            subprocess.Popen(["setsid", "sleep", "603"], env={}, start_new_session=True)
    elif way == "parent":
        ctypes.CDLL(None).prctl(1, 0)
        os.kill(os.getppid(), signal.SIGKILL)
    elif way == "stop":
        os.kill(os.getppid(), signal.SIGSTOP)
print("ready", flush=True)
time.sleep(600 if "stay" in sys.argv else 0)
"""


@pytest.mark.parametrize("ways", [("daemons",), ("daemons", "parent", "stay"), ("stop", "daemons", "stay")])
def test_a_fork_of_an_account_leaves_nothing_behind(people: tuple[Account, Account], ways: tuple[str, ...]) -> None:
    """Though it kills or stops the parent that it has there, which is its account's."""
    with open_folder() as folder, serving(folder / "data", shared=False, warm=True) as root:
        who = people[0]
        (folder / "hostile.py").write_text(HOSTILE)
        (folder / "hostile.py").chmod(0o644)
        python, env = interpreter(folder, who)
        ana = root.as_(token_of(root, who))
        job = ana.submit([python, str(folder / "hostile.py"), *ways], env=env, workdir="~", retries=0)
        eventually(lambda: "ready" in said(ana, job) or ana.job(job["id"])["ended_s"] is not None)
        events = [each["event"] for each in ana.get(f"/v1/jobs/{job['id']}/events").json["items"]]
        assert [each["how"] for each in events if each["kind"] == "running"] == ["forked"], events
        if "stay" in ways:
            ana.post(f"/v1/jobs/{job['id']}/cancel")
        done = ana.until(job["id"], "succeeded", "failed", "cancelled")
        assert (done["phase"] == "succeeded") == ("stay" not in ways), done["message"]
        # The fork server stays; nothing of the job does.
        left = [each for each in processes_of(who.uid, 1.0) if b"603" in Path(f"/proc/{each}/cmdline").read_bytes()]
        if "parent" in ways:
            # Without control groups some may get away on a busy machine (docs/security.md): they end with the test.
            for each in left:
                os.kill(each, signal.SIGKILL)
        else:
            assert left == []
    assert processes_of(people[0].uid) == []


def test_forks_of_an_account_outlive_their_server(people: tuple[Account, Account]) -> None:
    """And the fork server that made them; the next server ends them."""
    with open_folder() as folder, serving(folder / "data", shared=False, warm=True) as root:
        data, who = folder / "data", people[1]
        (folder / "hostile.py").write_text(HOSTILE)
        (folder / "hostile.py").chmod(0o644)
        python, env = interpreter(folder, who)
        bob = root.as_(token_of(root, who))
        job = bob.submit([python, str(folder / "hostile.py"), "stay"], env=env, workdir="~")
        eventually(lambda: "ready" in said(bob, job))
        before = bob.job(job["id"])["workers"]
        kill(data)
        serve(options(data, shared=False, warm=True), detach=True)
        again = api_of(data)
        assert again.until(job["id"], "running")["workers"] == before
        assert os.stat(f"/proc/{before[0]['pid']}").st_uid == who.uid
        again.post(f"/v1/jobs/{job['id']}/cancel")
        again.until(job["id"], "cancelled")
        assert not Path(f"/proc/{before[0]['pid']}").exists()
    assert processes_of(people[1].uid) == []


def test_a_service_runs_as_its_account_behind_a_proxy_that_is_nobodys(people: tuple[Account, Account]) -> None:
    """And may not have a port that is for root."""
    with open_folder() as folder, serving(folder / "data", shared=False) as root:
        who = people[0]
        python, env = interpreter(folder, who)
        ana = root.as_(token_of(root, who))
        run = [python, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        refused = ana.post("/v1/jobs", {"run": run, "service": {"port": 80}})
        assert (refused.status, "for root alone" in refused.text) == (422, True), refused.text
        job = ana.submit(run, env=env, workdir="~", service={"port": port})
        ana.until(job["id"], "running")

        def answered() -> bool:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/")
                return connection.getresponse().status == 200
            return False

        eventually(answered)
        replica = ana.job(job["id"])["workers"][0]["pid"]
        assert os.stat(f"/proc/{replica}").st_uid == who.uid
        config = os.fsencode(folder / "data" / "records")
        proxies = [pid for pid in alive_in(folder / "data") if _runs(pid, b"haproxy", config)]
        assert {_uid(pid) for pid in proxies} == {65534}
    assert processes_of(people[0].uid) == []


def _runs(pid: int, program: bytes, named: bytes) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return program in words[0] and any(named in word for word in words)


def _uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))


SUBMITS = """
import json, socket, sys
near = socket.socket(socket.AF_UNIX)
near.connect(sys.argv[1])
body = json.dumps({"run": "id -un", "name": sys.argv[2]}).encode()
head = ["POST /v1/jobs HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
near.sendall("\\r\\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
print(near.makefile("rb").read().decode())
"""


def test_a_person_at_the_socket_needs_no_token(people: tuple[Account, Account]) -> None:
    """And submits as who they are; one of the system's accounts is nobody."""
    with open_folder() as folder, serving(folder / "data", shared=False) as root:
        who = people[0]
        python, env = interpreter(folder, who)
        near = str(folder / "data" / "socket")
        done = subprocess.run(
            [python, "-c", SUBMITS, near, "near"], env=env, user=who.uid, group=who.uid, extra_groups=[],
            capture_output=True, text=True,
        )  # fmt: skip
        assert " 201 " in done.stdout, done
        job = root.until("near", "succeeded", "failed")
        assert (job["user"], said(root, job)) == (who.name, f"{who.name}\n")
        daemon = pwd.getpwnam("daemon").pw_uid
        refused = subprocess.run(
            [python, "-c", SUBMITS, near, "far"], env=env, user=daemon, group=daemon, extra_groups=[],
            capture_output=True, text=True,
        )  # fmt: skip
        assert " 401 " in refused.stdout, refused
