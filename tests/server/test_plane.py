"""Jobs from submission to end: real programs on a real machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, machine_of, play

from stretto.errors import Conflict, Impossible, NotFound, UsageError
from stretto.jobs.events import Migrated
from stretto.jobs.model import Job
from stretto.server import loop
from stretto.store import StoreError


def test_a_program_runs_and_its_output_is_kept(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.ended(await m.submit("echo hello $STRETTO_JOB", name="hello"))
            assert (job.exit_code, job.starts, job.workers) == (0, 1, ())
            assert m.logs(job).split()[-2:] == ["hello", job.id]
            assert await m.kinds(job) == ["submitted", "resized", "launched", "running", "exited", "ended"]

    play(story())


def test_a_script_that_fails_is_not_tried_again_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('no such luck')\nf()\n")

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.ended(await m.submit("python bad.py"), "failed")
            assert (job.exit_code, job.starts) == (1, 1)
            assert "ValueError: no such luck" in job.message
            other = await m.ended(await m.submit("exit 7"), "failed")
            assert other.exit_code == 7

    play(story())


def test_what_cannot_be_started_ends_with_a_clear_message(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            missing = await m.ended(await m.submit(["no-such-program"]), "failed")
            assert "no-such-program" in missing.message
            nowhere = await m.ended(await m.submit("true", workdir="not/there"), "failed")
            assert "not/there" in nowhere.message

    play(story())


def test_a_machine_fault_is_tried_again_until_it_is_hopeless(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.ended(await m.submit("kill -9 $$", retries=1), "failed")
            assert job.starts == 2
            assert "signal 9" in job.message
            assert "2 machine faults" in job.message

    play(story())


def test_jobs_wait_for_room_and_for_each_other(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def story() -> None:
        async with machine_of(tmp_path, "1x2", policy="fifo") as m:
            first = await m.submit(f"until [ -e {gate} ]; do sleep 0.05; done", name="first", workers=2)
            second = await m.submit("true", name="second")
            third = await m.submit("true", after="first", priority=90)
            await m.running(first, 2)
            await m.reason(second, "no-room")
            await m.reason(third, "dependency")
            gate.touch()
            await m.ended(first)
            await m.ended(second)
            await m.ended(third)

    play(story())


def sleeper(tmp_path: Path, name: str) -> str:
    """Says that it is there, and ends with SIGTERM only."""
    return f"python -c \"import signal, pathlib; pathlib.Path('{tmp_path}/{name}').touch(); signal.pause()\""


async def there(path: Path) -> None:
    async with asyncio.timeout(30):
        while not path.exists():
            await asyncio.sleep(0.01)


def test_cancel_suspend_and_resume(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.submit(sleeper(tmp_path, "a"), name="a")
            await there(tmp_path / "a")
            await m.plane.wish("a", "suspend", "me")
            await m.until(job, lambda job: job.phase == "suspended", "suspended")
            await m.reason(job, "suspended")
            (tmp_path / "a").unlink()
            await m.plane.wish("a", "run", "me")
            await there(tmp_path / "a")
            await m.plane.wish("a", "cancel", "me")
            gone = await m.ended(job, "cancelled")
            assert (gone.starts, gone.preemptions) == (2, 0)
            with pytest.raises(Conflict, match="been cancelled"):
                await m.plane.wish(job.id, "cancel", "me")
            queued = await m.submit("true", name="b", workers=4)
            await m.plane.wish("b", "cancel", "me")
            assert (await m.until(queued, lambda job: job.ended, "ended")).phase in ("cancelled", "succeeded")

    play(story())


def test_a_script_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = (
        f"python -c \"import signal, pathlib; signal.signal(15, signal.SIG_IGN); pathlib.Path('{tmp_path}/up').touch();"
        ' signal.pause()"'
    )

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.submit(stubborn, stop={"grace": "200ms"})
            await there(tmp_path / "up")
            await m.plane.wish(job.id, "cancel", "me")
            await m.ended(job, "cancelled")

    play(story())


def test_a_time_limit_ends_a_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.ended(await m.submit(sleeper(tmp_path, "x"), stop={"after": "300ms"}), "failed")
            assert "stop.after" in job.message

    play(story())


def test_priority_preempts_and_the_other_goes_on_later(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2", policy="priority") as m:
            low = await m.submit(sleeper(tmp_path, "low"), workers=2, priority=10, level="restart")
            await there(tmp_path / "low")
            (tmp_path / "low").unlink()
            high = await m.submit("true", workers=2, priority=90)
            await m.ended(high)
            await there(tmp_path / "low")
            assert (await m.plane.job(low.id)).preemptions == 1
            await m.plane.wish(low.id, "cancel", "me")
            await m.ended(low, "cancelled")

    play(story())


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "2x2") as m:
            with pytest.raises(Impossible, match="2 nodes with 2 cpu slots"):
                await m.submit("true", workers=5)
            with pytest.raises(Impossible, match="3 devices"):
                await m.submit("true", resources={"gpu": 3})
            with pytest.raises(NotFound, match="nobody"):
                await m.submit("true", after="nobody")
            job = await m.submit(sleeper(tmp_path, "a"), name="a")
            with pytest.raises(Conflict, match="is taken"):
                await m.submit("true", name="a")
            with pytest.raises(Conflict, match="rigid"):
                await m.plane.scale("a", 1, 2, "me")
            with pytest.raises(NotFound, match="no job"):
                await m.plane.job("b")
            with pytest.raises(NotFound, match="no node"):
                await m.plane.migrate("a", "node-9", "me")
            await m.plane.wish("a", "cancel", "me")
            await m.ended(job, "cancelled")

    play(story())


def test_the_same_key_gives_the_same_job(tmp_path: Path) -> None:
    from stretto.jobs.model import Context
    from stretto.spec.model import JobFile

    async def submit(m: Machine, name: str, key: str, digest: str) -> Job:
        file = JobFile.model_validate({"run": "true", "name": name})
        return await m.plane.submit(file, Context(cwd="/"), "me", key=key, digest=digest)

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            one = await submit(m, "a", "k1", "d1")
            again = await submit(m, "a", "k1", "d1")
            assert one.number == again.number
            with pytest.raises(Conflict, match="idempotency"):
                await submit(m, "a", "k1", "other")
            await m.ended(one)
            assert (await submit(m, "a", "k1", "d1")).number == one.number

    play(story())


def test_the_policy_can_be_changed_while_jobs_run_and_is_remembered(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            await m.plane.set_policy("round-robin", {"quantum_s": 5}, "spread", "me")
            await m.ended(await m.submit("true"))
        async with machine_of(tmp_path) as m:
            info = m.plane.policy()
            assert (info.name, info.options, info.placement) == ("round-robin", {"quantum_s": 5}, "spread")

    play(story())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stretto", {"quantum_s": 0}),
        ("stretto", {"p": "nan"}),
        ("elastic-tiresias", {"queues": [20, 10]}),
        ("round-robin", {"quantum_s": "1e308"}),
        ("fifo", {"original": "maybe"}),
        ("sia", {"round_s": None}),
    ],
)
def test_options_that_no_policy_can_decide_with_are_refused(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            before = m.plane.policy()
            for wrong in ("nan", "inf", "-1", ""):
                with pytest.raises(UsageError, match=r"the cycle: reserve_after_s is .*; it must be a number from 0"):
                    await m.plane.set_policy(name, {"reserve_after_s": wrong}, None, "me")
            with pytest.raises(UsageError, match=f"policy {name}: {next(iter(options))} is .*; it must be "):
                await m.plane.set_policy(name, options, None, "me")
            assert m.plane.policy() == before
            await m.ended(await m.submit("true"))

    play(story())


@pytest.mark.parametrize(
    ("policy", "fields", "size"),
    [
        ("fifo", {}, 3),
        ("gang", {}, 3),
        ("fifo", {"workers": 1}, 1),
        ("fifo", {"workers": 2}, 2),
        ("elastic-fifo", {}, 2),
    ],
)
def test_an_elastic_job_asks_for_its_maximum_unless_it_says_otherwise(
    tmp_path: Path, policy: str, fields: dict[str, Any], size: int
) -> None:
    """It gets that from policies that resize nobody; the others give it what there is."""

    async def story() -> None:
        async with machine_of(tmp_path, policy=policy) as m:
            beside = await m.submit("exec sleep 600", workers=2 if policy == "elastic-fifo" else 1)
            elastic = {"min": 1, "max": 3, "explore": False}
            job = await m.submit("exec sleep 600", elastic=elastic, **fields)
            await m.until(job, lambda now: len(now.workers) == size, f"{size} workers")
            assert (await m.plane.why(job.id)).target == size
            for each in (beside, job):
                await m.plane.wish(each.id, "cancel", "me")
                await m.ended(each, "cancelled")

    play(story())


def test_a_restarted_server_adopts_what_runs_and_hears_of_what_ended(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            stays = await m.submit(sleeper(tmp_path, "stays"), name="stays")
            ends = await m.submit(sleeper(tmp_path, "ends"), name="ends")
            await there(tmp_path / "stays")
            await there(tmp_path / "ends")
            pid = (await m.until(ends, lambda job: bool(job.workers[0].pid), "a process")).workers[0].pid
            before = (await m.until(stays, lambda job: bool(job.workers[0].pid), "a process")).workers
        os.kill(pid, signal.SIGKILL)
        async with machine_of(tmp_path) as m:
            again = await m.plane.job("stays")
            assert [worker.pid for worker in again.workers] == [worker.pid for worker in before]
            retried = await m.until("ends", lambda job: job.starts == 2 and bool(job.workers), "started again")
            assert "signal 9" in retried.message
            for name in ("stays", "ends"):
                await m.plane.wish(name, "cancel", "me")
                await m.ended(name, "cancelled")

    play(story())


def test_a_group_of_which_one_has_ended_well_is_not_begun_again(tmp_path: Path) -> None:
    async def story() -> None:
        run = f"[ $RANK = 0 ] || until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo rank >> {tmp_path}/begun"
        async with machine_of(tmp_path, "1x2") as m:
            job = await m.submit(run, workers=2)
            await m.until(job, lambda job: job.finished == 1 and len(job.workers) == 1, "one has ended")
        async with machine_of(tmp_path, "1x2") as m:
            (tmp_path / "go").touch()
            done = await m.ended(job)
            assert (done.phase, done.starts) == ("succeeded", 1)
            assert (tmp_path / "begun").read_text() == "rank\nrank\n"

    play(story())


def test_one_that_was_stopped_because_no_server_was_there_goes_on(tmp_path: Path) -> None:
    """It says that it ended well, as scripts do that save what they have when they are asked to end."""

    async def story() -> None:
        run = f"trap 'exit 0' TERM; echo begun >> {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
        async with machine_of(tmp_path, "1x1", away_s=0.3) as m:
            job = await m.submit(run)
            await m.until(job, lambda job: (tmp_path / "begun").exists(), "begun")
            (launch,) = (worker.launch for worker in (await m.plane.job(job.id)).workers)
        while not (tmp_path / "data" / "runs" / launch / "exit.json").exists():
            await asyncio.sleep(0.02)
        async with machine_of(tmp_path, "1x1") as m:
            await m.until(job, lambda job: job.starts == 2, "started again")
            (tmp_path / "go").touch()
            done = await m.ended(job)
            assert (done.starts, done.failures) == (2, 0)
            assert (tmp_path / "begun").read_text() == "begun\nbegun\n"

    play(story())


def test_who_reaches_its_limit_has_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FAILED_GRACE_S", 0.01)

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            run = f"trap 'sleep 0.5; touch {tmp_path}/saved; exit 0' TERM; while :; do sleep 0.05; done"
            job = await m.submit(run, stop={"after": "200ms", "grace": "30s"})
            done = await m.ended(job, "failed")
            assert "longer than its limit" in done.message
            assert (tmp_path / "saved").exists()

    play(story())


def test_a_policy_that_is_gone_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text((Path(__file__).parents[2] / "examples" / "widest_first.py").read_text())

    async def story() -> None:
        async with machine_of(tmp_path, "1x1", policy="") as m:
            await m.plane.set_policy(str(file), {}, None, "me")
        file.unlink()
        async with machine_of(tmp_path, "1x1", policy="") as m:
            now = m.plane.policy()
            assert now.name == "stretto"
            assert "mine.py" in now.trouble
            await m.ended(await m.submit("true"))
        async with machine_of(tmp_path, "1x1", policy="fifo") as m:
            assert (m.plane.policy().name, m.plane.policy().trouble) == ("fifo", "")
        async with machine_of(tmp_path, "1x1", policy="") as m:
            assert m.plane.policy().name == "fifo"

    play(story())


def test_a_server_that_is_closed_as_something_happens_is_closed(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            job = await m.running(await m.submit("sleep 1000", stop={"after": "1h"}), 1)
            loop = m.plane.loop
            while not loop._woken._waiters:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            loop.wake(decide=True)
        async with machine_of(tmp_path) as m:
            await m.plane.wish(job.id, "cancel", "the test")
            await m.ended(job, "cancelled")

    play(story())


def test_a_drained_node_is_left_and_used_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "2x1") as m:
            left, stays = (node.name for node in m.plane.backend.nodes())
            await m.plane.drain(left, True, "me")
            first = await m.submit(sleeper(tmp_path, "a"), name="a")
            second = await m.submit("true", name="b")
            job = await m.running(first, 1)
            assert job.workers[0].seat.node == stays
            assert (await m.plane.why("b")).workers == 0
            await m.plane.drain(left, False, "me")
            await m.ended(second)
            await m.plane.wish("a", "cancel", "me")
            await m.ended(first, "cancelled")

    play(story())


def test_the_forecast_says_when_a_waiting_job_starts(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1", policy="fifo") as m:
            for _ in range(2):
                await m.ended(await m.submit("true", name="short"))
            runs = await m.submit(sleeper(tmp_path, "a"), name="a")
            waits = await m.submit("true", name="short")
            await there(tmp_path / "a")
            told = {one.job: one for one in await m.plane.forecast()}
            assert told[runs.number].start_s == 0.0
            assert told[waits.number].start_s is not None
            assert told[waits.number].start_s > 0
            assert told[waits.number].end_s > told[waits.number].start_s
            await m.plane.wish("a", "cancel", "me")
            await m.ended(waits)

    play(story())


def test_a_shell_line_is_asked_to_end_as_its_program_is(tmp_path: Path) -> None:
    """The program behind a line for the shell gets the signal, and the time to save what it needs."""
    saves = """
import pathlib, signal, sys
state = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (state.write_text("saved"), sys.exit(0)))
(state.parent / "up").touch()
signal.pause()
"""

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            (tmp_path / "saves.py").write_text(saves)
            job = await m.submit(f"cd {tmp_path} && python saves.py {tmp_path}/state; echo more")
            await there(tmp_path / "up")
            await m.plane.wish(job.id, "cancel", "me")
            await m.ended(job, "cancelled")
            assert (tmp_path / "state").read_text() == "saved"
            assert "more" not in m.logs(job)

    play(story())


def test_whoever_was_named_is_told(tmp_path: Path) -> None:
    """A web address gets the start and the end of the job, also when it fails at first."""
    told: list[dict[str, Any]] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            refuse = not told and not self.server.refused  # type: ignore[attr-defined]
            self.server.refused = True  # type: ignore[attr-defined]
            if not refuse:
                told.append(body)
            self.send_response(503 if refuse else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    server.refused = False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def story() -> None:
        async with machine_of(tmp_path, notify_to=["127.0.0.1"]) as m:
            address = f"http://127.0.0.1:{server.server_port}/hook"
            job = await m.ended(await m.submit("true", name="told", notify=address))
            async with asyncio.timeout(30):
                while {one["event"]["kind"] for one in told} != {"launched", "ended"}:
                    await asyncio.sleep(0.01)
            (end,) = (one for one in told if one["event"]["kind"] == "ended")
            assert (end["job"]["id"], end["job"]["phase"]) == (job.id, "succeeded")
            assert "secret" not in str(told)

    try:
        play(story())
    finally:
        server.shutdown()
        server.server_close()


def test_who_is_cancelled_before_it_has_a_process_never_gets_one(tmp_path: Path) -> None:
    """Between the decision and the start there is a write to disk."""

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            for number in range(5):
                job = await m.submit(f"touch {tmp_path}/ran-{number}; sleep 60", stop={"grace": "50s"})
                await m.until(job, lambda job: bool(job.launches), "launched")
                await m.plane.wish(job.id, "cancel", "me")
                await m.ended(job, "cancelled")

    play(story())


def test_a_name_like_ours_is_in_nobodys_way(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            named = await m.submit(sleeper(tmp_path, "a"), name="job-2")
            other = await m.ended(await m.submit("true"))
            assert other.name != named.name
            await m.plane.wish(named.id, "cancel", "me")
            await m.ended(named, "cancelled")

    play(story())


def test_a_policy_that_is_changed_while_it_thinks_leaves_nothing_behind(tmp_path: Path) -> None:
    """What one policy remembers is never shown to the next."""

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            for first, second in (
                ("round-robin", "stretto"),
                ("themis", "stretto"),
                ("round-robin", "elastic-tiresias"),
            ):
                for _ in range(6):
                    await m.plane.set_policy(first, {}, None, "me")
                    one = await m.submit("true")
                    await m.plane.set_policy(second, {}, None, "me")
                    await m.ended(await m.submit("true"))
                    await m.ended(one)
                    assert m.plane.ready == ""

    play(story())


@pytest.mark.parametrize("policy", ["fifo", "gang", "stretto", "priority"])
def test_a_job_can_be_scaled_under_every_kind_of_policy(tmp_path: Path, policy: str) -> None:
    """Also to sizes that it does not have now; others are not held up by it."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x4", policy=policy) as m:
            job = await m.submit(sleeper(tmp_path, "a"), elastic={"min": 1, "max": 4}, level="restart")
            await m.running(job, 4)
            await m.plane.scale(job.id, 2, 2, "me")
            await m.running(job, 2)
            await m.ended(await m.submit("true"))
            await m.plane.scale(job.id, 4, 4, "me")
            await m.running(job, 4)
            assert m.plane.ready == ""
            await m.plane.wish(job.id, "cancel", "me")
            await m.ended(job, "cancelled")

    play(story())


def test_a_script_that_never_joins_runs_no_more_often_than_it_has_workers(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            line = f"echo x >> {tmp_path}/side; exit 0"
            job = await m.ended(await m.submit(line, elastic={"min": 1, "max": 2, "explore": False}))
            assert (tmp_path / "side").read_text().split() == ["x", "x"]
            assert "never joined" in job.message

    play(story())


def test_a_drained_machine_is_named_and_has_a_forecast(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            await m.plane.drain("local", True, "me")
            job = await m.submit("true")
            (told,) = await m.plane.forecast()
            assert (told.start_s, told.end_s, told.text) == (None, None, "as things are it does not start")
            assert "drained node: local" in (await m.plane.why(job.id)).text
            await m.plane.drain("local", False, "me")
            await m.ended(job)

    play(story())


def test_a_mistake_of_ours_does_not_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.server import view

    right, failed = view.held, []

    def wrong_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("a mistake")
        return right(*arguments)

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            monkeypatch.setattr(view, "held", wrong_once)
            await m.ended(await m.submit("true"))
            assert failed

    play(story())


@pytest.mark.parametrize("where", ["held", "ask", "verdicts"])
def test_a_mistake_of_ours_is_told_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Wherever it is: before anybody is asked, in what is asked, or in what is made of the answer."""
    from stretto.server import deciding, site, view

    of: Any = {"held": view, "ask": site.LocalSite, "verdicts": deciding}[where]
    right = getattr(of, where)

    def wrong(*arguments: Any) -> Any:
        raise OverflowError("too large")

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            await m.ended(await m.submit("true"))
            monkeypatch.setattr(of, where, wrong)
            job = await m.submit("true")
            await m.reason(job, "trouble")
            monkeypatch.setattr(of, where, right)
            why = await m.plane.why(job.id)
            assert "OverflowError: too large" in why.text
            assert "OverflowError: too large" in why.facts["trouble"]
            assert "OverflowError: too large" in m.plane.ready
            await m.ended(job)
            assert m.plane.ready == ""

    play(story())


def test_a_job_over_its_time_is_waited_for_without_haste(tmp_path: Path) -> None:
    """While it takes its time to end, the loop sleeps."""
    stubborn = "import signal, time; signal.signal(15, lambda *_: (time.sleep(1), exit(0))); time.sleep(60)"

    async def story() -> None:
        async with machine_of(tmp_path) as m:
            (tmp_path / "s.py").write_text(stubborn)
            turns = 0
            turn = m.plane.loop._turn

            async def counted() -> None:
                nonlocal turns
                turns += 1
                await turn()

            m.plane.loop._turn = counted  # type: ignore[method-assign]
            job = await m.ended(await m.submit("python s.py", stop={"after": "300ms", "grace": "20s"}), "failed")
            assert "stop.after" in job.message
            assert turns < 100

    play(story())


def test_a_job_that_restarts_moves_by_stop_and_start_and_its_cost_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "2x2") as m:
            job = await m.submit(sleeper(tmp_path, "a"), workers=2, level="restart")
            await there(tmp_path / "a")
            now = await m.running(job, 2)
            here = now.workers[0].seat.node
            target = next(node.name for node in m.plane.backend.nodes() if node.name != here)
            await m.plane.migrate(job.id, target, "me")
            moved = await m.until(job, lambda job: job.migrations == 1, "moved")
            assert {worker.seat.node for worker in moved.workers} == {target}
            await m.plane.book.settled()
            events = [one.event for one in await m.plane.events(job.id, 0, 1000)]
            (told,) = (event for event in events if isinstance(event, Migrated))
            assert told.node == target
            assert told.paused_s > 0
            await m.plane.wish(job.id, "cancel", "me")
            await m.ended(job, "cancelled")

    play(story())


@pytest.mark.skipif(os.getuid() != 0, reason="a small file system to fill can only be mounted by root")
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Nothing is accepted while there is no room, what was accepted ends, and afterwards all goes on."""
    data = tmp_path / "data"
    data.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(data)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            before = await m.submit(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", name="before")
            await m.running(before, 1)
            filler = data / "filler"
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            refused = 0
            for number in range(200):
                try:
                    await m.submit("true", name=f"while-{number}")
                except StoreError:
                    refused += 1
                    if refused > 3:
                        break
            assert refused > 3
            (tmp_path / "go").touch()
            filler.unlink()
            await m.ended(before)
            await m.ended(await m.submit("true", name="after"))
            assert m.plane.store.verify() == []

    try:
        play(story())
    finally:
        subprocess.run(["umount", "-l", str(data)], check=False)
