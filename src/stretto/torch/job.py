"""The elastic job of a PyTorch script: an ordinary loop, once it has joined.

All membership work happens when the loop asks for its next batch, never inside its body: there the step that the body
did is settled (applied, or to be done again), a new generation is entered if one is due, and the next global batch is
cut for whoever is in. Outside Stretto the same script is a world of one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stretto.runtime import pacer
from stretto.runtime.ledger import SUFFIX, Ledger
from stretto.runtime.member import Evicted
from stretto.runtime.messages import Bye
from stretto.runtime.order import AnyLoop, Turns
from stretto.runtime.watchdog import Watchdog
from stretto.torch import chance, checks, flags, recording, sampling
from stretto.torch import gate as gates
from stretto.torch import plan as plans
from stretto.torch.bitwise import VirtualReducer
from stretto.torch.checkpoints import EVERY_S, KEEP, Checkpoints
from stretto.torch.checks import TrainingError
from stretto.torch.data import Batch, Part, Reader, Turn, TurnReader
from stretto.torch.flags import Flags
from stretto.torch.frozen import Frozen
from stretto.torch.gate import Gate
from stretto.torch.groups import GroupBroken
from stretto.torch.leash import Leash
from stretto.torch.net import Net
from stretto.torch.plan import Plan, TurnPlan
from stretto.torch.reducer import Reducer
from stretto.torch.state import Holder, Stateful, has_gradients
from stretto.torch.undo import Habits, Undo
from stretto.torch.virtual import Passes
from stretto.torch.world import Cursor, World

Module = TypeVar("Module", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
AnyStateful = TypeVar("AnyStateful", bound=Stateful)

_WATCHED = 3
"""So many batches of a loop are watched for what a script is like; later ones only as far as it costs nothing."""


class Job:
    """What `join` returns."""

    def __init__(
        self, device: torch.device, folder: Path | None, world: World | None, holder: Holder, virtual_ranks: int
    ) -> None:
        self.device, self.folder, self.world = device, folder, world
        self.holder = holder
        self.virtual_ranks = virtual_ranks
        """In bitwise mode; else 0."""
        self.gate = Gate()
        self.gate.waiting = self._flushes
        self.holder.helpers = lambda: gates.helpers(self.holder.optimizers, self.gate)
        gates.refuse_strangers(holder, self.gate)
        self.cursor = Cursor()
        self.reducer: Reducer | VirtualReducer | None = None
        self.passes: Passes | None = None
        self.checkpoints = None
        if folder is not None:
            every_s = float(os.environ.get("STRETTO_CHECKPOINT_S", EVERY_S))
            where = os.environ.get("STRETTO_CHECKPOINT_DIR") or folder / "checkpoints"
            keep = int(os.environ.get("STRETTO_CHECKPOINT_KEEP", KEEP))
            self.checkpoints = Checkpoints(Path(where), holder, every_s, keep)
            if world is not None:
                self.checkpoints.saved = world.saved
        self._ledger: Ledger | None = None
        self._loops = 0
        self._loops_to_come = 0
        """After the one under way, as far as the script said so."""
        self._epoch_calls = 0
        self._process = os.getpid()
        self._watched = 0
        """Batches of this loop that were watched."""
        self._frozen = Frozen(self._thaw)
        self._inside = False
        self._in_body = False
        self._exits_in_body = False
        self._passed = False
        self._reduced: list[int] = []
        self._to_save: dict[Path, None] = {}
        self._after_step: list[Callable[[], Any]] = []
        self._when_leader: list[Callable[[], Any]] = []
        self._stopping = False
        self._steps_before = 0
        self._sent = Flags()
        self._plan: Plan | None = None
        self._fed: Part | None = None
        """What the body has been given."""
        self._habits = world.habits if world is not None else Habits()
        self._undo = Undo(holder, self._habits)
        self._metrics: dict[str, float] = {}
        self._net = Net(holder, bitwise=virtual_ranks > 0)
        self._pacer = pacer.from_environment()
        self._leash = Leash(device)
        if world is not None:
            world.restore = self._restore
        self._watchdog = world.member.watchdog if world is not None else Watchdog(time.monotonic)
        self._watchdog.waits = lambda: isinstance(self.reducer, Reducer) and self.reducer.awaits_others

    # Where this worker is.

    @property
    def rank(self) -> int:
        """-1 as long as this worker is no member: on its way to the loop that the others are in."""
        if self.world is None:
            return 0
        return self.world.rank if self.generation else -1

    @property
    def leader(self) -> bool:
        """Whether this worker does what one does for all; said before the first batch, too. See `on_leader`."""
        if self.world is None or self.generation:
            return self.rank == 0
        welcome = self.world.member.welcome
        return welcome is not None and welcome.leads

    @property
    def size(self) -> int:
        """How many workers train at this moment."""
        return self.world.size if self.world is not None else 1

    @property
    def generation(self) -> int:
        return self.world.member.generation if self.world is not None else 0

    @property
    def step(self) -> int:
        """Steps applied so far, over all loops."""
        return self.cursor.applied

    # What belongs to the job.

    def model(self, module: Module, *, local: Sequence[str] = ()) -> Module:
        """Register a model: its parameters, buffers and gradients are kept alike on all workers. `local` are names (or
        patterns of names) of buffers that may differ between them."""
        module.to(self.device)
        self._net.local[len(self.holder.models)] = list(local)
        self.holder.models.append(module)
        return module

    def optimizer(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Register an optimizer: its `step` counts for the whole job."""
        gates.optimizer(optimizer, self.gate, self._before_step)
        self.holder.optimizers.append(optimizer)
        return optimizer

    def keep(self, name: str, extra: AnyStateful) -> AnyStateful:
        """Register anything else with a state: it travels to newcomers and into checkpoints, and is rolled back."""
        if name in self.holder.extras:
            raise TrainingError(f"there is a part called {name!r} already", hint="give every part a name of its own")
        self.holder.extras[name] = extra
        return extra

    def report(self, **metrics: Any) -> None:
        """Figures of this step, for whoever watches the job."""
        if not self.gate.steps_now:
            return
        for name, value in metrics.items():
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            if math.isnan(number) and gates.scales(self.holder.helpers()):
                # The scaler leaves such a step out.
                continue
            if name == "loss" and math.isnan(number):
                raise TrainingError(
                    f"the loss is not a number at step {self.cursor.step} of loop {self.cursor.loop}",
                    hint="lower the learning rate, clip gradients or look at the data of this step",
                )
            self._metrics[name] = number
        if self.world is not None:
            with self.world.member.changed:
                self.world.member.metrics = dict(self._metrics)

    def on_leader(self, act: Callable[[], Any]) -> None:
        """Have this done by the leader, before its first batch: to open a writer, for instance. If another worker
        becomes the leader later, it does it then."""
        self._when_leader.append(act)

    def every(self, steps: int) -> bool:
        """In the body, after `step()`: whether this is the last pass of every so many steps, and its step was applied.
        For what should happen once per step though the body may run several times."""
        if steps < 1:
            raise TrainingError(f"every({steps})", hint="say at least 1")
        return self.gate.inside and self.gate.steps_now and (self.cursor.applied + 1) % steps == 0

    def once_per_step(self, act: Callable[[], Any]) -> None:
        """In the body: have this done after the step, once, whatever passes it takes and however often it is done again
        (but once more if the worker dies in that very step)."""
        if not self._in_body:
            act()
        elif self.gate.steps_now:
            self._after_step.append(act)

    def stop(self) -> None:
        """End the loop for all workers, at the same step: the next boundary at which all know of it."""
        self._stopping = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to a file, from one worker."""
        self._to_save[Path(path)] = None
        if not self._in_body:
            self._save()

    def _save(self) -> bool:
        """What was asked for; in the body of a batch it waits for the batch's end, when state and cursor agree. Whether
        there was anything."""
        from stretto.torch.checkpoints import write_file

        wanted, self._to_save = self._to_save, {}
        for path in wanted if self.rank == 0 else ():
            write_file(path, *self.holder.take(self.cursor))
        return bool(wanted)

    def restore(self, path: str | os.PathLike[str], *, position: bool = True) -> None:
        """Take over a state that `save` wrote, and go on where it was written (unless `position` is false); before the
        first batch, on all workers alike."""
        from stretto.torch.checkpoints import read_file

        if self._loops:
            raise TrainingError("restore() comes before the first batches()", hint="move it up")
        self.holder.helpers()
        found = Cursor(*self.holder.put(*read_file(Path(path)), values_only=not position))
        if position:
            self.cursor = found

    # The loop.

    def epochs(self, count: int) -> Iterator[int]:
        """`range(count)`, for scripts with something between their loops: a worker that comes later, or goes on from a
        checkpoint, begins with the epoch that the job is in. An epoch may have any number of loops."""
        call, self._epoch_calls = self._epoch_calls, self._epoch_calls + 1
        epoch, before, loops = 0, self._loops, 1
        while epoch < count:
            there, first = self._epoch_of_job(call)
            if there > epoch and first > self._loops:
                # The last epoch at most: what comes after it is for members.
                epoch, self._loops = min(there, count - 1), first
            elif self._loops > before:
                loops = self._loops - before
            before = self._loops
            self._note_epoch(call, epoch)
            chance.begin_epoch(call, epoch, self.device)
            self._loops_to_come = (count - epoch) * loops
            yield epoch
            epoch += 1
        self._loops_to_come = 0

    def _epoch_of_job(self, call: int) -> tuple[int, int]:
        """The epoch that this call of `epochs` should be in, and the loop that this began with."""
        reached, known = self.cursor.loop, self.holder.epochs
        if self.world is not None and not self.generation:
            told = [list(one) for one in self.world.member.epochs_told]
            if told > known:
                reached, known = self.world.member.loops_done, told
        if call >= len(known) or known[call][1] > reached:
            return 0, 0
        return known[call][0], known[call][1]

    def _note_epoch(self, call: int, epoch: int) -> None:
        """For whoever comes later. What was restored and is still ahead stays."""
        if self.holder.epochs[call : call + 1] < [[epoch, self._loops]]:
            self.holder.epochs = [*self.holder.epochs[:call], [epoch, self._loops]]
        if self.world is not None:
            with self.world.member.changed:
                self.world.member.epochs = tuple((at, loop) for at, loop in self.holder.epochs)

    def batches(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        *,
        size: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        per_worker: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        workers: int | None = None,
        pin_memory: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        accumulate: int = 1,
        weight: Callable[[Batch], float] | None = None,
    ) -> Iterator[Batch]:
        """Global batches of `size` samples, of which each worker gets its slice, `per_worker` samples at a time.

        They are shuffled, unless `shuffle` is false or a `sampler` gives the order of all samples; each list that a
        `batch_sampler` gives is one global batch. A map-style `DataLoader` is taken apart: its batch size is `size`.
        With `accumulate` a step is made of so many global batches. With `weight` the loss is a mean over something else
        than samples: it says how much a batch has of it (tokens, for instance).
        """
        source = sampling.source(
            dataset,
            size=size,
            sampler=sampler,
            batch_sampler=batch_sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
        )
        plan = plans.make(
            source,
            epochs=epochs,
            seed=seed,
            accumulate=accumulate,
            per_worker=per_worker,
            virtual_ranks=self.virtual_ranks,
            weight=weight,
        )
        reader = Reader(source.dataset, seed, **source.reading)
        number, self._loops = self._loops, self._loops + 1
        return self._loop(number, plan, reader)

    def steps(self, count: int, *, seed: int = 0) -> Iterator[Turn]:
        """A loop of so many steps for scripts that make their own data. Each worker has one of the places of a step,
        and all count alike; what it makes should depend on the step, the place and the number of places alone."""
        loop = Turns(total_steps=count, seed=seed)
        number, self._loops = self._loops, self._loops + 1
        return self._loop(number, TurnPlan(loop, self.virtual_ranks), TurnReader(loop))

    def _loop(self, number: int, plan: Plan, reader: Reader) -> Iterator[Any]:
        if os.getpid() != self._process:
            raise TrainingError(
                "a forked process cannot train in its parent's job", hint="train in the process that joined"
            )
        self._close_last_loop()
        recording.enter(self)
        loop, self._plan = plan.loop, plan
        self._prepare(number, loop)
        if self._comes_late(number):
            yield from self._rehearse(plan, reader)
        if not self._enter(number, loop):
            if self.generation:
                self._watchdog.leave()
            chance.end_loop(loop.seed, number, self.device)
            return
        self._inside, how = True, "end"
        self._watched = 0
        cut = self._follow(plan, reader)
        while loop.has(self.cursor.step) and self.cursor.loop == number and not self.cursor.over:
            step = self.cursor.step
            parts = plan.parts(step, *self._place())
            try:
                parts, batches = self._read(plan, reader, parts)
            except GroupBroken as broken:
                assert self.world is not None
                self._resume(self.world.recover(self.cursor, broken))
                cut = self._follow(plan, reader)
                continue
            if self._when_leader and self.rank == 0:
                acts, self._when_leader = self._when_leader, []
                for act in acts:
                    act()
            weight = self._begin([part.share for part in parts], plan.batches(step))
            for i, (part, batch) in enumerate(zip(parts, batches, strict=True)):
                self._feed(number, part, weight, first=i == 0, last=i == len(parts) - 1)
                batch.last = i == len(parts) - 1
                self._in_body, self._exits_in_body = True, False
                try:
                    yield batch
                except GeneratorExit:
                    self._leave_early()
                    raise
                finally:
                    self._in_body = False
            self.gate.end()
            self._pacer.pause()
            if plan.size < loop.size:
                self._check_stepped()
            ends = self._settle()
            self._watchdog.step()
            if ends:
                how = "stop"
                break
            if (self.rank, self.size, self.cursor.step) != (*cut, step + 1):
                cut = self._follow(plan, reader)
        self._inside = False
        chance.end_loop(loop.seed, number, self.device)
        self._frozen.watch((), self.holder.trained)
        if self.cursor.loop == number:
            self._end("stop" if self.cursor.over else how)
        self._watchdog.leave()

    def _place(self) -> tuple[int, int]:
        return self.world.place if self.world is not None else (0, 1)

    def _read(self, plan: Plan, reader: Reader, parts: list[Part]) -> tuple[list[Part], Iterable[Any]]:
        """The samples of the parts; with a weight all of them are needed before the first is fed."""
        if plan.weight is None:
            return parts, map(reader.read, parts)
        batches = [reader.read(part) for part in parts]
        own = [float(plan.weight(batch)) if part.counts else 0.0 for part, batch in zip(parts, batches, strict=True)]
        if not all(math.isfinite(amount) and amount >= 0 for amount in own):
            raise TrainingError(f"the weight of a batch is {min(own)}", hint="give a number that is not negative")
        group = self.world.group if self.world is not None else None
        told = group.all_gather_bytes(json.dumps(own).encode()) if group is not None and group.size > 1 else []
        # Added up exactly: the sum must not depend on who weighed what.
        total = math.fsum(amount for text in told for amount in json.loads(text)) if told else math.fsum(own)
        count = plan.batches(parts[0].step)
        shares = [count * amount / total if total else 0.0 for amount in own]
        return [part._replace(share=share) for part, share in zip(parts, shares, strict=True)], batches

    def _rehearse(self, plan: Plan, reader: Reader) -> Iterator[Batch]:
        """Go through the body before the others wait for it: what is slow for the first time (kernels, a compiler,
        readers) is then behind it. Nothing of it counts."""
        assert self.world is not None
        assert self.reducer is not None
        parts = plan.rehearsal(self.world.member.welcome.size + 1 if self.world.member.welcome is not None else 1)
        reader.follow(lambda: iter(parts))
        self._watchdog.enter()
        self._undo.begin(self.cursor, alone=False)
        for part in parts:
            if self.passes is not None:
                self.passes.start(None, Flags())
                self.passes.begin(part, 0.0)
            elif isinstance(self.reducer, Reducer):
                self.reducer.exchange(None)
                self.reducer.accumulate(1.0)
            self.gate.begin(first=True, last=False)
            self._fed, self._in_body = part, True
            try:
                yield reader.read(part)
            except GeneratorExit:
                raise TrainingError(
                    "the script left its loop in the first batch, before this worker was a member of its job",
                    hint="call job.stop() to end a loop early",
                ) from None
            finally:
                self._in_body = self._stopping = False
        self.gate.end()
        self._take_back()

    def _comes_late(self, number: int) -> bool:
        """The job runs already, and this worker is about to join it."""
        if self.world is None or self.generation:
            return False
        member = self.world.member
        return member.welcome is not None and member.welcome.generation > 0 and number >= member.loops_done - 1

    def _prepare(self, number: int, loop: AnyLoop) -> None:
        """What a loop needs, whoever is a member."""
        self.holder.helpers()
        self.holder.loop = number
        ours = self.holder.parameters()
        if any(not given.requires_grad for given in ours if id(given) in self.holder.trained.ids):
            self.holder.trained.put(set())
        self._look_at_parameters()
        self._undo.enter()
        if self.reducer is None:
            if self.virtual_ranks:
                self.reducer = VirtualReducer(self.holder.parameters(), self.virtual_ranks, flags=flags.COUNT)
                self.passes = Passes(self.holder, self.reducer, self.virtual_ranks)
            else:
                self.reducer = Reducer(self.holder.parameters(), flags=flags.COUNT, trained=self.holder.trained)
            self.reducer.began, self.reducer.rebuilt = self._backward_begins, self._watch_frozen
            self.gate.arrived = lambda: self.reducer is None or self.reducer.failed is None
        self._watch_frozen()
        if self.passes is not None:
            self.passes.seed = loop.seed

    def _enter(self, number: int, loop: AnyLoop) -> bool:
        """Be in this loop; False if the job is past it."""
        if self.world is not None and self.generation == 0:
            if number < self.world.member.loops_done - 1:
                # Nobody waits for it on its way. The last of them is different: what may follow is for members.
                self._passed = True
                return False
            self.cursor = self.world.join(self._fingerprint(number), self.cursor)
            if self.cursor.loop < number:
                # All who held state are gone since it passed over those loops: it cannot go back, but another one can.
                self.world.give_up(
                    Evicted(f"the job begins again in loop {self.cursor.loop}, which it has passed over")
                )
            self._open_ledger()
        if number < max(self.world.member.loops_done if self.world is not None else 0, self.cursor.loop):
            return False
        if self.cursor.loop < number:
            self.cursor = Cursor(number, 0, self.cursor.applied)
        self.holder.arrive()
        self._loops_to_come = max(0, self._loops_to_come - 1)
        if self.world is None:
            return True
        done = self.cursor.applied - self.cursor.step
        with self.world.member.changed:
            self.world.member.total = done + loop.total_steps * (1 + self._loops_to_come)
        if loop.size < self.size or 0 < self.virtual_ranks < self.size:
            least = min(loop.size, self.virtual_ranks or loop.size)
            raise TrainingError(
                f"the global batch has {least} {'virtual ranks' if least < loop.size else 'samples'}, "
                f"the job {self.size} workers",
                hint="use more of them, or fewer workers",
            )
        self._watch()
        self.world.pace.begin()
        self._watchdog.enter()
        return True

    def _look_at_parameters(self) -> None:
        """All there, all known; the reducer is made anew when there are others than in the loop before."""
        checks.parameters(self.holder)
        ours = [id(given) for given in self.holder.parameters()]
        if self.reducer is not None and self._reduced != ours:
            self.reducer.close()
            self.reducer = None
        self._reduced = ours

    def _fingerprint(self, number: int) -> dict[str, str]:
        """What is equal on all workers when they come to their first loop. Models may change between loops: whoever
        comes later is shown by the state whether it fits."""
        if number:
            return {}
        return {
            "model": self.holder.fingerprint(),
            "optimizers": ", ".join(type(given).__name__ for given in self.holder.optimizers),
        }

    def _follow(self, plan: Plan, reader: Reader) -> tuple[int, int]:
        """Read ahead for this place among the members, from this step on."""
        first, rank, size = self.cursor.step, self.rank, self.size
        begin = plan.parts(first, *self._place()) if plan.loop.has(first) else []
        reader.follow(lambda: plan.ahead(begin, first, rank, size))
        return rank, size

    def _begin(self, shares: Sequence[float], batches: int) -> float:
        """Before the body; how much this member's part counts."""
        if self.world is not None:
            self.world.check_lease()
        assert self.reducer is not None
        group = self.world.group if self.world is not None else None
        weight = sum(shares) / batches
        self._sent = self._flags()
        self._watched += 1
        if isinstance(self.reducer, Reducer):
            self.reducer.exchange(group, weight, self._sent, watch=self._watched <= _WATCHED)
        elif self.passes is not None:
            self.passes.start(group, self._sent)
        if self.world is not None:
            self._undo.begin(self.cursor, alone=self.size == 1)
        return weight

    def _thaw(self) -> None:
        """Parameters that were frozen are about to be trained."""
        if self.reducer is not None:
            self.reducer.take_in()
            self._watch_frozen()

    def _watch_frozen(self) -> None:
        self._frozen.watch(self.holder.models, self.holder.trained)

    def _backward_begins(self) -> None:
        if self.gate.asked_here and self._plan is not None and self._plan.in_passes:
            raise checks.phases_in_passes(self.cursor.step)

    def _feed(self, number: int, part: Part, weight: float, *, first: bool, last: bool) -> None:
        """Just before a pass through the body."""
        assert self.reducer is not None
        self.gate.begin(first=first, last=last)
        share = part.share / weight if weight else 1.0
        if self.passes is not None:
            self.passes.begin(part, part.share)
        elif isinstance(self.reducer, Reducer) and not (first and last and share == 1.0):
            (self.reducer.conclude if last else self.reducer.accumulate)(share)
        self._fed = part
        if self.passes is None and self._plan is not None:
            chance.begin_pass(self._plan.loop.seed, number, part.step, part.first, self.device)
        if self._ledger is not None and part.counts:
            self._ledger.fed(number, part.step, self.generation, part.indices)
        if self.world is not None:
            self._watchdog.moves()
            with self.world.member.changed:
                self.world.member.loop, self.world.member.step = number, part.step

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, a row of this shape for each sample of the batch: the same at any number of workers."""
        if not self._in_body or self._fed is None or self._plan is None:
            raise TrainingError("noise() is for the body of a loop", hint="outside of loops use torch.randn")
        part, seed = self._fed, self._plan.loop.seed
        return chance.noise(seed, self.cursor.loop, part.step, part.indices, shape, dtype).to(self.device)

    def _flags(self) -> Flags:
        return Flags.of(
            ahead=self.world.offset() if self.world is not None else 0,
            stop=self._stopping,
            steps=self._steps_before,
            sign=self._plan.sign(self.cursor.step) if self._plan is not None else 0,
            compare=self.size > 1 and self.rank == 0 and self._net.wanted(self.generation),
        )

    def _settle(self) -> bool:
        """After the body: count the step, or undo it; then go where the job goes. True when the loop is to end."""
        reducer, world = self.reducer, self.world
        assert reducer is not None
        alone = world is None or world.size == 1
        if not alone and not reducer.rounds and reducer.failed is None:
            self._skip(reducer)
        if self.passes is not None:
            self.passes.join_buffers()
        self._finish_sending()
        self._undo.look()
        if reducer.failed is not None:
            assert world is not None
            self._take_back()
            self._resume(world.recover(self.cursor, reducer.failed))
            return False
        # Alone, too, a stop takes effect one step later: the result must not depend on the number of workers.
        found = self._sent if alone else Flags._make(reducer.flags)
        loop, step, applied, _ = self.cursor
        checks.alike(found, self.size, loop, step, self._plan.summary if self._plan is not None else "nothing")
        self.cursor = Cursor(loop, step + 1, applied + 1)
        self._learn_habits(reducer)
        if found.stop:
            # In what is saved, too. Newcomers would not know: they come in with the next loop.
            self.cursor = self.cursor._replace(over=1)
        if not alone and not recording.compares():
            self._compare(found)
        self._stopping |= recording.settled(self)
        acted, saved = self._act(), self._save()
        plain = not acted and not saved
        if world is None:
            return bool(found.stop)
        if self._ledger is not None:
            self._ledger.applied(loop, step, self.generation)
        with world.member.changed:
            world.member.applied = self.cursor.applied
        world.committed(self.cursor)
        if self.checkpoints is not None:
            plain &= not self.checkpoints.consider(self.cursor, self.generation, leader=world.rank == 0)
        ahead, size = round(found.ahead), world.size
        if found.stop:
            return True
        if world.leaving and alone:
            self._suspend(world)
        if world.member.urgent():
            self._resume(world.recover(self.cursor, None))
        elif ahead and found.same_ahead(size):
            self._resume(world.take_up(ahead // size, self.cursor))
        else:
            if alone:
                self._leash.pull()
            world.stepped(plain=plain)
        return False

    def _act(self) -> bool:
        """What was to be done once the step is applied; whether there was anything."""
        acts, self._after_step = self._after_step, []
        for act in acts:
            act()
        return bool(acts)

    def _compare(self, found: Flags) -> None:
        """Whether all members hold the same after this step, where they all look."""
        assert self.world is not None
        assert self.world.group is not None
        size, loop = self.world.size, self._plan.loop if self._plan is not None else None
        self._net.stepped |= found.steps > 0
        switches = round(found.ahead) and found.same_ahead(size)
        ends = found.stop or (loop is not None and not loop.has(self.cursor.step))
        if not (found.compare or switches or (ends and self._net.stepped)):
            self._net.passed()
            return
        try:
            buffers = self._plan is None or not self._plan.in_passes
            difference = self._net.compare(self.world.group, self.cursor.applied, buffers=buffers)
        except GroupBroken:
            # The next sum finds out.
            return
        if difference is not None:
            raise checks.replicas_differ(*difference, self.cursor.applied)

    def _learn_habits(self, reducer: Reducer | VirtualReducer) -> None:
        """After a batch: whether its gradients are needed for the next one."""
        if isinstance(reducer, Reducer) and reducer.carried is not None and not self.holder.unapplied:
            self._habits.carries = bool(self._habits.carries) or reducer.carried
        self._steps_before = self.gate.steps
        self.holder.unapplied = any(
            id(optimizer) not in self.gate.stepped and has_gradients(optimizer) for optimizer in self.holder.optimizers
        )
        self.holder.carries = self.holder.unapplied or self._habits.carries is not False

    def _suspend(self, world: World) -> NoReturn:
        """The last member was told to end: others go on from its checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.write_now(self.cursor, self.generation)
        world.go()

    def _skip(self, reducer: Reducer | VirtualReducer) -> None:
        """The body did no backward pass: say so where the others wait for it."""
        sent = self._flags()._replace(skipped=1)
        group = self.world.group if self.world is not None else None
        if isinstance(reducer, Reducer):
            reducer.exchange(group, 0.0, sent)
            reducer.contribute_nothing()
        elif group is not None:
            group.abort("a body without a backward pass")
            raise checks.went_on_without_backward(self.cursor.step, "this worker")

    def _check_stepped(self) -> None:
        if self.holder.optimizers and not self.gate.asked and self.gate.arrived():
            raise checks.no_step_in_last_pass(self.cursor.step)

    def _before_step(self) -> None:
        """An optimizer is about to change the state."""
        self._check_gradients()
        if self.passes is not None:
            self.passes.join_buffers()
        self._finish_sending()
        self._undo.before_step(self.cursor)

    def _flushes(self) -> bool:
        """Whether a step outside of loops applies what the last loop left over, which all its members hold alike."""
        return self.holder.unapplied and self._loops > 0 and (self.world is None or self.generation > 0)

    def _check_gradients(self) -> None:
        """They are those of the global batch. Where nobody listens there is nobody else."""
        reducer = self.reducer
        if reducer is None or reducer.failed is not None:
            return
        if reducer.unseen():
            raise checks.grows_unseen(self.cursor.step)
        listens = self.size > 1 or self._watched <= _WATCHED
        # After a batch without a step there are gradients that wait for one.
        if not listens or reducer.backwards or self.holder.unapplied:
            return
        if any(given.grad is not None for given in self.holder.parameters()):
            raise checks.step_without_backward(self.cursor.step)

    def _finish_sending(self) -> None:
        """What a newcomer is being sent must not change before it is there."""
        if self.world is not None and self.reducer is not None and self.reducer.failed is None:
            try:
                self.world.finish_sending()
            except GroupBroken as broken:
                self.reducer.failed = broken

    def _take_back(self) -> None:
        self._to_save, self._after_step = {}, []
        self._undo.take_back()
        for helper in self.holder.helpers():
            gates.forget_scaling(helper)

    def _resume(self, cursor: Cursor) -> None:
        """A generation was entered: go on from where it is."""
        self.cursor = cursor
        self._steps_before = 0
        self._watch()

    def _watch(self) -> None:
        if self.world is not None:
            with self.world.member.changed:
                self.world.member.loop, self.world.member.step = self.cursor.loop, self.cursor.step

    # Ends.

    def _end(self, how: str) -> None:
        """The barrier at the loop's end."""
        if self.world is not None:
            self.cursor = self.world.end_loop(self.cursor, how)
        self._stopping = False
        if self.cursor.loop == self._loops - 1:
            self.cursor = Cursor(self._loops, 0, self.cursor.applied)

    def _leave_early(self) -> None:
        """The script left the loop: by `break`, or by an exception; which of them, its next call tells."""
        self.gate.end()
        reducer = self.reducer
        if self.gate.steps and reducer is not None and reducer.failed is None:
            loop, step, applied, over = self.cursor
            self.cursor = Cursor(loop, step + 1, applied + 1, over)
            self._learn_habits(reducer)
            if self._ledger is not None:
                self._ledger.applied(loop, step, self.generation)
        self._act()
        self._save()
        self._frozen.watch((), self.holder.trained)
        if self._plan is not None:
            chance.end_loop(self._plan.loop.seed, self.cursor.loop, self.device)
        if self.world is not None and self._inside:
            self.world.say_loop_end(self.cursor, "break")
            self._watchdog.leave()

    def _close_last_loop(self) -> None:
        """A loop that was left by `break` ends when the script goes on."""
        if self._inside:
            self._inside = False
            self._end("break")

    def _restore(self) -> Cursor | None:
        """In the leader of a generation in which nobody holds state."""
        found = self.checkpoints.restore(self.generation) if self.checkpoints is not None else None
        # From the beginning, too: what earlier generations did does not count any more.
        start = found or self.cursor
        self._open_ledger()
        if self._ledger is not None:
            self._ledger.restored(start.loop, start.step, self.generation)
        return found

    def _open_ledger(self) -> None:
        if self._ledger is None and self.folder is not None and self.world is not None:
            folder = self.folder / "ledger"
            folder.mkdir(parents=True, exist_ok=True)
            member = self.world.member
            self._ledger = Ledger(folder / f"{member.worker}-{member.incarnation}{SUFFIX}", member.worker)

    def forget(self) -> None:
        """In a child that the script has forked: what it inherited belongs to its parent."""
        if self.world is not None:
            self.world.forget()

    def exits(self) -> None:
        """The script is about to end."""
        self._exits_in_body = self._in_body and os.getpid() == self._process

    def finish(self) -> None:
        """The script has ended by itself: well, unless a loop was under way."""
        goes_on = self.world is None or not self.world.closed
        if self._inside and self._exits_in_body and self._plan is not None and goes_on:
            raise checks.ended_inside(self.cursor.step, self._plan.loop.total_steps)
        if self._in_body and goes_on:
            # It took its batches one by one, and did not ask for another.
            self._in_body = False
            self._leave_early()
        self.close(Bye(reason="finished", loops=self._loops))

    def close(self, bye: Bye) -> None:
        """The script has ended."""
        if self.world is None or self.world.closed:
            return
        if bye.reason == "finished" and self._passed and not self.generation:
            self.world.give_up(Evicted("its script ended before the loop that the job is in; see job.epochs()"))
        if bye.reason == "finished":
            self._close_last_loop()
            if self.checkpoints is not None:
                self.checkpoints.close()
        self.world.close(bye)
        self.world = None
