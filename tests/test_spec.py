"""The job file: what is accepted and what it turns into; what is refused, and how helpfully."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from stretto import spec
from stretto.core.request import POWERS_OF_TWO
from stretto.errors import SpecError

FULL = """\
name: mnist
queue: team-a
priority: 60
run: python train.py --lr $LR
setup: pip install -r requirements.txt
workdir: ./code
env: {LR: 1e-3, DEBUG: yes, N: 08}
workers: 4
elastic: {min: 1, max: 8, step: pow2}
resources: {gpu: 0.25, gpu_memory: 4Gi, gpu_type: [v100, a100], cpu: 500m, memory: 1.5Gi}
roles:
  ps: {count: 2, run: python ps.py, resources: {gpu: 0, cpu: 1}}
deadline: 1h30m
expect: 2h
after: [prepare]
stop: {after: 4h, grace: 10s}
checkpoint: {dir: ./ckpt, every: 5m, keep: 2}
consistency: bitwise
hyperparameters: {epochs: 10, model: resnet50, amp: true}
notify: [https://hooks.example/abc]
"""


def problems(text: Any) -> list[tuple[int, str, str]]:
    with pytest.raises(SpecError) as caught:
        spec.load(text)
    return [tuple(problem) for problem in caught.value.problems]


def test_only_run_is_needed() -> None:
    request = spec.load("run: python train.py").request()
    assert (request.min_workers, request.max_workers, request.requested) == (1, 1, 1)
    assert request.width_milli == 1000
    assert request.demand == (0, 0, 0)
    assert request.level == "rigid"
    assert request.deadline_s == math.inf
    assert request.klass == "python train.py"


def test_what_a_length_depends_on_in_the_units_of_the_core() -> None:
    fields = {"model": "m" * 100, "epochs": 10, "amp": True, "vast": 10**400, "lr": 1e-3}
    request = spec.load({"run": "x", "hyperparameters": fields, "expect": "5000 steps"}).request()
    kept = dict(request.hyperparameters)
    assert kept == {"amp": 1.0, "epochs": 10.0, "lr": 1e-3, "model": "m" * 64, "vast": "beyond all numbers"}
    assert (request.expect_s, request.expect_steps) == (0.0, 5000)
    assert spec.load("run: x\nexpect: 1h30m").request().expect_s == 5400.0
    many = {f"p{i}": i for i in range(1000)}
    assert len(spec.load({"run": "x", "hyperparameters": many}).request().hyperparameters) == 32


@pytest.mark.parametrize(
    ("fields", "asked"),
    [({}, 1), ({"workers": 3}, 3), ({"elastic": {"min": 2, "max": 8}}, 8),
     ({"workers": 4, "elastic": {"min": 2, "max": 8}}, 4), ({"service": {"port": 80, "replicas": {"max": 5}}}, 5)],
)  # fmt: skip
def test_what_a_job_asks_for(fields: dict[str, Any], asked: int) -> None:
    job = spec.load({"run": "x", **fields})
    assert job.asks_for == job.request().requested == asked


@pytest.mark.parametrize(
    "expect",
    ["-5s", 0, "0s", "1e400", "nan", math.nan, math.inf, -math.inf, "5 parsecs", "1h 5", "", True, "99999999999d",
     "0 steps", "-3 steps", "1.5 steps", "9999999999999999 steps", 10**400],
)  # fmt: skip
def test_lengths_that_are_none(expect: Any) -> None:
    ((_, field, text),) = problems({"run": "x", "expect": expect})
    assert field == "expect"
    assert text.split("; ")[1].startswith(("give a time", "write a time", "a job has")), "says what to write instead"


def test_a_full_file_in_the_units_of_the_core() -> None:
    job = spec.load(FULL)
    request = job.request()
    assert request.name == request.klass == "mnist"
    assert (request.min_workers, request.max_workers, request.requested) == (1, 8, 4)
    assert request.step == POWERS_OF_TWO
    assert request.sizes() == (1, 2, 4, 8)
    assert request.width_milli == 250
    assert request.demand == (500, 1536, 4096)
    assert request.pools == ("v100", "a100")
    assert request.deadline_s == 5400
    assert request.fixed_milli == 0
    assert request.level == "elastic"
    assert job.env == {"LR": "1e-3", "DEBUG": "yes", "N": "08"}, "variables are text, as written"
    assert job.stop.after == 14400


def test_a_list_is_a_program_with_arguments_and_command_is_run() -> None:
    assert spec.load("command: [python, train.py, --n, 4]").run == ("python", "train.py", "--n", "4")
    assert spec.load({"run": ["python", "x y"]}).run == ("python", "x y")


def test_a_service() -> None:
    job = spec.load("run: serve\nservice: {port: 8000, replicas: {min: 2, max: 6}, target: {requests: 50}}")
    request = job.request()
    assert request.is_service
    assert (request.min_workers, request.max_workers, request.priority) == (2, 6, 80)


def test_several_gpus_need_their_memory_on_each() -> None:
    assert spec.load("run: x\nresources: {gpu: 4, gpu_memory: 16Gi}").request().gpu_memory_mib == 4 * 16384


def test_a_share_by_memory_alone() -> None:
    request = spec.load("run: x\nresources: {gpu_memory: 4Gi}").request()
    assert request.width_milli == 0
    assert request.share_milli(16384) == 250
    assert request.share_milli(1024) == 1000


def test_fixed_roles_take_gpus_once() -> None:
    job = spec.load("run: x\nroles: {ps: {count: 3, resources: {gpu: 0.5}}, master: {}}")
    assert job.request().fixed_milli == 1500


@pytest.mark.parametrize(
    ("text", "mib"),
    [("512Mi", 512), ("4Gi", 4096), ("1.5Gi", 1536), ("1G", 954), ("100MB", 96), ("2 GiB", 2048), ("1Ki", 1)],
)
def test_memory_units(text: str, mib: int) -> None:
    assert spec.load({"run": "x", "resources": {"memory": text}}).request().memory_mib == mib


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30s", 30), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("500ms", 0.5), (90, 90), ("1h 5m", 3900)],
)
def test_lengths_of_time(value: Any, seconds: float) -> None:
    assert spec.load({"run": "x", "deadline": value}).deadline == seconds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", 4), ("memory", "4"), ("memory", "4Gib!"), ("memory", "-1Gi"), ("memory", "9999999999Ti"),
        ("cpu", 0), ("cpu", "2 cores"), ("cpu", True), ("cpu", math.nan), ("cpu", -1), ("cpu", 1e300),
        ("gpu", 1.5), ("gpu", -1), ("gpu", "a"), ("gpu", math.inf), ("gpu", 5000), ("gpu_memory", 0),
    ],
)  # fmt: skip
def test_quantities_that_make_no_sense(field: str, value: Any) -> None:
    [(_, where, text)] = problems({"run": "x", "resources": {field: value}})
    assert where == f"resources.{field}"
    assert ";" in text, "it says what to write instead"


@pytest.mark.parametrize("value", ["", "soon", "5x", 0, -1, "1h30", math.inf, True, "5m5"])
def test_times_that_make_no_sense(value: Any) -> None:
    [(_, where, _)] = problems({"run": "x", "deadline": value})
    assert where == "deadline"


# Errors: every one at once, with line, field and what to change.


def test_all_problems_are_told_at_once_in_order_of_line() -> None:
    text = """\
name: My Job
prioriy: 50
elastic: {min: 8, max: 2}
resources:
  gpu: 1.5
  mem: 4Gi
level: elastc
workers: 0
cpu: 4
priority: high
name: again
"""
    assert [(line, field) for line, field, _ in problems(text)] == [
        (1, "name"), (1, "run"), (2, "prioriy"), (3, "elastic"), (5, "resources.gpu"), (6, "resources.mem"),
        (7, "level"), (8, "workers"), (9, "cpu"), (10, "priority"), (11, "name"),
    ]  # fmt: skip


def test_the_message_reads_well(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("run: x\nresources:\n  memry: 4Gi\n")
    with pytest.raises(SpecError) as caught:
        spec.load(path)
    assert caught.value.message == f"{path}: line 3, resources.memry: unknown field; did you mean 'memory'?"
    assert caught.value.exit_code == 2
    path.write_text("run: x\npriority: 500\nlevel: rigd\n")
    with pytest.raises(SpecError) as caught:
        spec.load(str(path))
    assert caught.value.message.splitlines() == [
        f"{path}: 2 problems",
        "  line 2, priority: 500 is out of range; it must be at most 100",
        "  line 3, level: 'rigd' is not one of 'elastic', 'restart' or 'rigid'; did you mean 'rigid'?",
    ]


@pytest.mark.parametrize(
    ("text", "line", "field", "part"),
    [
        ("", 0, "", "is empty"),
        ("# only a comment\n", 0, "", "is empty"),
        ("- run: x", 1, "", "one to a line"),
        ("just words", 1, "", "one to a line"),
        ("run: x\n\tname: y", 2, "", "indent with spaces"),
        ("run: x\nrun: y", 2, "run", "given twice, first in line 1"),
        ("run: x\n---\nrun: y", 2, "", "a file of its own"),
        ("run: {", 1, "", "is not YAML"),
        ("run: *nobody", 1, "", "undefined alias"),
        ("run: x\n<<: {name: y}", 2, "", "merge key"),
        ("run: !!python/name:os.system", 1, "run", "put it in quotes"),
        ("run: !thing {a: b}", 1, "run", "tag"),
        ("run: x\nname: 2001-99-99", 2, "name", "put it in quotes"),
        ("run: x\nname: 5", 2, "name", "put it in quotes"),
        ("run: x\nname: no", 2, "name", "put it in quotes"),
        ("run: x\n? [a]\n: b", 2, "", "name is not a word"),
        ("run: x\x01", 1, "", "U+0001"),
        ("run: x\nelastic: 4", 2, "elastic", "is not a section"),
        ("run: x\nelastic: {min: 1}", 2, "elastic.max", "is missing"),
        ("run: x\nworkers: 9\nelastic: {max: 4}", 2, "workers", "not within elastic min 1 and max 4"),
        ("run: x\nlevel: rigid\nelastic: {max: 4}", 2, "level", "use workers for a fixed size"),
        ("run: x\nkind: service", 2, "kind", "add service: {port: 8000}"),
        ("run: x\nkind: training\nservice: {port: 1}", 2, "kind", "leave out one"),
        ("run: x\nworkers: 2\nservice: {port: 1}", 2, "workers", "service.replicas"),
        ("run: x\nservice: {port: 1, target: {}}", 2, "service.target", "exactly one target"),
        ("run: x\nlevel: restart\nconsistency: bitwise", 3, "consistency", "needs level elastic or rigid"),
        ("run: x\nresources: {gpu: 0, gpu_memory: 4Gi}", 2, "resources", "leave them out"),
        ("run: x\nenv: [A]", 2, "env", "NAME: value"),
        ("run: x\nenv: {1A: b}", 2, "env", "not the name of a variable"),
        ("run: x\nnotify: ftp://x", 2, "notify.0", "https://"),
        ("run: x\nhyperparameters: {a: [1]}", 2, "hyperparameters", "plain value"),
        ("run: x\nexpect: 5000 stpes", 2, "expect", "write a time such as 30m or 2h, or a number of steps"),
        ("run: x\nexpect: 0 steps", 2, "expect", "at least 1 step"),
        ("run: x\nexpect: -1", 2, "expect", "above 0"),
        ("run: x\nexpect: {steps: 5}", 2, "expect", "such as 5000 steps"),
        ("run: x\nexpect: 2h\nservice: {port: 1}", 2, "expect", "does not go with a service"),
        ("run: x\nduration: 2h", 2, "duration", "did you mean 'expect'"),
        ("run: x\nroles: {PS: {}}", 2, "roles.PS", "is not a name"),
        ("run: x\nroles: {ps: {cout: 2}}", 2, "roles.ps.cout", "did you mean 'count'"),
        ("run: x\ncommand: y", 2, "command", "keep one"),
        ("run: x\ncmd: y", 2, "cmd", "did you mean 'run'"),
        ("run: x\ngpus: 2", 2, "gpus", "did you mean resources.gpu?"),
        ("run: x\nmin_workers: 2", 2, "min_workers", "did you mean elastic.min?"),
        ("run: x\nxyzzy: 2", 2, "xyzzy", "known are name, queue"),
        ("command: ' '", 1, "command", "is not a command"),
    ],
)
def test_what_is_refused_and_how(text: str, line: int, field: str, part: str) -> None:
    [(at, where, sentence)] = problems(text)
    assert (at, where) == (line, field)
    assert part in sentence


def test_an_alias_bomb_is_refused_quickly() -> None:
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    [(_, _, text)] = problems("\n".join(bomb))
    assert "too many values" in text
    [(_, _, text)] = problems("run: &a [*a]")
    assert "too deep" in text


def test_aliases_that_a_person_would_write_are_fine() -> None:
    text = "run: x\nresources: &r {gpu: 0, cpu: 1}\nroles: {ps: {resources: *r}}"
    assert spec.load(text).roles["ps"].resources.cpu == 1000


@pytest.mark.parametrize("text", ["[" * 5000, "run: x\nname: " + "9" * 5000, "a" * 200_000, "{" * 100 + "}" * 100])
def test_absurd_texts_are_refused(text: str) -> None:
    assert problems(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, content in (
        (tmp_path / "none.yaml", None),
        (tmp_path / "binary.yaml", b"\xff\xfe\x00"),
        (tmp_path, None),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SpecError, match=str(path)):
            spec.load(path)


# Any text at all.

words = st.sampled_from(
    ["run", "name", "elastic", "min", "max", "resources", "gpu", "memory", "service", "port", "env", "step", "after",
     "stop", "notify", "roles", "priority", "hyperparameters", "level", "kind", "deadline", "workers", "1", "4Gi",
     "0.25", "pow2", "yes", "~", "x y", "2001-01-01", "1:30", ".inf", "-1", "[]", "{}", "*a", "&a", "!!set",
     "<<", "\t", "'"]
)  # fmt: skip
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**6), st.floats(), st.text(max_size=8), words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=5)),
    max_leaves=12,
)


def accepted(source: Any) -> bool:
    """Whether it is a job file; anything but a `JobFile` or a `SpecError` is a defect."""
    try:
        job = spec.load(source)
    except SpecError as error:
        told = error
    else:
        told = None
    if told is not None:
        assert told.problems or "cannot be read" in told.message
        assert str(told)
        return False
    assert isinstance(job, spec.JobFile)
    request = job.request()
    assert 1 <= request.min_workers <= request.requested <= request.max_workers
    assert request.sizes()[0] == request.min_workers
    return True


@given(st.text(max_size=200))
@example("run: x")
def test_any_text_is_a_job_file_or_a_spec_error(text: str) -> None:
    accepted(text)


@given(st.lists(st.tuples(st.integers(0, 2), words, words), max_size=8))
def test_any_indented_words_too(lines: list[tuple[int, str, str]]) -> None:
    accepted("\n".join(f"{'  ' * depth}{key}: {value}" for depth, key, value in lines))


@given(st.dictionaries(st.sampled_from([*spec.JobFile.model_fields, "command", "other"]), values, max_size=6))
def test_any_mapping_too(fields: dict[str, Any]) -> None:
    accepted(fields)
    accepted({"run": "x", **fields})


@given(
    st.fixed_dictionaries(
        {"run": st.sampled_from(["python t.py", ["python", "t.py"]])},
        optional={
            "name": st.sampled_from(["a", "b-1", "mnist.2"]),
            "priority": st.integers(0, 100),
            "elastic": st.fixed_dictionaries(
                {"max": st.integers(3, 9)}, optional={"min": st.integers(1, 3), "step": st.sampled_from([1, 2, "pow2"])}
            ),
            "resources": st.fixed_dictionaries(
                {},
                optional={
                    "gpu": st.sampled_from([1, 2, 0.25, "500m", 0.001]),
                    "gpu_memory": st.sampled_from(["4Gi", "100M"]),
                    "cpu": st.sampled_from([1, 0.5, "250m"]),
                    "memory": st.sampled_from(["1Gi", "3T"]),
                },
            ),
            "deadline": st.sampled_from(["1h", 5, "1.5d"]),
            "expect": st.sampled_from(["2h", 90, 0.5, "5000 steps", "1step"]),
            "env": st.just({"A": "1"}),
            "hyperparameters": st.just({"epochs": 3}),
        },
    )
)
def test_a_job_file_survives_being_written_and_read_again(fields: dict[str, Any]) -> None:
    job = spec.load(fields)
    assert spec.load(job.model_dump(mode="json", exclude_none=True)) == job
    assert spec.load(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True))) == job
    assert job.request() == spec.load(yaml.safe_dump(fields)).request()


# The schema.

DOCS = Path(__file__).parent.parent / "docs"


def test_the_published_schema_is_the_schema() -> None:
    """To renew it: stretto job schema > docs/job-schema.json"""
    assert json.loads((DOCS / "job-schema.json").read_text()) == spec.schema()


def test_the_schema_knows_every_field_and_allows_no_others() -> None:
    made = spec.schema()
    assert set(made["properties"]) == {*spec.JobFile.model_fields, "command"}
    assert made["additionalProperties"] is False
    assert made["oneOf"] == [{"required": ["run"]}, {"required": ["command"]}]


def test_every_example_in_the_documentation_is_a_job_file() -> None:
    text = (DOCS / "job-file.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        assert accepted(block), block


def test_every_field_is_documented() -> None:
    text = (DOCS / "job-file.md").read_text()
    for name in spec.JobFile.model_fields:
        assert f"`{name}`" in text, name
