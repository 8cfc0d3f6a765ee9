"""The command line from outside: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.sim import runner

DATA = Path(__file__).parent.parent / "data"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SIXTY = str(DATA / "tiresias" / "60_job.csv")
KEYS = [
    "jobs", "avg_jct_s", "p50_jct_s", "p99_jct_s", "avg_wait_s", "makespan_s", "utilisation", "useful_utilisation",
    "preemptions", "resizes", "worst_ftf", "deadlines_met", "lower_bound_avg_jct_s", "lower_bound_makespan_s", "cpu_s",
    "peak_rss_mib",
]  # fmt: skip


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> object:
        assert self.code == 0, self.err
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture
def stretto(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(*words: str) -> Ran:
        code = main(words)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return call


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,4,100\nb,10,2,20\nc,20,2,5\n")
    return str(path)


def test_json_of_a_run(stretto) -> None:  # type: ignore[no-untyped-def]
    found = stretto(
        "sim", "run", SIXTY, "--format", "tiresias", "--cluster", "2x4", "--policy", "fifo", "--json"
    ).json()
    assert list(found)[:16] == KEYS
    assert found["jobs"] == 60
    assert found["avg_jct_s"] == pytest.approx(1556.483, abs=5e-4)
    assert found["p50_jct_s"] == 1415.5
    assert found["p99_jct_s"] == pytest.approx(3979.89)
    assert found["makespan_s"] == 5747
    assert found["deadlines_met"] is None
    assert found["lower_bound_avg_jct_s"] == pytest.approx(333.67, abs=0.01)
    assert found["lower_bound_makespan_s"] == 3337.5
    assert 0 < found["cpu_s"] < 60
    assert found["peak_rss_mib"] > 10


def test_table_of_a_run(stretto, jobs: str) -> None:  # type: ignore[no-untyped-def]
    ran = stretto("sim", "run", jobs, "--cluster", "1x4", "--policy", "srtf")
    assert ran.out.startswith("srtf on jobs: 3 jobs, 4 GPUs\n")
    assert "makespan_s              120.00\n" in ran.out
    assert ran.err == ""


def test_settings_reach_policy_and_world(stretto, jobs: str) -> None:  # type: ignore[no-untyped-def]
    words = ("sim", "run", jobs, "--cluster", "1x4", "--json", "--policy")
    slow = stretto(*words, "tiresias", "--set", "start_s=5", "--set", "queues=10,20").json()
    fast = stretto(*words, "tiresias", "--set", "queues=10,20").json()
    assert slow["makespan_s"] > fast["makespan_s"]
    assert fast != stretto(*words, "tiresias", "--set", "queues=1e9,2e9").json()


def test_tight_bounds(stretto, jobs: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("sim", "run", jobs, "--policy", "srtf", "--bound", "dual", "--json", "--cluster")
    found = stretto(*words, "1x4").json()
    assert 0 < found["dual_bound_avg_jct_s"] <= found["avg_jct_s"]
    assert "lp_bound_makespan_s" not in found
    found = stretto(*words, str(EXAMPLES / "mixed-cluster.csv")).json()
    assert 0 < found["lp_bound_makespan_s"] <= found["makespan_s"]
    assert "dual_bound_avg_jct_s" not in found


def test_policies_that_adapt_the_batch_get_such_a_trace() -> None:
    path = DATA / "pollux" / "workload-6.csv"
    fixed, adaptive = runner.prepare_all([path], "pollux", "16x4", ["fifo", "pollux"], {})
    assert not fixed.trace.phases
    assert adaptive.trace.phases
    assert not runner.prepare(path, "pollux", "16x4", "pollux", {"batch": "fixed"}).trace.phases


def test_compare(stretto, jobs: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "all.csv"
    words = ("sim", "compare", jobs, "--cluster", "1x4", "--policies", "fifo, srtf")
    found = stretto(*words, "--json", "--csv", str(out)).json()
    assert [(each["policy"], each["makespan_s"]) for each in found] == [("fifo", 120), ("srtf", 120)]
    assert out.read_text().splitlines()[1].split(",")[0] == "3"
    lines = stretto(*words).out.splitlines()
    assert lines[0].startswith("jobs: 3 jobs on 4 GPUs")
    assert [line.split()[0] for line in lines[2:]] == ["fifo", "srtf"]


def test_a_setting_of_one_policy_does_not_disturb_the_others(stretto, jobs: str) -> None:  # type: ignore[no-untyped-def]
    words = ("sim", "compare", jobs, "--cluster", "1x4", "--policies", "fifo,tiresias", "--set", "queues=10,20")
    assert len(stretto(*words, "--json").json()) == 2


def test_report(stretto, jobs: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out"
    ran = stretto("sim", "report", jobs, "--cluster", "1x4", "--policies", "fifo,srtf", "--out", str(out))
    assert ran.out.splitlines() == [str(path) for path in map(Path, ran.out.splitlines()) if path.is_file()]
    assert (out / "report.html").is_file()


def test_timeline(stretto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    png = tmp_path / "new" / "two.png"
    two = str(EXAMPLES / "two-jobs.csv")
    ran = stretto("sim", "timeline", two, "--cluster", "1x6", "--policies", "fifo", "--png", str(png))
    assert ran.out.startswith("fifo: all done after 960 s")
    assert "second │" in ran.out
    assert png.is_file()
    assert stretto("sim", "timeline", SIXTY, "--format", "tiresias", "--cluster", "2x4").code == 2


def test_why(stretto, jobs: str) -> None:  # type: ignore[no-untyped-def]
    words = ("sim", "why", jobs, "--cluster", "1x4", "--policy", "srtf", "--job")
    ran = stretto(*words, "a")
    assert [line.split()[2] for line in ran.out.splitlines()] == ["4", "0", "0", "4", "0"]
    assert "stopped: jobs ahead of it left 2 GPUs, it needs 4" in ran.out
    assert stretto(*words, "a", "--json").json()["finish_s"] == 120
    ran = stretto(*words, "z")
    assert ran.code == 2
    assert "known: a, b, c" in ran.err


def test_record_and_replay(stretto, jobs: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kept = str(tmp_path / "run.jsonl")
    words = ("sim", "run", jobs, "--cluster", "1x4", "--policy", "srtf", "--json")
    plain, recorded = stretto(*words).json(), stretto(*words, "--record", kept).json()
    assert {**plain, "cpu_s": 0, "peak_rss_mib": 0} == {**recorded, "cpu_s": 0, "peak_rss_mib": 0}
    assert stretto("sim", "replay", kept).out.startswith("the same: ")
    Path(jobs).write_text("job_id,submit_s,gpus,duration_s\na,0,4,101\n")
    ran = stretto("sim", "replay", kept)
    assert ran.code == 1
    assert "different at line 2" in ran.err


def test_trace_commands(stretto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = tmp_path / "made.csv"
    assert stretto("trace", "gen", "--set", "jobs=30", "--set", "elastic=0.5", "--out", str(made)).code == 0
    assert stretto("trace", "gen", "--set", "jobs=30", "--set", "elastic=0.5").out == made.read_text()
    found = stretto("trace", "info", SIXTY, "--format", "tiresias", "--cluster", "2x4", "--json").json()
    assert (found["jobs"], found["jobs_by_gpus"]) == (60, {"1": 30, "2": 10, "4": 10, "8": 10})
    assert found["offered_load"] == pytest.approx(26625 / 1779 / 8, rel=1e-3)
    converted = tmp_path / "plain.csv"
    assert stretto("trace", "convert", SIXTY, "--format", "tiresias", "--out", str(converted)).code == 0
    words = ("--cluster", "2x4", "--policy", "srtf", "--json")
    before = stretto("sim", "run", SIXTY, "--format", "tiresias", *words).json()
    after = stretto("sim", "run", str(converted), *words).json()
    assert before["avg_jct_s"] == after["avg_jct_s"]


def test_policy_commands(stretto) -> None:  # type: ignore[no-untyped-def]
    names = [row["name"] for row in stretto("policy", "list", "--json").json()]
    assert {"fifo", "srtf", "tiresias"} <= set(names)
    assert stretto("policy", "list").out.count("\n") == len(names)
    found = stretto("policy", "show", "las", "--json").json()
    assert found["name"] == "tiresias"
    assert "queues" in [option["name"] for option in found["options"]]
    assert all(option["help"] for option in found["options"])
    assert "Options (--set key=value):" in stretto("policy", "show", "tiresias").out
    example = stretto("policy", "show", str(EXAMPLES / "widest_first.py")).out
    assert "  spare_gpus = 0    GPUs that are never given out." in example


def test_job_commands(stretto, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert "properties" in stretto("job", "schema").json()
    bad = tmp_path / "bad.yaml"
    bad.write_text("nmae: x\n")
    for text, told in (
        ("run: x\n", "1 worker"),
        ("run: x\nworkers: 2\n", "2 workers"),
        ("run: x\nelastic: {max: 4}\n", "1..4 workers, asks for 4"),
        ("run: x\nworkers: 2\nelastic: {max: 4}\n", "1..4 workers, asks for 2"),
        ("run: x\nservice: {port: 80, replicas: {min: 1, max: 3}}\n", "1..3 replicas"),
    ):
        good = tmp_path / "good.yaml"
        good.write_text(text)
        assert stretto("job", "check", str(good)).out == f"{good}: ok: {told}\n"
    ran = stretto("job", "check", str(bad))
    assert ran.code == 2
    assert "bad.yaml" in ran.err or "nmae" in ran.err


# Bad input: a message, a hint, an exit code; never a traceback, never a number.


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        ("sim run none.csv --cluster 1x4 --policy fifo", 2, "none.csv"),
        ("sim run {jobs} --cluster 1x4 --policy fifoo", 2, "did you mean 'fifo'"),
        ("sim run {jobs} --cluster 1x4 --policy none.py", 2, "none.py"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set qeues=1", 2, "known: "),
        ("sim run {jobs} --cluster 1x4 --policy tiresias --set qeues=1", 2, "did you mean 'queues'"),
        ("sim run {jobs} --cluster 1x4 --policy tiresias --set queues=abc", 2, "queues"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set start_s", 2, "key=value"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set start_s=-1", 2, "start_s"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set start_s=nan", 2, "start_s"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set start_s=1 --set start_s=2", 2, "twice"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set lengths=maybe", 2, "lengths"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set placement=nowhere", 2, "known: "),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set failures=5:7", 2, "no node 7"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --set failures=soon", 2, "SECONDS:NODE"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --format word", 2, "known: csv"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --format tiresias", 2, "num_gpu"),
        ("sim run {jobs} --cluster 4 --policy fifo", 2, "NODESxGPUS"),
        ("sim run {jobs} --cluster 0x4 --policy fifo", 2, "no GPUs"),
        ("sim run {jobs} --cluster 999999999x8 --policy fifo", 2, "larger"),
        ("sim run {jobs} --cluster {jobs} --policy fifo", 2, "nodes"),
        ("sim run {jobs} --cluster 1x2 --policy fifo", 2, "job 'a' needs 4 GPUs"),
        ("sim run {jobs} --policy fifo", 2, "--cluster"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --fast", 2, "--fast"),
        ("sim run {jobs} --cluster 1x4 --policy fifo --record /nonexistent/file", 1, "/nonexistent/file"),
        ("sim compare --cluster 1x4 --policies fifo", 2, "no trace"),
        ("sim compare {jobs} --cluster 1x4 --policies ,", 2, "no policy"),
        ("sim replay none.jsonl", 2, "none.jsonl"),
        ("sim replay {jobs}", 2, "line 1"),
        ("sim replay ", 2, "no record is given"),
        ("sim replay {folder}", 2, "is a folder"),
        ("sim replay {binary}", 2, "is not text"),
        ("sim replay /dev/null", 2, "not an ordinary file"),
        ("sim run {folder} --cluster 1x4", 2, "is a folder"),
        ("sim run  --cluster 1x4", 2, "no trace file is given"),
        ("sim run {binary} --cluster 1x4", 2, "not a CSV text file"),
        ("sim run {jobs} --cluster {folder}", 2, "is a folder"),
        (
            "sim run {jobs} --cluster 1x4 --policy stretto --set quantum_s=0",
            2,
            "quantum_s is 0; it must be a number from",
        ),
        ("sim run {jobs} --cluster 1x4 --policy {folder}", 2, "does not exist"),
        ("trace info {folder}", 2, "is a folder"),
        ("trace convert {binary} --format gavel", 2, "is not a text file"),
        ("job check {folder}", 2, "Is a directory"),
        ("job check {binary}", 2, "not a text file"),
        ("lab field --data {folder} --results {binary}", 2, "not a file of results"),
        ("sim rum", 2, "run"),
        ("simulate", 2, "sim"),
        ("policy show nobody", 2, "known: "),
        ("trace gen --set jobs=-1", 2, "jobs"),
        ("trace gen --set colour=red", 2, "known: "),
        ("trace info {jobs} --set colour=red", 2, "colour"),
        ("job check none.yaml", 2, "none.yaml"),
    ],
)
def test_bad_input(stretto, jobs: str, tmp_path: Path, words: str, code: int, word: str) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "folder"
    folder.mkdir()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    ran = stretto(*words.format(jobs=jobs, folder=folder, binary=binary).split(" "))
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert word in ran.err
    assert "Traceback" not in ran.err


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


@pytest.mark.parametrize(
    ("words", "light"),
    [
        (["version"], {"numpy", "scipy", "matplotlib", "pydantic", "stretto.sim"}),
        (["--help"], {"numpy", "scipy", "matplotlib", "pydantic", "stretto.sim"}),
        (["policy", "list"], {"scipy", "matplotlib", "pydantic", "stretto.sim"}),
        (["job", "schema"], {"scipy", "matplotlib", "stretto.sim"}),
        (
            ["sim", "run", SIXTY, "--format", "tiresias", "--cluster", "2x4", "--policy", "fifo"],
            {"scipy", "matplotlib"},
        ),
    ],
)
def test_commands_import_only_what_they_need(words: list[str], light: set[str]) -> None:
    code = f"import sys; from stretto.cli import main; main({words!r}); print(); print(*sys.modules)"
    loaded = set(run_python(code).splitlines()[-1].split())
    assert not loaded & light
    assert "stretto.errors" in loaded


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m stretto.cli trace gen --set jobs=50000 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0
    assert done.stderr == ""
