"""Is a script right? It is run at several sizes, undisturbed and disturbed, and compared with itself on one worker.

Every run is a job of real processes (`Harness`) in a copy of the working folder, which ends after so many steps; what
the workers hold is recorded by `stretto.torch.recording`. The disturbed run grows, loses its leader and shrinks; it is
led from step to step, so that a fault strikes where it is to strike however fast the script is. What is judged, and
how, is in `comparing`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import comparing
from stretto.testing.comparing import Case, Comparison, Run
from stretto.testing.harness import Harness, HarnessError, Worker

ALONE, NUDGED, DISTURBED = "1 worker", "1 worker, last bits changed", "with faults"
FAULTS = ("growth", "kill", "leave")
COPIED_FILE_BYTES, COPIED_BYTES = 64 << 20, 1 << 30
"""Of the working folder: larger files, and what is beyond so much, are linked."""
_LINKED = frozenset({"venv", "env", "node_modules", "site-packages", "wandb", "mlruns"})
_UNDERWAY_S, _STACKS_S = 0.05, 3.0
_MOVE_S = 60.0
"""How long newcomers may take to get ready."""


@dataclass(frozen=True)
class Row:
    """What came of one run."""

    run: str
    workers: str
    """The numbers of workers that it was seen with, in turn."""
    seconds: float
    steps: int = 0
    faults: Mapping[str, bool] = field(default_factory=dict)
    """Those that were planned, and whether they struck."""
    comparison: Comparison | None = None
    error: str = ""
    """Why it did not end well; what it recorded until then is compared all the same."""
    stacks: str = ""


@dataclass(frozen=True)
class Verdict:
    """Everything that was found."""

    script: str
    rows: tuple[Row, ...]
    findings: tuple[str, ...]
    """What is wrong, or was not tried: empty if all is well."""
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    forgotten: tuple[str, ...] = ()
    """Variables of the script that a worker that came later did not have as the others did."""

    @property
    def equal(self) -> bool:
        return not self.findings

    def plain(self) -> dict[str, Any]:
        """For JSON, in which nothing is infinite."""
        return {
            "script": self.script,
            "equal": self.equal,
            "runs": [_plain_row(row) for row in self.rows],
            "findings": list(self.findings),
            "causes": list(self.causes),
            "notes": list(self.notes),
            "forgotten": list(self.forgotten),
        }


class Check:
    """Of one script; `folder` is for copies, logs and records."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        source: Path,
        steps: int = 50,
        sizes: Sequence[int] = (2, 3),
        timeout_s: float = 300.0,
        warm: ForkServer | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.command, self.folder, self.source = list(command), folder, source
        self.steps, self.sizes, self.timeout_s = steps, tuple(sizes), timeout_s
        self.warm, self.tell = warm, tell
        self.runs: dict[str, Run] = {}
        self.rows: list[Row] = []
        self.notes: dict[str, None] = {}

    def run(self) -> Verdict:
        self._play(ALONE, 1)
        if self.rows[0].error or not self._reference_steps():
            return self._verdict()
        self._play(NUDGED, 1)
        for size in self.sizes:
            self._play(f"{size} workers", size)
        self._play(DISTURBED, 1, plan=_plan(self._reference_steps()))
        return self._verdict()

    def _reference_steps(self) -> int:
        return max(self.runs[ALONE], default=0)

    def _play(self, name: str, workers: int, plan: Mapping[str, int] = MappingProxyType({})) -> None:
        began_s = time.monotonic()
        folder = self.folder / re.sub(r"\W+", "-", name)
        linked = mirror(self.source, folder / "work", aside=self.folder)
        if linked:
            self.notes[f"linked, not copied, so a script that writes to them changes your own: {_some(linked)}"] = None
        held = range(min(plan.values()), self._reference_steps()) if plan else range(0)
        led = Led(self._harness(folder, workers, name == NUDGED, held), folder / "record", self.timeout_s, plan, held)
        error, stacks = led.play()
        shutil.rmtree(folder / "work", ignore_errors=True)
        found = comparing.read(folder / "record")
        self.runs[name] = found
        if not error and not max(found, default=0):
            error = "it ended without a step: it never went through a loop of job.batches()"
        seconds = time.monotonic() - began_s
        comparison = None
        if name != ALONE and found:
            yardstick = {} if name == NUDGED else self.runs[NUDGED]
            comparison = comparing.compare(self.runs[ALONE], found, yardstick)
        steps, struck = max(found, default=0), {fault: fault in led.struck for fault in plan}
        self.rows.append(Row(name, _sizes(found), seconds, steps, struck, comparison, error, stacks))
        self.tell(f"{name}: {error or f'{steps} steps'}, {seconds:.1f} s")

    def _harness(self, folder: Path, workers: int, nudge: bool, held: Sequence[int]) -> Harness:
        environment = {
            "STRETTO_RECORD": str(folder / "record"),
            "STRETTO_RECORD_STEPS": str(self.steps),
            "STRETTO_RECORD_EVERY": str(max(1, self.steps // 50)),
            "STRETTO_RECORD_START": str(self.folder / "start.safetensors"),
            "STRETTO_RECORD_NUDGE": str(int(nudge)),
            "STRETTO_RECORD_HOLD": ",".join(map(str, held)),
            "STRETTO_CHECKPOINT_S": "1e9",
        }
        return Harness(
            folder / "job", self.command, workers=workers, min_workers=workers, environment=environment,
            warm=self.warm, cwd=folder / "work",
        )  # fmt: skip

    # What is made of it.

    def _verdict(self) -> Verdict:
        findings = [*self._failures(), *self._differences(), *self._not_tried()]
        cases = [
            Case(int(row.run.split()[0]) if row.run != DISTURBED else 0, row.run == DISTURBED, row.comparison)
            for row in self.rows
            if row.comparison is not None and row.run != NUDGED
        ]
        rows, causes = self.rows, comparing.causes(self.runs[ALONE], cases)
        if self._own_way():  # Then differences mean nothing.
            rows, causes = [r if r.run == NUDGED else replace(r, comparison=None) for r in rows], []
        return Verdict(
            script=" ".join(self.command), rows=tuple(rows), findings=tuple(findings), causes=tuple(causes),
            notes=(*self.notes, *self._remarks()), forgotten=tuple(self._forgotten()),
        )  # fmt: skip

    def _forgotten(self) -> Iterable[str]:
        undisturbed = [run for name, run in self.runs.items() if name not in (ALONE, DISTURBED)]
        if DISTURBED not in self.runs or self._own_way():
            return []
        return comparing.forgotten(self.runs[ALONE], undisturbed, self.runs[DISTURBED])

    def _failures(self) -> Iterable[str]:
        return [f"{row.run}: {row.error}" for row in self.rows if row.error]

    def _own_way(self) -> float:
        return comparing.goes_its_own_way(self.runs[ALONE], self.runs.get(NUDGED, {}))

    def _differences(self) -> Iterable[str]:
        if off := self._own_way():
            drawn = {name for records in self.runs[ALONE].values() for record in records for name in record.drawn}
            hint = f" (it draws from {', '.join(sorted(drawn))} in its body)" if drawn else ""
            yield (
                f"two runs on one worker differ by themselves: their first updates are {_share(off)} apart, so nothing "
                f"can be compared; seed what is random before the data and the model are made{hint}: "
                "torch.manual_seed(0), random.seed(0), numpy.random.seed(0)"
            )
            return
        alone = max(self.runs[ALONE], default=0)
        for row in self.rows:
            if row.comparison is None or row.run == NUDGED:
                continue
            if row.comparison.parting is not None:
                yield f"{row.run}: {sentence(row.comparison)}"
            if not row.error and row.steps != alone and min(row.steps, alone) < self.steps:
                yield (
                    f"{row.run}: it ended after {row.steps} steps, on one worker after {alone}: when it stops "
                    "depends on the slice that a worker sees (a loss of its own), or on what happens to it"
                )

    def _not_tried(self) -> Iterable[str]:
        for row in self.rows:
            missing = [fault for fault, struck in row.faults.items() if not struck]
            missing += [fault for fault in FAULTS if row.run == DISTURBED and fault not in row.faults]
            if missing and not row.error:
                yield (
                    f"not tried: {', '.join(missing)}; its {row.steps} steps were over before: "
                    "check more steps, or a longer training"
                )

    def _remarks(self) -> Iterable[str]:
        if any(record.own_start for run in self.runs.values() for records in run.values() for record in records):
            yield "the script does not seed its weights; every run began with those of the first"
        blurred = {n: None for row in self.rows if row.comparison and row.run != NUDGED for n in row.comparison.blurred}
        if blurred and not self._own_way():
            yield f"not judged to the end, as rounding alone does too much there: {_some(list(blurred))}"


class Led:
    """One run, from its start to its end, with what is done to it."""

    def __init__(
        self, harness: Harness, record: Path, timeout_s: float, plan: Mapping[str, int], held: Sequence[int]
    ) -> None:
        """`plan` says after which steps what is done, `held` after which ones the workers wait for a word."""
        self.harness, self.record, self.timeout_s = harness, record, timeout_s
        self.plan, self.held = plan, held
        self._victim: Worker | None = None
        self._killed: list[str] = []
        self.struck: dict[str, None] = {}
        self._until_s = time.monotonic() + timeout_s

    def play(self) -> tuple[str, str]:
        """Why it did not end well, and where it hung."""
        with self.harness:
            try:
                self._lead()
                self._wait(lambda: self._ended() and not self._running(), "the end")
            except HarnessError:
                running = self._running()
                stacks = self._stacks(running)
                where = _last_frame(stacks)
                names = ", ".join(worker.name for worker in running)
                return f"it did not end within {self.timeout_s:g} s: {names} still ran{where}", stacks
            self.struck = {fault: None for fault in self.struck if self._came_of(fault)}
            return self._error(), ""

    def _came_of(self, fault: str) -> bool:
        """Whether the job went on with what was done to it."""
        formed = [event for event in self.harness.events if event["event"] == "formed"]
        sizes = [len(event["members"]) for event in formed]
        if fault == "growth":
            return any(after > before for before, after in itertools.pairwise(sizes))
        if fault == "kill":
            return any(set(self._killed) & set(event["members"]) for event in formed) and any(
                not set(self._killed) & set(event["members"]) for event in formed
            )
        left = {e["number"] for e in self.harness.events if e["event"] == "announced" and e["planned"] and e["leavers"]}
        return any(event["number"] in left for event in formed)

    def _lead(self) -> None:
        """Step by step, until everything was done that is to be done."""
        waiting = dict(self.plan)
        for i, step in enumerate(self.held):
            self._wait(lambda at=step: self._recorded(at) or self._ended(), f"step {step}")  # type: ignore[misc]
            self._see_off()
            if self._ended():
                return
            if self._underway() or self._expected():
                # Connections are made beside the training: steps that take no time would leave none for it.
                time.sleep(_UNDERWAY_S)
            elif not waiting:
                self._let_go(self.held[i:])
                return
            elif (fault := next(iter(waiting))) and waiting[fault] <= step:
                del waiting[fault]
                if self._strike(fault):
                    self.struck[fault] = None
            self._let_go([step])

    def _let_go(self, steps: Iterable[int]) -> None:
        for step in steps:
            (self.record / f"go-{step}").touch()

    def _strike(self, fault: str) -> bool:
        """Whether it will hit anybody."""
        members = self.harness.members()
        if fault == "growth":
            self.harness.want(len(members) + 2)
            return self._announced()
        if len(members) < 2:
            return False
        if fault == "leave":
            self.harness.want(len(members) - 1)
            return self._announced()
        # It kills itself in its next backward pass, while the others wait for its gradients.
        (self.record / f"kill-{members[0]}").touch()
        self._victim = self.harness.worker(members[0])
        self._killed.append(members[0])
        return True

    def _see_off(self) -> None:
        """A body without a backward pass has not killed it."""
        if (victim := self._victim) is not None:
            self._victim = None
            victim.kill()
            self._wait(lambda: not victim.running, "the end of a worker that was killed")

    def _announced(self) -> bool:
        """Whether the change has been made known, so that the next steps take it up."""
        with contextlib.suppress(HarnessError):
            patience_s = min(_MOVE_S, self._left_s())
            self.harness.wait(lambda: self._underway() or self._ended(), "a change", patience_s)
        return self._underway()

    def _expected(self) -> bool:
        """Newcomers come in one after the other: whether the next one is known by now, if there is one."""
        known = {*self.harness.members(), *(worker.name for worker in self.harness.workers if not worker.running)}
        late = [worker for worker in self.harness.workers if worker.name not in known]
        return bool(late) and "kill" not in self.struck and self._announced()

    def _underway(self) -> bool:
        announced, formed = self.harness.last("announced"), self.harness.last("formed")
        return announced is not None and (formed is None or formed["number"] < announced["number"])

    def _recorded(self, step: int) -> bool:
        return any(self.record.glob(f"{step:08d}-*.npz"))

    def _ended(self) -> bool:
        return self.harness.over or not self._running()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.harness.workers if worker.running]

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        self.harness.wait(condition, what, self._left_s())

    def _stacks(self, running: list[Worker]) -> str:
        """What they were doing: the runtime writes it to the log when it is asked to."""
        before = {worker.name: len(worker.text()) for worker in running}
        for worker in running:
            worker.process.signal(signal.SIGUSR1)
        with contextlib.suppress(HarnessError):
            self.harness.wait(
                lambda: all(_FRAME.search(w.text(), before[w.name]) for w in running), "stacks", _STACKS_S
            )
        return "\n".join(f"-- {worker.name}\n{worker.text()[before[worker.name] :].strip()}" for worker in running)

    def _error(self) -> str:
        """Of a run that has ended: the script's own last word."""
        failed = self.harness.last("failed")
        ended = [w for w in self.harness.workers if w.status not in (0, None) and w.name not in self._killed]
        if failed is not None:
            return f"it failed: {_last_line(failed['reason'])}"
        if ended and not (self.harness.last("done") is not None and all(w.status == _OUT for w in ended)):
            worker = ended[0]
            said = _last_line(worker.text()) or "without a word"
            return f"{worker.name} ended with status {worker.status}: {said}"
        return ""


_OUT = 75
"""Of a worker that came when the job was over, or was put out."""
_LIBRARY = re.compile(r"/site-packages/|/lib/python3|/stretto/(torch|runtime|backends)/|^<")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)


def _plan(steps: int) -> dict[str, int]:
    """After which steps what is done; what would find too few steps behind it is left out."""
    growth = max(1, steps // 5)
    kill = max(growth + 3, steps // 2)
    leave = max(kill + 3, 3 * steps // 4)
    return {fault: at for fault, at in zip(FAULTS, (growth, kill, leave), strict=True) if at <= steps - 3}


def sentence(comparison: Comparison) -> str:
    """Where a run parts from that on one worker."""
    parting = comparison.parting
    if parting is None:
        return "equal"
    more = (
        f"; {parting.tensors} of {parting.of} differ, most of all {parting.worst} by {_share(parting.worst_difference)}"
    )
    return (
        f"parts from one worker at step {parting.step}, in {parting.name}, by {_share(parting.difference)} of its norm"
        + (more if parting.tensors > 1 else "")
    )


def mirror(source: Path, target: Path, aside: Path) -> list[str]:
    """A copy of a folder to run in. What is hidden, an environment or large is linked; which files are is told."""
    linked: list[str] = []
    left = COPIED_BYTES
    for folder, folders, files in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in list(folders):
            path = Path(folder, name)
            apart = name.startswith(".") or name in _LINKED or path.is_symlink() or (path / "pyvenv.cfg").exists()
            if apart or name == "__pycache__" or path == aside:
                folders.remove(name)
            if apart and path != aside:
                (here / name).symlink_to(path.resolve())
        for name in files:
            path = Path(folder, name)
            size = path.stat().st_size if path.is_file() else 0
            if path.is_file() and not path.is_symlink() and size <= min(COPIED_FILE_BYTES, left):
                shutil.copy2(path, here / name)
                left -= size
            elif path.is_file():
                (here / name).symlink_to(path.resolve())
                linked.append(str(path.relative_to(source)))
    return linked


def _sizes(run: Run) -> str:
    """The numbers of workers in turn, as in 1→3→2."""
    seen: list[int] = []
    for step, records in run.items():
        size = records[0].size
        if step and (not seen or seen[-1] != size):
            seen.append(size)
    return "→".join(map(str, seen)) or "-"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    hinted = len(lines) > 1 and lines[-1].startswith("hint:")
    return f"{lines[-2]} ({lines[-1]})" if hinted else lines[-1]


def _last_frame(stacks: str) -> str:
    """Where the main thread of the first worker was: the innermost frame that is not ours, nor a library's."""
    main = stacks.partition("Current thread")[2].partition("\n-- ")[0]
    frames = [found for found in _FRAME.findall(main) if not _LIBRARY.search(found[0])]
    return f", in {frames[0][2]} ({Path(frames[0][0]).name}, line {frames[0][1]})" if frames else ""


def _share(difference: float) -> str:
    return f"{difference:.1e}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _plain_row(row: Row) -> dict[str, Any]:
    found = row.comparison
    parting = found.parting if found is not None and row.run != NUDGED else None
    return {
        "run": row.run,
        "workers": row.workers,
        "seconds": round(row.seconds, 3),
        "steps": row.steps,
        "faults": {fault: "struck" if struck else "not tried" for fault, struck in row.faults.items()},
        "largest_difference": _finite(found.largest) if found is not None else None,
        "first_difference": None if parting is None else {
            "step": parting.step, "tensor": parting.name, "difference": _finite(parting.difference),
            "tensors": parting.tensors, "of": parting.of, "worst": parting.worst,
            "worst_difference": _finite(parting.worst_difference),
        },
        "growth": [[step, _finite(difference)] for step, difference in found.growth] if found is not None else [],
        "error": row.error,
        "stacks": row.stacks,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
