"""The restart level: the pure state machine, the torchrun contract, and real groups of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from living import wait_until

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.restart import (
    Action,
    Cancel,
    Event,
    Exited,
    Group,
    Kill,
    Phase,
    Resize,
    RestartJob,
    Rules,
    Start,
    Terminate,
    Tick,
    advance,
    contract,
    last_traceback,
)
from stretto.errors import UsageError

PYTHON = sys.executable
RULES = Rules(grace_s=10.0, max_restarts=1)


def play(*events: tuple[float, Event]) -> tuple[Group, list[list[Action]]]:
    group, log = Group(), []
    for now_s, event in events:
        group, actions = advance(group, event, now_s, RULES)
        log.append(actions)
    return group, log


def test_a_resize_stops_all_and_starts_as_many_as_are_wanted_by_then() -> None:
    group, log = play(
        (0, Resize(2)), (1, Resize(3)), (2, Resize(4)), (3, Exited(0, 0)), (3, Tick()), (4, Exited(1, -15))
    )
    assert log == [[Start(2, 0)], [Terminate(frozenset({0, 1}))], [], [], [], [Start(4, 0)]]
    assert (group.phase, group.size, group.starts) == (Phase.RUNNING, 4, 2)


def test_who_does_not_stop_in_time_is_killed_once() -> None:
    _, log = play((0, Resize(2)), (1, Resize(1)), (10.9, Tick()), (11, Tick()), (12, Tick()), (12, Exited(0, -9)))
    assert log[2:] == [[], [Kill(frozenset({0, 1}))], [], []]


def test_a_failure_stops_the_rest_and_restarts_until_none_is_left() -> None:
    failures = [(1, Exited(1, 5)), (2, Exited(0, 1)), (3, Exited(0, -11)), (4, Exited(1, 1))]
    group, log = play((0, Resize(2)), *failures)
    assert log == [[Start(2, 0)], [Terminate(frozenset({0}))], [Start(2, 1)], [Terminate(frozenset({1}))], []]
    assert (group.phase, group.exit_code) == (Phase.DONE, 128 + 11)


def test_the_job_ends_when_all_have_ended_by_themselves() -> None:
    group, _ = play((0, Resize(2)), (1, Exited(1, 0)), (2, Exited(0, 0)), (3, Resize(4)))
    assert (group.phase, group.exit_code) == (Phase.DONE, 0)


def test_it_can_be_suspended_and_cancelled() -> None:
    group, log = play((0, Resize(1)), (1, Resize(0)), (2, Exited(0, 0)), (3, Resize(2)), (4, Cancel()))
    assert log == [[Start(1, 0)], [Terminate(frozenset({0}))], [], [Start(2, 0)], [Terminate(frozenset({0, 1}))]]
    assert group.exit_code is None
    group, _ = play((0, Resize(1)), (1, Cancel()), (1, Resize(3)), (2, Exited(0, 0)))
    assert group.exit_code == 143
    assert play((0, Cancel()))[0].exit_code == 143


@given(
    st.lists(st.tuples(st.sampled_from(["resize", "fail", "end", "cancel", "late"]), st.integers(0, 3)), max_size=40)
)
def test_whatever_happens(story: list[tuple[str, int]]) -> None:
    """Never two sets of members at once, never more restarts than allowed, never a wait that nobody ends."""
    group, running, now_s, failures = Group(), set[int](), 0.0, 0
    for word, number in story:
        now_s += 1.0
        event: Event
        if word == "resize":
            event = Resize(number)
        elif word == "cancel":
            event = Cancel()
        elif word == "late":
            now_s, event = now_s + 20.0, Tick()
        elif not running:
            continue
        else:
            rank = sorted(running)[number % len(running)]
            running.discard(rank)
            failures += word == "fail" and group.phase is Phase.RUNNING
            event = Exited(rank, 1 if word == "fail" else 0)
        group, actions = advance(group, event, now_s, RULES)
        for action in actions:
            if isinstance(action, Start):
                assert not running
                assert action.size == group.wanted
                running = set(range(action.size))
            else:
                assert action.ranks == running
            if isinstance(action, Kill):
                running.clear()
                for rank in sorted(action.ranks):
                    group, more = advance(group, Exited(rank, -9), now_s, RULES)
                    running |= {rank for start in more if isinstance(start, Start) for rank in range(start.size)}
        assert group.alive == running
        assert group.restarts == min(failures, RULES.max_restarts) or group.phase is Phase.STOPPING
        assert (group.phase in (Phase.RUNNING, Phase.STOPPING)) == bool(running)
        assert (group.phase is Phase.DONE) == (group.exit_code is not None)
        assert group.phase is not Phase.STOPPING or group.deadline_s is not None


def test_the_contract_is_torchruns(tmp_path: Path) -> None:
    """Ask torchrun itself: the same names, and the same values where they are not chosen freely."""
    script = tmp_path / "script.py"
    script.write_text("import json, os; json.dump(dict(os.environ), open(os.environ['RANK'] + '.json', 'w'))")
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    subprocess.run([*words, str(script)], env=base, cwd=tmp_path, capture_output=True, check=True, timeout=120)
    lines = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for theirs in lines:
        rank = int(theirs["RANK"])
        ours = contract(rank, 2, 1, restarts=0, max_restarts=0, run_id="none", env=base)
        free = {
            "MASTER_PORT",
            "MASTER_ADDR",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
        }
        for name in (theirs.keys() | ours.keys()) - free - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}:
            assert ours.get(name) == theirs.get(name), name
        assert (theirs.keys() & free) - ours.keys() <= {"TORCHELASTIC_ERROR_FILE"}


MEMBER = """
import os, signal, sys, time
me = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(*me.values(), flush=True)
while not os.path.exists("finish"): time.sleep(0.005)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def job(
    folder: Path, text: str, size: int, warm: ForkServer, rules: Rules | None = None
) -> tuple[RestartJob, list[str]]:
    (folder / "script.py").write_text(text)
    told: list[str] = []
    command = [PYTHON, "script.py"]
    return RestartJob(command, size, logs=folder / "logs", cwd=folder, warm=warm, rules=rules, tell=told.append), told


def turn_until(job: RestartJob, size: int, lines: int) -> list[list[str]]:
    """Until that many members have written that many lines each; what they wrote last."""

    def texts() -> list[list[str]]:
        job.turn(0.02)
        logs = [job.logs / f"{rank}.log" for rank in range(size)]
        return [log.read_text().splitlines() if log.exists() else [] for log in logs]

    wait_until(lambda: all(len(text) >= lines for text in texts()))
    return [text[-1].split() for text in texts()]


def test_members_get_their_places_and_a_resize_gives_new_ones(folder: Path, bare: ForkServer) -> None:
    group, told = job(folder, MEMBER, 2, bare)
    with group:
        first = turn_until(group, 2, 1)
        group.resize(2)
        group.turn(0.0)
        assert group.group.starts == 1
        group.resize(3)
        wait_until(lambda: group.turn(0.02) is None and group.group.starts == 2)
        second = turn_until(group, 3, 1)
        second = turn_until(group, 2, 2) + second[2:]
        group.resize(0)
        wait_until(lambda: group.turn(0.02) is None and group.group.phase is Phase.IDLE)
        assert group.members == {}
        group.resize(1)
        third = turn_until(group, 1, 3)
        (folder / "finish").touch()
        assert group.run() == 0
    assert [line[:2] for line in first] == [["0", "2"], ["1", "2"]]
    assert [line[:2] for line in second] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert [line[:2] for line in third] == [["0", "1"]]
    assert len({line[2] for line in first}) == 1
    assert len({first[0][2], second[0][2], third[0][2]}) == 3
    assert {line[3] for line in first + second + third} == {"0"}
    assert told == []


def test_a_member_that_does_not_stop_is_killed_after_the_grace_period(folder: Path, bare: ForkServer) -> None:
    deaf = MEMBER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    group, _ = job(folder, deaf, 1, bare, Rules(grace_s=0.1))
    with group:
        turn_until(group, 1, 1)
        group.cancel()
        assert group.run() == 143


def test_a_failure_is_shown_once_and_restarts_are_bounded(folder: Path, bare: ForkServer) -> None:
    failing = MEMBER + "if os.environ['RANK'] == '1': raise ValueError('bad data')\n"
    group, told = job(folder, failing.replace("finish", "script.py"), 2, bare, Rules(max_restarts=2))
    with group:
        assert group.run() == 1
    assert [line.split(";")[0] for line in told if line.startswith("member")] == [
        "member 1 of 2 ended with exit code 1"
    ] * 3
    assert "restart 1 of 2" in told[0]
    assert "no restart is left (the same error as before)" in told[-1]
    assert sum("ValueError: bad data" in line for line in told) == 1
    counts = [line.split()[3] for line in (folder / "logs" / "1.log").read_text().splitlines() if line[:1] == "1"]
    assert counts == ["0", "1", "2"]


def test_a_killed_member_is_a_failure(folder: Path, bare: ForkServer) -> None:
    group, told = job(folder, MEMBER, 2, bare, Rules(max_restarts=0))
    with group:
        turn_until(group, 2, 1)
        group.members[0].kill()
        assert group.run() == 128 + signal.SIGKILL
    assert told == ["member 0 of 2 ended by signal 9; no restart is left"]


def test_the_traceback_of_this_run_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  old\nfine\n")
    assert last_traceback(log, log.stat().st_size) == ""
    assert last_traceback(log, 0).endswith("old\nfine")
    assert last_traceback(tmp_path / "none", 0) == ""


def test_a_size_below_zero_is_refused(folder: Path, bare: ForkServer) -> None:
    group, _ = job(folder, MEMBER, 0, bare)
    with group, pytest.raises(UsageError):
        group.resize(-1)


def test_a_plain_ddp_script_is_resized_and_goes_on(tmp_path: Path, torch_server: ForkServer) -> None:
    script = Path(__file__).parents[2] / "examples" / "ddp_restart.py"
    command = [PYTHON, str(script), "--checkpoint", str(tmp_path / "digits.pt"), "--steps", "400"]
    log = tmp_path / "logs" / "0.log"
    with RestartJob(command, 2, logs=tmp_path / "logs", warm=torch_server) as group:

        def until(text: str) -> None:
            wait_until(lambda: group.turn(0.01) is None and log.exists() and text in log.read_text())
            assert {member.how for member in group.members.values()} <= {"forked"}

        until("step 20 ")
        group.resize(3)
        until("with 3 ranks")
        group.resize(1)
        assert group.run() == 0
    text = log.read_text()
    starts = [(int(step), int(size)) for step, size in re.findall(r"started at step (\d+) with (\d+) ranks", text)]
    ends = [int(step) for step in re.findall(r"ended at step (\d+)", text)]
    assert [size for _, size in starts] == [2, 3, 1]
    assert [step for step, _ in starts] == [0, *ends[:2]]
    assert 0 < ends[0] < ends[1] < ends[2] == 400
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.1 < losses[0]
    assert float(re.findall(r"accuracy ([\d.]+)", text)[-1]) > 0.98
