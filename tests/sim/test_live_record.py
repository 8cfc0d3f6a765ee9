"""Records of live decisions: written whole, played again to the byte; nothing else is believed."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto import plugins
from stretto.cli.sim import replay as replay_command
from stretto.core import codec
from stretto.core.codec import CodecError
from stretto.core.cycle import LIVE, CycleState, Settings
from stretto.core.snapshot import IntArray, Snapshot
from stretto.errors import TraceError, UsageError
from stretto.sim import live_record
from stretto.sim.live_record import Recorder

RECORDS = sorted((Path(__file__).parent.parent / "data" / "live").glob("*.jsonl.gz"))


def record(path: Path, views: list[Snapshot], policy: str = "stretto", **chosen: Any) -> None:
    recorder, state = Recorder(path), CycleState()
    for view in views:
        state = recorder.decide(view, plugins.find(policy, {}), state, Settings(**chosen)).state
    recorder.close()


def some() -> list[Snapshot]:
    jobs = [job(min_workers=1, max_workers=4, workers=2, remaining=math.nan), job(size=2, lost_s=0.0), job(size=3)]
    return [view_of(4, jobs, now_s=now_s) for now_s in (10.0, 20.0, 400.0)]


@pytest.mark.parametrize("policy", ["stretto", "tiresias", "gavel", "themis", "round-robin"])
def test_what_was_recorded_is_decided_again(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some(), policy)
    assert live_record.is_live(path)
    assert live_record.of_this_kind(path)
    assert replay_command(path) == 0


def test_a_record_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some())
    record(path, some())
    assert len(path.read_text().splitlines()) == 7
    assert replay_command(path) == 0


def test_a_compressed_record_is_read_but_not_written(tmp_path: Path) -> None:
    path, packed = tmp_path / "record.jsonl", tmp_path / "record.jsonl.gz"
    record(path, some())
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert replay_command(packed) == 0
    with pytest.raises(UsageError, match="not compressed"):
        Recorder(packed)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(TraceError, match="cannot be read to its end"):
        replay_command(packed)


@pytest.mark.parametrize("half", ['{"policy": "str', "x" * 200_000])
def test_half_a_line_of_a_server_that_was_killed_is_left_out(tmp_path: Path, half: str) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some())
    with path.open("a") as file:
        file.write(half)
    record(path, some())
    assert len(path.read_text().splitlines()) == 7
    assert replay_command(path) == 0
    path.write_text(half)
    record(path, some())
    assert replay_command(path) == 0


def test_a_decision_that_cannot_be_recorded_is_made_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "record.jsonl")
    recorder.close()
    outcome = recorder.decide(some()[0], plugins.find("stretto", {}), CycleState(), Settings())
    assert outcome.workers.sum() == 4
    assert "could not be recorded" in caplog.text


def test_what_a_site_knows_besides_is_part_of_it(tmp_path: Path) -> None:
    class Half:
        def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
            return np.minimum(placed, 1)

        def after(self, view: Snapshot, placed: IntArray) -> Half:
            return self

    view = view_of([4], [job(min_workers=1, max_workers=4)])
    view = msgspec.structs.replace(view, placed=np.zeros((1, 1), np.int64))
    path = tmp_path / "record.jsonl"
    recorder = Recorder(path)
    outcome = recorder.decide(view, plugins.find("elastic-fifo", {}), CycleState(), LIVE, Half())
    recorder.close()
    assert outcome.workers.tolist() == [1]
    assert replay_command(path) == 0


def test_another_decision_is_found_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some())
    lines = path.read_text().splitlines()
    line = json.loads(lines[2])
    line["outcome"]["fields"]["wake_s"] = 1.5
    path.write_text("\n".join([*lines[:2], json.dumps(line), lines[3]]) + "\n")
    assert replay_command(path) == 1
    assert "different at line 3 (20 s): another wake_s" in capsys.readouterr().err


NOTHING = {"policy": "fifo", "options": {}, "outcome": {"fields": {}}}


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[1]", "5", *map(json.dumps, (
        NOTHING, NOTHING | {"view": 1, "state": 2, "settings": 3, "fits": 4}, NOTHING | {"policy": 5},
        NOTHING | {"options": 7}, NOTHING | {"outcome": 3}, NOTHING | {"view": {"$struct": "os:system"}},
    ))],
)  # fmt: skip
def test_a_damaged_record_says_where(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some()[:1])
    path.write_text(path.read_text().splitlines()[0] + f"\n{damage}\n")
    with pytest.raises(TraceError, match="line 2"):
        replay_command(path)


def test_a_decision_without_sense_says_where(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record(path, some()[:1])
    first, second = path.read_text().splitlines()
    line = json.loads(second)
    line["view"]["fields"]["job"] = None
    path.write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(TraceError, match="line 2: it cannot be decided again"):
        replay_command(path)


def test_a_record_without_decisions_is_not_the_same(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record(path, [])
    with pytest.raises(TraceError, match="no decision in it"):
        replay_command(path)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_of_real_systems(path: Path) -> None:
    """On the kind of machine that they come from to the byte; elsewhere what was decided is the same. After a change of
    what is decided `make stories` writes today's outcomes into them."""
    if os.environ.get("REWRITE"):
        rewrite(path)
    if live_record.of_this_kind(path):
        assert replay_command(path) == 0
        return
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file][1:]
    assert lines
    for line in lines:
        view, state, chosen, fits = (codec.rich(line[name]) for name in ("view", "state", "settings", "fits"))
        policy = plugins.find(line["policy"], line["options"])
        again = codec.plain(live_record.decide_again(view, policy, state, chosen, fits))["fields"]
        for name in ("workers", "pool", "placed", "reason", "about"):
            assert again[name] == line["outcome"]["fields"][name]


def rewrite(path: Path) -> None:
    with gzip.open(path, "rt") as file:
        _, *lines = [json.loads(line) for line in file]
    header = msgspec.to_builtins(live_record.header())
    for line in lines:
        view, state, chosen, fits = (codec.rich(line[name]) for name in ("view", "state", "settings", "fits"))
        policy = plugins.find(line["policy"], line["options"])
        line["outcome"] = codec.plain(live_record.decide_again(view, policy, state, chosen, fits))
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *lines))


def test_there_are_records_of_both_kinds() -> None:
    assert {path.name.split("-")[0] for path in RECORDS} == {"local", "kubernetes"}


# Values.


class Pair(NamedTuple):
    first: int
    second: float


class Nested(msgspec.Struct, frozen=True):
    pair: Pair
    table: dict[int, tuple[float, ...]]


def test_values_come_back_as_they_were() -> None:
    value = Nested(Pair(1, math.inf), {3: (0.1, -0.0, math.nan), -4: ()})
    again = codec.rich(json.loads(json.dumps(codec.plain(value))), {__name__})
    assert repr(again) == repr(value)
    with pytest.raises(CodecError, match="not made"):
        codec.rich(codec.plain(value))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=25)
@given(snapshots(pools=2, placed=True))
def test_snapshots_come_back_as_they_were(view: Snapshot) -> None:
    text = json.dumps(codec.plain(view))
    assert json.dumps(codec.plain(codec.rich(json.loads(text)))) == text


@pytest.mark.parametrize(
    "foreign",
    [
        {"$struct": "os:system", "fields": {}},
        {"$struct": "stretto.core.cycle:decide", "fields": {}},
        {"$array": "<f8", "shape": [2], "data": "AAAA"},
        {"$what": 1},
        {"$struct": "stretto.core.cycle:Settings", "fields": {"placement": "", "no": 1}},
    ],
)
def test_what_is_not_ours_is_refused(foreign: Any) -> None:
    with pytest.raises(CodecError):
        codec.rich(foreign)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(), st.lists))
def test_plain_values(value: Any) -> None:
    assert repr(codec.rich(json.loads(json.dumps(codec.plain(value))))) == repr(value)


@pytest.mark.parametrize("where", ["/dev/full", "taken/record.jsonl", "folder"])
def test_where_nothing_can_be_recorded_that_is_said_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=str(tmp_path / where)) as refused:
        Recorder(tmp_path / where)
    assert "--record" in refused.value.hint
