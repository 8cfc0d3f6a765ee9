"""The simple formats are read exactly, and a file that cannot be read is refused with the row to look at."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError, TraceError, UsageError
from stretto.sim import readers
from stretto.sim.readers import plain, throughputs
from stretto.sim.trace import Trace

DATA = Path(__file__).parent.parent / "data"
HEADER = "job_id,submit_s,gpus,duration_s"


def read_text(folder: Path, text: str, format: str = "csv", **settings: str) -> Trace:
    path = folder / "jobs.csv"
    path.write_text(text, encoding="utf-8")
    return readers.read(path, format, settings)


def rejected(folder: Path, text: str, format: str = "csv", **settings: str) -> TraceError:
    with pytest.raises(TraceError) as error:
        read_text(folder, text, format, **settings)
    return error.value


def test_tiresias_trace() -> None:
    trace = readers.read(DATA / "tiresias" / "60_job.csv", "tiresias")
    assert len(trace) == 60
    assert trace.ids[:3] == ("0", "1", "2")
    assert trace.requested[:3].tolist() == [1, 8, 2]
    assert trace.duration_s.mean() == pytest.approx(178.41666666666666)
    assert trace.classes[trace.klass[0]] == "vgg19"
    assert not trace.elastic


def test_philly_trace_is_sorted_and_starts_at_zero() -> None:
    path = DATA / "philly" / "philly_200.csv"
    trace = readers.read(path, "philly")
    lines = path.read_text().splitlines()[1:]
    times = np.array([line.split(",")[0].replace(" ", "T") for line in lines], "datetime64[s]").astype(np.int64)
    order = sorted(range(200), key=lambda i: (times[i], i))
    assert trace.ids == tuple(str(i) for i in order), "the id is the row, the first one below the header being 0"
    assert trace.submit_s.tolist() == (times[order] - times.min()).tolist()
    assert trace.duration_s.tolist() == [float(lines[i].split(",")[1]) for i in order]


@pytest.mark.parametrize("stamp", ["yesterday", "", "2017-13-45 00:00:00"])
def test_philly_bad_timestamp_names_the_row(tmp_path: Path, stamp: str) -> None:
    text = f"timestamp,duration,num_gpus\n2017-10-09 07:01:55,66.0,1\n{stamp},5,1\n"
    assert "row 3" in str(rejected(tmp_path, text, "philly"))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("b,5,1,-3", "duration"),
        ("b,5,0,3", "gpus"),
        ("b,5,-2,3", "gpus"),
        ("b,5,1.5,3", "gpus"),
        ("b,5,1e300,3", "gpus"),
        ("b,5,999999999,3", "gpus"),
        ("b,5,x,3", "gpus"),
        ("b,5,1,nan", "duration_s"),
        ("b,5,1,inf", "duration_s"),
        ("b,,1,3", "submit_s"),
        ("b,1.7e15,1,3", "submit time"),
        (",5,1,3", "id"),
        ("a,5,1,3", "row 2"),
        ("b,5,1", "duration_s"),
        ("b,5,1,3,4", "more cells"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, row: str, word: str) -> None:
    message = str(rejected(tmp_path, f"{HEADER}\na,0,1,10\n{row}\n"))
    assert "row 3" in message
    assert word in message


def test_row_numbers_count_blank_lines(tmp_path: Path) -> None:
    assert "row 5" in str(rejected(tmp_path, f"{HEADER}\na,0,1,10\n\n,,,\nb,5,1,-1\n"))


def test_spreadsheet_habits_are_forgiven(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "\ufeffjob_id, submit_s,gpus,duration_s,\r\nb , 50,1,10,\r\na,0,1,10,\r\n,,,,\r\n")
    assert trace.ids == ("a", "b")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "job_id"),
        ("job_id,submit_s,gpus\na,0,1\n", "duration_s"),
        (f"{HEADER}\n", "no jobs"),
        (f"{HEADER},gpus\na,0,1,1,1\n", "twice"),
        (f"{HEADER},colour\na,0,1,1,red\n", "colour"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    assert word in str(rejected(tmp_path, text))


@pytest.mark.parametrize("format", list(readers.FORMATS))
@given(junk=st.binary(max_size=200))
def test_junk_is_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, format: str, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"junk-{format}"
    path.write_bytes(junk)
    with pytest.raises(StrettoError):
        readers.read(path, format)


@pytest.mark.parametrize("format", ["tiresias", "philly", "csv"])
def test_missing_file_and_unknown_option(tmp_path: Path, format: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        readers.read(tmp_path / "none.csv", format)
    (tmp_path / "some.csv").write_text("x")
    with pytest.raises(UsageError, match="colour"):
        readers.read(tmp_path / "some.csv", format, {"colour": "red"})


def test_unsorted_rows_give_the_same_trace(tmp_path: Path) -> None:
    rows = ["c,70,1,5", "a,10,2,3", "b,10,1,4"]
    one = read_text(tmp_path, "\n".join([HEADER, *rows]))
    two = read_text(tmp_path, "\n".join([HEADER, *reversed(rows)]))
    assert one.ids == two.ids == ("a", "b", "c")
    assert one.submit_s.tolist() == two.submit_s.tolist() == [0, 0, 60]
    assert one.duration_s.tolist() == two.duration_s.tolist()


# Elastic jobs and services of the plain format.


def test_speedup_as_points(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER},speedup\na,0,2,100,1:1;2:1.8;4:3\n")
    assert (trace.min_workers[0], trace.max_workers[0]) == (1, 4)
    assert trace.rates[0, trace.curve[0]].tolist() == pytest.approx([0, 1, 1.8, 2.4, 3])
    assert trace.work[0] == pytest.approx(180), "100 s on 2 workers"


def test_speedup_as_exponent(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER},min,max,speedup\na,0,4,100,2,9,0.5\n")
    assert trace.rates[0, trace.curve[0], :10].tolist() == pytest.approx([n**0.5 for n in range(10)])
    assert trace.work[0] == pytest.approx(200)
    assert (trace.min_workers[0], trace.max_workers[0]) == (2, 9)


def test_default_speedup_from_the_options(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER},speedup\na,0,4,100,\nb,0,4,100,0.5\n", speedup="linear")
    assert trace.rates[0, trace.curve, 4].tolist() == [4, 2]


def test_rigid_beside_elastic(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER},speedup\na,0,2,100,\nb,0,4,100,linear\n")
    assert trace.min_workers.tolist() == [2, 1]
    assert trace.rates[0, trace.curve[0], :3].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "cells",
    [
        "min,max\n{},1,4",
        "work\n{},5",
        "speedup\n{},2",
        "speedup\n{},-0.5",
        "speedup\n{},fast",
        "speedup\n{},1:1;2:-0.5",
        "speedup\n{},2:1;1:0.5",
        "speedup\n{},1:;2:3",
        "speedup\n{},0:1",
        "speedup\n{},1.5:1",
        "speedup,min,max\n{},linear,5,2",
        "speedup,min\n{},linear,0",
        "speedup,max\n{},linear,1e9",
        "gpu_milli\n{},0",
        "cpu_milli\n{},-1",
        "priority\n{},high",
        "load\n{},5:1;2:1",
        "load\n{},0:-1",
        "load\n{},0:1.5",
        "level\n{},steel",
        "start_s\n{},-1",
        "start_s\n{},never",
        "resize_s\n{},cheap",
        "checkpoint_s\n{},-5",
        "preemptible\n{},maybe",
    ],
)
def test_bad_elastic_cells_name_the_row(tmp_path: Path, cells: str) -> None:
    assert "row 2" in str(rejected(tmp_path, f"{HEADER}," + cells.format("a,0,1,10") + "\n"))


def test_service_times_shift_with_the_trace(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER},load\nweb,100,2,500,100:1;160:2\n")
    load = trace.services[0]
    assert load is not None
    assert load.at_s.tolist() == [0, 60]
    assert load.wanted.tolist() == [1, 2]


def assert_same(one: Trace, two: Trace) -> None:
    for name in ("ids", "classes"):
        assert getattr(one, name) == getattr(two, name)
    columns = ("submit_s", "requested", "min_workers", "max_workers", "work", "duration_s", "deadline_s", "priority")
    for name in (*columns, "klass", "width", "demand"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    for j in range(len(one)):
        low, high = int(one.min_workers[j]), int(one.max_workers[j])
        sizes = np.arange(low, high + 1)
        before = one.rates[0, one.curve[j], np.minimum(sizes, one.rates.shape[2] - 1)]
        after = two.rates[0, two.curve[j], np.minimum(sizes, two.rates.shape[2] - 1)]
        assert np.array_equal(before, after), one.ids[j]


@pytest.mark.parametrize(("path", "format"), [("tiresias/60_job.csv", "tiresias"), ("itp/cluster01.csv", "itp")])
def test_conversion_loses_nothing(tmp_path: Path, path: str, format: str) -> None:
    before = readers.read(DATA / path, format)
    out = io.StringIO()
    plain.write(plain.rows_of(before), out)
    assert_same(before, read_text(tmp_path, out.getvalue()))


def test_what_plain_cannot_say_is_refused(tmp_path: Path) -> None:
    import msgspec

    trace = msgspec.structs.replace(read_text(tmp_path, f"{HEADER}\na,0,1,1\n"), pools=("v100", "k80"))
    with pytest.raises(TraceError, match="cannot be written"):
        plain.rows_of(trace)


@pytest.mark.parametrize("text", ["", "batch,one\n", "batch,1\nx,2\n", "batch,1\n16,fast\n", "batch,1\n\n"])
def test_throughputs_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.csv").write_text(text)
    with pytest.raises(TraceError, match=r"model\.csv' cannot be read"):
        throughputs.load(str(tmp_path))


def test_no_set_of_throughputs_is_not_the_current_folder() -> None:
    with pytest.raises(UsageError, match="unknown set of throughputs ''"):
        throughputs.load("")
