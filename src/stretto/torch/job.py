"""The elastic job of a PyTorch script: an ordinary loop, once it has joined.

All membership work happens when the loop asks for its next batch, never inside its body: there the step that the body
did is settled (applied, or to be done again), a new generation is entered if one is due, and the next global batch is
cut for whoever is in. Outside Stretto the same script is a world of one.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stretto.runtime import pacer
from stretto.runtime.ledger import SUFFIX, Ledger, PatientLedger
from stretto.runtime.member import Evicted
from stretto.runtime.messages import Bye
from stretto.runtime.order import AnyLoop, Turns
from stretto.runtime.outlook import Outlook
from stretto.runtime.watchdog import Watchdog
from stretto.torch import chance, checks, flags, recording, sampling, syncnorm
from stretto.torch import epochs as epoch_places
from stretto.torch import gate as gates
from stretto.torch import plan as plans
from stretto.torch.attempts import SETTLED, Attempts
from stretto.torch.bitwise import VirtualReducer
from stretto.torch.checkpoints import EVERY_S, KEEP, Checkpoints
from stretto.torch.checks import TrainingError
from stretto.torch.collectives import Collectives
from stretto.torch.data import Batch, Part, Reader, Turn, TurnReader
from stretto.torch.deeds import Asked, Deeds
from stretto.torch.departures import Departure, Departures
from stretto.torch.flags import Flags
from stretto.torch.frozen import Frozen
from stretto.torch.gate import Gate
from stretto.torch.groups import GroupBroken
from stretto.torch.leash import Leash
from stretto.torch.loops import Batches
from stretto.torch.net import (
    MOST_STEPS,
    SHARE,
    Net,
    Options,
    Seldom,
    Sized,
    forward_sums,
    kind_of_machine,
    statistics,
    sums,
)
from stretto.torch.packing import pack, unpack
from stretto.torch.phases import Phase, Phases
from stretto.torch.plan import Plan, TurnPlan
from stretto.torch.proof import Proof
from stretto.torch.reducer import Reducer, check_dense
from stretto.torch.state import Holder, Stateful, dismantle, has_gradients
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
        self._phases = Phases(self, self._begin_pass, self._several_steps)
        self._attempts = Attempts(Job._loop.__code__)
        self.gate.wanted = self._step_asked
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
        self._outlook = Outlook()
        self._epoch_calls = 0
        self._process = os.getpid()
        self._watched = 0
        """Batches of this loop that were watched."""
        self._looks = Seldom(SHARE, MOST_STEPS, time.perf_counter)
        """At what changes in passes that are not the last of their step."""
        self._frozen = Frozen(self._thaw)
        self._inside = False
        self._in_body = False
        self._asked_loop: weakref.ref[Generator[Any, None, None]] | None = None
        """The last of which a `for` or a `next` has asked for a batch. It ends when the script lets go of it."""
        self._paused = False
        """Whether the script is out of its body, and may come back."""
        self._departures = Departures()
        self._exits = False
        """Whether the script left its body by an exit."""
        self._died = False
        """Whether the thread that went through the loop has ended in it."""
        self._passed = False
        self._reduced: list[int] = []
        self._thread = 0
        """That goes through the loop under way."""
        self._left_by: threading.Thread | None = None
        """The thread that left it by an exception."""
        self._deeds = Deeds(self)
        self._left = False
        """The script has left the loop under way, by `break`."""
        self._steps_before = 0
        self._sent = Flags()
        self._settled: tuple[Flags, bool] | None = None
        """What a step that was attempted has brought, while the script does its own part of it."""
        self._plan: Plan | None = None
        self._fed: Part | None = None
        """What the body has been given."""
        self._noises = 0
        """Calls of `noise` in this pass."""
        self._habits = world.habits if world is not None else Habits()
        self._undo = Undo(holder, self._habits)
        self._writes = -1
        """To parameters, when the last backward pass of this pass through the body began; -1 before it."""
        self._grouped = 0
        """Parameters that the optimizers have."""
        self._metrics: dict[str, float] = {}
        self._failed_in_break: BaseException | None = None
        """What went wrong as the script left its loop, where Python lets nobody know."""
        self._broke_off = False
        """Whether the script left its loop between the passes of a step."""
        self._helpers = 0
        """Schedulers and scalers when the batch began."""
        self._net = Net(holder, bitwise=virtual_ranks > 0)
        self._proof: Proof | None = None
        self.collectives = Collectives(self)
        self._fingerprint_at_first: dict[str, str] = {}
        self._loops_behind = 0
        """Loops that the script has left, or passed over."""
        self._epoch_at = (-1, -1)
        """The call of `epochs` and the epoch that the script is in."""
        self._pacer = pacer.from_environment()
        self._leash = Leash(device)
        if world is not None:
            world.restore = self._restore
            world.proves = not virtual_ranks
        self._watchdog = world.member.watchdog if world is not None else Watchdog(time.monotonic)
        self._watchdog.waits = self._waits

    def _waits(self) -> bool:
        group = self.world.group if self.world is not None else None
        waits = self.collectives.waits or (group is not None and group.waits)
        return waits or (isinstance(self.reducer, Reducer) and self.reducer.awaits_others)

    # Where this worker is.

    @property
    def rank(self) -> int:
        """-1 as long as this worker is no member: on its way to the loop that the others are in, or told to leave."""
        if self.world is None:
            return 0
        return self.world.rank if self.generation and not self.world.closed else -1

    @property
    def leader(self) -> bool:
        """Whether this worker does what one does for all; said before the first batch, too. See `on_leader`."""
        if self.world is not None and self.world.closed:
            return False
        if self.world is None or self.generation:
            return self.rank == 0
        welcome = self.world.member.welcome
        return welcome is not None and welcome.leads

    @property
    def size(self) -> int:
        """How many workers train at this moment."""
        return self.world.size if self.world is not None else 1

    @property
    def members(self) -> set[str]:
        """The workers that train at this moment."""
        return set(self.world.member.members) if self.world is not None else set()

    @property
    def loop_seed(self) -> int:
        """Of the loop under way."""
        return self._plan.loop.seed if self._plan is not None else 0

    @property
    def generation(self) -> int:
        return self.world.member.generation if self.world is not None else 0

    @property
    def _passed_over(self) -> bool:
        """Whether this worker is on its way past loops that the others have left behind."""
        return self._passed and not self.generation

    @property
    def in_loop(self) -> bool:
        """Whether a loop is under way: the script is in its body, or about to ask for its next batch."""
        return self._inside

    @property
    def step(self) -> int:
        """Steps applied so far, over all loops; in what `on_leader` calls, the first step that this leader tells of."""
        return self.cursor.applied - self._deeds.steps_owed

    # What belongs to the job.

    def model(self, module: Module, *, local: Sequence[str] = ()) -> Module:
        """Register a model: its parameters, buffers and gradients are kept alike on all workers. `local` are names (or
        patterns of names) of buffers that may differ between them."""
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise checks.wrapped(type(module).__name__)
        self._refuse_inside(f"a {type(module).__name__}")
        module.to(self.device)
        syncnorm.adopt(module, self.collectives)
        self._net.local[len(self.holder.models)] = list(local)
        self.holder.models.append(module)
        return module

    def optimizer(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Register an optimizer: its `step` counts for the whole job."""
        self._refuse_inside(f"the optimizer {type(optimizer).__name__}")
        gates.optimizer(optimizer, self.gate, self._before_step)
        self.holder.optimizers.append(optimizer)
        return optimizer

    def keep(self, name: str, extra: AnyStateful, *, local: bool = False) -> AnyStateful:
        """Register anything else with a state: it travels to newcomers and into checkpoints, and is rolled back. It
        must be alike on all workers, unless it is `local`."""
        self._refuse_inside(f"the part {name!r}")
        if not all(callable(getattr(extra, method, None)) for method in ("state_dict", "load_state_dict")):
            raise checks.no_state(name, extra)
        if name in self.holder.extras:
            raise TrainingError(f"there is a part called {name!r} already", hint="give every part a name of its own")
        self.holder.extras[name] = extra
        if local:
            self._net.local_parts.add(name)
        return extra

    def forget(self, part: Module | AnyOptimizer) -> None:
        """Between loops: a model or an optimizer is not part of the job any more."""
        self._refuse_inside(f"a {type(part).__name__}")
        known: list[Any] = self.holder.models if isinstance(part, nn.Module) else self.holder.optimizers
        place = next((i for i, one in enumerate(known) if one is part), -1)
        if place < 0:
            raise TrainingError(f"this {type(part).__name__} is not registered", hint="forget what was registered")
        del known[place]
        if isinstance(part, nn.Module):
            local = self._net.local
            self._net.local = {i - (i > place): names for i, names in local.items() if i != place}
        else:
            gates.let_go(part)

    def _refuse_inside(self, what: str) -> None:
        self._leave_paused()
        if self._in_body:
            raise checks.registered_inside(what)

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
        self._deeds.begin_with(act)

    def every(self, steps: int) -> bool:
        """In the body, after `step()`: whether this is the last pass of every so many steps, and its step was applied.
        For what should happen once per step though the body may run several times."""
        if steps < 1:
            raise TrainingError(f"every({steps})", hint="say at least 1")
        self._undo.late.asks(steps)
        now = self.gate.inside and self.gate.steps_now and self._phases.counts
        return now and (self.cursor.applied + 1) % steps == 0

    def once_per_step(self, act: Callable[[], Any]) -> None:
        """In the body: have this done after the step, once, whatever passes it takes and however often it is done again
        (but once more if the worker dies in that very step)."""
        if not self._in_body:
            act()
        elif self._counts_once():
            self._deeds.ask_all(act)

    def once_by_leader(self, act: Callable[..., Any], *given: Any) -> None:
        """In the body: have the leader call this after the step, once; if it is lost in that very step, its successor
        does. `given` are kept as they are now."""
        if not self._in_body:
            if self.leader:
                act(*given)
        elif self._counts_once():
            self._deeds.ask_leader(lambda: act(*given))

    def _counts_once(self) -> bool:
        """In the last pass, also where its gradient did not arrive: others may have the step applied."""
        return (self.gate.last or not self.gate.inside) and self._phases.counts

    # What workers exchange.

    def all_reduce(self, value: Any, operation: str = "sum") -> Any:
        """The sum over all workers, or the `mean`, `max` or `min`, of a tensor, a number, or a dict or list of these.
        In a loop's body it is over the global batch: a mean weighs each worker's value by its samples. Sums and means
        have gradients. Between loops `value` may be a function: it is called again if a worker is lost meanwhile."""
        return self.collectives.all_reduce(value, operation)

    def all_gather(self, rows: Any) -> Any:
        """The rows of all workers: in a loop's body those of the global batch in its order, with gradients; each worker
        may have another number of them. Between loops `rows` may be a function, as for `all_reduce`."""
        return self.collectives.all_gather(rows)

    def broadcast(self, value: Any) -> Any:
        """What the leader has: tensors and plain values, or a function, which the leader calls (and, in a body, others
        in a batch that counts for nothing)."""
        return self.collectives.broadcast(value)

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self.collectives.barrier()

    def refuse_forks(self) -> None:
        """What a child of the script's process holds is its parent's."""
        if os.getpid() != self._process:
            raise TrainingError(
                "a forked process cannot train in its parent's job", hint="train, and exchange, in the one that joined"
            )

    def refuse_threads(self, what: str) -> None:
        """While a loop is under way: others than the one that goes through it."""
        if self._thread not in (0, threading.get_ident()):
            raise TrainingError(
                f"{what} in another thread than that of the loop", hint="exchange in the thread that takes the batches"
            )

    def be_between(self, call: str) -> None:
        """A member, between two loops: for `job.{call}`."""
        if self._inside and not self._in_body and not self._left and not self._attempts.between:
            raise TrainingError(
                f"job.{call} while a batch is read or weighed, where each worker is by itself",
                hint="call it in the loop's body or between loops",
            )
        if self._attempts.between:
            raise TrainingError(
                f"job.{call} between two steps of job.attempt()",
                hint="call it in the function of the attempt; before anything else is exchanged, end a loop early with "
                "job.stop()",
            )
        self._close_last_loop()
        if not self._loops_behind:
            raise TrainingError(
                f"job.{call} before the first loop: the workers of a job come together there",
                hint="call it inside of a loop or after one; what all workers need before, each can make by itself",
            )
        if self.world is not None and not self.generation:
            # On its way past loops that the others have left behind, it needs what they agreed on there.
            self._become_member(self._loops_behind)

    def recover(self, cause: GroupBroken, *, between: bool = False) -> None:
        """Go on with those that are left; `between`: two loops."""
        assert self.world is not None
        self.world.between = between
        try:
            self._resume(self.world.recover(self.cursor, cause))
        finally:
            self.world.between = False
        self._stand_in(self.world)
        if not between:
            self._watch()

    def _stand_in(self, world: World) -> None:
        """After a loss: the leader may not know that the last step was applied."""
        if world.stands_in:
            world.stands_in = False
            self._deeds.stand_in()

    def between_key(self) -> tuple[int, int, int]:
        return (self._loops, *self._epoch_at)

    def uses_late(self) -> None:
        """A body exchanges something: after a step that must be possible to take back, too."""
        if self._phases.over and self._plan is not None and self._plan.in_passes:
            raise TrainingError(
                "an exchange after job.phases(), in a body that takes several passes for a step",
                hint="do it inside of a phase",
            )
        if self.gate.steps:
            self._undo.late.happened = True
        if self._proof is not None:
            self._proof.valid = False

    def phases(self, batch: Any, *phases: Phase) -> list[Any] | None:
        """In the body: these functions of a batch one after the other, each with a backward pass and a step of its own.
        Where batches are cut into passes each goes through all of them before the next begins. What they returned for
        the last micro-batch; None in passes that only keep their batch."""
        if not self._in_body:
            raise checks.no_phases("this is no body of a loop")
        return self._phases.run(batch, phases, inside=self._inside)

    def attempt(self, act: Callable[[Any], Any], loop: Iterator[Any] | None = None) -> Any:
        """One step of a loop (if none is given, of that which was made last): call the function on its batch until the
        step is applied, and return what it returned; None when the loop is over."""
        return self._attempts.run(act, loop, inside=lambda: self._inside, in_body=self._in_body)

    def stop(self) -> None:
        """End the loop for all workers, at the same step: the next boundary at which all know of it."""
        if self._in_body:
            self._deeds.stop = True
        else:
            self.holder.stopping = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to a file, from one worker; in the body of a loop at the batch's end, when state and
        cursor agree."""
        self._leave_paused()
        self._deeds.ask_file(Path(path))
        if not self._in_body:
            self._deeds.save()

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
        epoch = before = 0
        while epoch < count:
            there = self._epoch_of_job(call)
            if there is not None and there.epoch > epoch and there.loop > self._loops:
                # The last epoch at most: what comes after it is for members.
                epoch, self._loops = min(there.epoch, count - 1), there.loop
                self._epoch_calls = max(self._epoch_calls, there.calls)
                self._leave_behind(there.loop - 1)
            self._epoch_at = (call, epoch)
            self.holder.forget_replies(call, before)
            before = self._loops
            self._note_epoch(epoch_places.Place(call, epoch, self._loops, self._epoch_calls))
            chance.begin_epoch(call, epoch, self.device)
            self._outlook.epoch(self._loops, count - epoch - 1)
            yield epoch
            epoch += 1
        self._epoch_at = (call, count)
        self._outlook.over()

    def _epoch_of_job(self, call: int) -> epoch_places.Place | None:
        """Where this call of `epochs` should be."""
        reached, known = self.cursor.loop, self.holder.epochs
        if self.world is not None and not self.generation:
            told = epoch_places.read(self.world.member.epochs_told)
            if told > known:
                reached, known = self.world.member.loops_done, told
        place = epoch_places.find(known, call)
        return place if place is not None and place.loop <= reached else None

    def _note_epoch(self, here: epoch_places.Place) -> None:
        """For whoever comes later."""
        self.holder.epochs = epoch_places.note(self.holder.epochs, here)
        if self.world is not None:
            with self.world.member.changed:
                self.world.member.epochs = tuple(self.holder.epochs)

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
    ) -> Batches[Batch]:
        """Global batches of `size` samples, of which each worker gets its slice, `per_worker` samples at a time.

        They are shuffled, unless `shuffle` is false or a `sampler` gives the order of all samples; each list that a
        `batch_sampler` gives is one global batch. A map-style `DataLoader` is taken apart: its batch size is `size`.
        With `accumulate` a step is made of so many global batches. With `weight` the loss is a mean over something else
        than samples: it says how much a batch has of it (tokens, for instance).
        """
        for name, value in (("size", size), ("epochs", epochs), ("seed", seed), ("per_worker", per_worker)):
            if not isinstance(value, int) and (value is not None or name in ("epochs", "seed")):
                raise checks.not_a_number(name, value)
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
        return self._made(plan, reader)

    def steps(self, count: int, *, seed: int = 0) -> Batches[Turn]:
        """A loop of so many steps for scripts that make their own data. Each worker has one of the places of a step,
        and all count alike; what it makes should depend on the step, the place and the number of places alone."""
        loop = Turns(total_steps=count, seed=seed)
        return self._made(TurnPlan(loop, self.virtual_ranks), TurnReader(loop))

    def _made(self, plan: Plan, reader: Reader) -> Batches[Any]:
        return Batches(plan.loop, self._attempts.made(self._loop(plan, reader)), self)

    def goes_on(self, loop: Generator[Any, None, None]) -> None:
        """The script asks for the next batch of this loop."""
        self._departures.asks()
        if self._asked_loop is None or self._asked_loop() is not loop:
            self._asked_loop = weakref.ref(loop)
        self._paused = False

    def pauses(self, loop: Generator[Any, None, None]) -> None:
        """A `for` over this loop has ended by `break`, and a variable holds the loop: the script may come back to it,
        unless it calls what is for others than its body."""
        if self._asked_loop is None or self._asked_loop() is not loop or not (self._inside and self._in_body):
            return
        self._in_body, self._paused = False, True
        self._note_departure()
        self.collectives.end()
        if self.reducer is not None and self.reducer.failed is not None:
            # What the script does next must not be done with what others have one step more of.
            self._leave_paused()

    def steps_before(self) -> int:
        """In a rehearsal a batch is none; where a step takes several passes, those who count would count passes."""
        in_passes = self._plan is None or self._plan.in_passes or self._attempts.on
        return -1 if in_passes or not self._inside else self.cursor.step

    def _leave_paused(self) -> None:
        loop = self._asked_loop() if self._paused and self._asked_loop is not None else None
        self._paused = False
        if loop is not None:
            loop.close()

    def _loop(self, plan: Plan, reader: Reader) -> Generator[Any, None, None]:
        self.refuse_forks()
        self.collectives.refuse_inside("a loop")
        self._attempts.begins()
        self._close_last_loop()
        # Not when it was made: what is never gone through is no loop.
        number, self._loops = self._loops, self._loops + 1
        recording.enter(self)
        loop, self._plan = plan.loop, plan
        if self.world is not None:
            self.world.says = number, plan.fixed
        self._prepare(number, loop)
        if self._comes_late(number):
            yield from self._rehearse(plan, reader)
        if not self._enter(number, loop):
            if self.generation:
                self._watchdog.leave()
            self._leave_behind(number)
            chance.end_loop(loop.seed, number, self.device)
            return
        if self.world is not None:
            plan.look_at(reader)
        self._inside, how, self._left = True, "end", False
        self._watched = 0
        cut = self._follow(plan, reader)
        while self._goes_on(number, loop):
            step = self.cursor.step
            parts = self._parts(plan, step)
            try:
                parts, batches = self._read(plan, reader, parts)
            except GroupBroken as broken:
                self.recover(broken)
                cut = self._follow(plan, reader)
                continue
            if self.rank == 0:
                self._deeds.lead()
            weight = self._begin([part.share for part in parts], plan.batches(step))
            options = Options(self.holder) if len(parts) > 1 else None
            for i, (part, batch) in enumerate(zip(parts, batches, strict=True)):
                self._feed(number, part, weight, first=i == 0, last=i == len(parts) - 1)
                batch.last = i == len(parts) - 1
                self._in_body, self._exits, self._died, self._thread = True, False, False, threading.get_ident()
                looks = not batch.last and (self._watched <= _WATCHED or (i == 0 and self._looks.due()))
                before = self._looks.timed(self._sums) if looks else None
                try:
                    yield batch
                except GeneratorExit:
                    # Python may be late to let go of it: then the script is in another loop already, or past this one.
                    if self._loops == number + 1 and self._inside:
                        if self._in_body:
                            self._note_departure()
                        self._leave_early()
                    raise
                finally:
                    if self._loops == number + 1:
                        self._in_body = False
                        self.collectives.end()
                if self._loops != number + 1:
                    raise checks.two_loops()
                if before is not None:
                    self._check_unchanged(*before, *self._looks.timed(self._sums))
                if options is not None and (moved := options.moved(last=batch.last)):
                    raise checks.changed_in_pass(step, moved)
            self.gate.end()
            self._phases.end()
            self._pacer.pause()
            if plan.size < loop.size:
                self._check_stepped()
            ends = self._settle()
            self._watchdog.step()
            if ends:
                how = "stop"
                break
            if self._attempts.on and self.cursor.step != step and self._goes_on(number, loop):
                yield from self._between_steps()
            if (self.rank, self.size, self.cursor.step) != (*cut, step + 1) or self._some_wait():
                cut = self._follow(plan, reader)
        self._inside, self._thread = False, 0
        chance.end_loop(loop.seed, number, self.device)
        self._frozen.watch((), self.holder.trained)
        if self.cursor.loop == number:
            self._end("stop" if self.cursor.over else how)
        self._watchdog.leave()

    def _goes_on(self, number: int, loop: AnyLoop) -> bool:
        return loop.has(self.cursor.step) and self.cursor.loop == number and not self.cursor.over

    def _between_steps(self) -> Iterator[Any]:
        """In a loop that is driven by attempts: the script goes on with its step applied, and comes back. It may change
        the state there: so all that takes or sends it waits until then."""
        if self.world is not None and self._settled is None:
            # The step was applied by others; they have done already what this script does next.
            self._attempts.keep(self.holder, self.cursor)
        self._watchdog.leave()
        try:
            yield SETTLED
        except GeneratorExit:
            self._leave()
            raise
        self._watchdog.enter()
        self._attempts.put_back(self.holder)
        self._deeds.save()
        if self._settled is not None:
            self._move_on(*self._settled)

    def _parts(self, plan: Plan, step: int) -> list[Part]:
        if self.world is None:
            return plan.parts(step, 0, 1)
        place, places = self.world.place
        if (other := self.world.part_of) >= 0:
            return [part._replace(counts=False, share=0.0) for part in plan.parts(step, other, places)]
        return plan.parts(step, place, places)

    def _read(self, plan: Plan, reader: Reader, parts: list[Part]) -> tuple[list[Part], Iterable[Any]]:
        """The samples of the parts; with a weight all of them are needed before the first is fed."""
        read = (self._read_part(plan, reader, part) for part in parts)
        if plan.weight is None:
            return parts, read
        batches = list(read)
        try:
            own = [
                float(plan.weight(batch)) if part.counts else 0.0 for part, batch in zip(parts, batches, strict=True)
            ]
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(f"the weight of a batch is no number: {error}", hint="let weight= return one") from None
        if not all(math.isfinite(amount) and amount >= 0 for amount in own):
            raise TrainingError(f"the weight of a batch is {min(own)}", hint="give a number that is not negative")
        group = self.world.group if self.world is not None else None
        told = group.all_gather_bytes(json.dumps(own).encode()) if group is not None and group.size > 1 else []
        # Added up exactly: the sum must not depend on who weighed what.
        total = math.fsum(amount for text in told for amount in json.loads(text)) if told else math.fsum(own)
        count = plan.batches(parts[0].step)
        shares = [count * amount / total if total else 0.0 for amount in own]
        return [part._replace(share=share) for part, share in zip(parts, shares, strict=True)], batches

    def _read_part(self, plan: Plan, reader: Reader, part: Part) -> Any:
        if reader.draws:
            first = part.virtual if self.virtual_ranks else part.first
            chance.begin_pass(plan.loop.seed, self.cursor.loop, part.step, first, self.device, chance.READING)
        return reader.read(part)

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
            rows = plan.rows(part)
            self.collectives.begin(part, rows, first=True, last=False, several=plan.in_passes)
            self._phases.rehearse(part)
            self._fed, self._noises, self._in_body = part, 0, True
            try:
                yield reader.read(part)
            except GeneratorExit:
                self._leave_rehearsal()
                raise
            finally:
                self._in_body = self._deeds.stop = False
                self.collectives.end()
        self.gate.end()
        self._take_back(rehearsal=True)

    def _leave_rehearsal(self) -> None:
        """The script has left its loop by `break` in a batch that counts for nothing. Where the others have left it,
        too (they only looked at a batch), it goes on; where they train in it, it must not come to what follows."""
        assert self.world is not None
        if self.world.member.loops_done > self.holder.loop:
            self._in_body = self._deeds.stop = False
            self.collectives.end()
            self.gate.end()
            self._take_back(rehearsal=True)
            self._passed = True
            self._leave_behind(self.holder.loop)
            return
        error = checks.left_in_rehearsal()
        if self._departures.departure() is not Departure.BREAK:
            # What went wrong is told by itself. If the script catches it, it must not go on all the same.
            self._failed_in_break = error
            return
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self.close(Bye(reason="error", text=f"{type(error).__name__}: {error}"))
        # Nobody hears of an error that is raised while a generator ends.
        os._exit(1)

    def _comes_late(self, number: int) -> bool:
        """The job runs already, and this worker is about to join it."""
        if self.world is None or self.generation:
            return False
        member = self.world.member
        return member.welcome is not None and member.welcome.generation > 0 and number >= member.loops_done - 1

    def _prepare(self, number: int, loop: AnyLoop) -> None:
        """What a loop needs, whoever is a member."""
        if self.world is None:
            # By hand nothing travels, and yet what could not is said.
            dismantle({name: extra.state_dict() for name, extra in self.holder.extras.items()})
        for model in self.holder.models:
            syncnorm.adopt(model, self.collectives)
        self.holder.helpers()
        self.holder.loop = number
        ours = self.holder.parameters()
        if any(not given.requires_grad for given in ours if id(given) in self.holder.trained.ids):
            self.holder.trained.put(set())
        self._look_at_parameters()
        if not self._fingerprint_at_first:
            # Before any pass: a model may make buffers in its first.
            self._fingerprint_at_first = {
                "model": self.holder.fingerprint(),
                "optimizers": ", ".join(type(given).__name__ for given in self.holder.optimizers),
            }
        self._undo.enter()
        if self.reducer is None:
            if self.virtual_ranks:
                self.reducer = VirtualReducer(self.holder.parameters(), self.virtual_ranks, flags=flags.COUNT)
                self.passes = Passes(self.holder, self.reducer, self.virtual_ranks)
            else:
                self.reducer = Reducer(self.holder.parameters(), flags=flags.COUNT, trained=self.holder.trained)
            self.reducer.began, self.reducer.rebuilt = self._backward_begins, self._watch_frozen
            self.reducer.broke = self._undo.hold
            self.gate.arrived = lambda: self.reducer is None or self.reducer.failed is None
        self._watch_frozen()

    def _enter(self, number: int, loop: AnyLoop) -> bool:
        """Be in this loop; False if the job is past it."""
        if self.world is not None and self.generation == 0:
            if number < self.world.member.loops_done - 1:
                # Nobody waits for it on its way. The last of them is different: what may follow is for members.
                self._passed = True
                return False
            self._become_member(number)
        if number < max(self.world.member.loops_done if self.world is not None else 0, self.cursor.loop):
            return False
        if self.cursor.loop < number:
            self.cursor = Cursor(number, 0, self.cursor.applied)
        if self.world is not None and self.world.again:
            self._resume(self.world.share_again(self.cursor))
        self.holder.arrive()
        self.holder.forget_statistics(number)
        if self.world is None:
            return True
        self._watch()
        self.world.pace.begin()
        self._watchdog.enter()
        return True

    def _become_member(self, number: int) -> None:
        """On the way to this loop."""
        assert self.world is not None
        self.cursor = self.world.join(self._fingerprint(number), self.cursor)
        if self.cursor.loop < number:
            # All who held state are gone since it passed over those loops: it cannot go back, but another one can.
            self.world.give_up(Evicted(f"the job begins again in loop {self.cursor.loop}, which it has passed over"))
        if self.cursor.loop == self.world.member.loops_done - 1:
            # The others are at its end.
            self._share_statistics(self.world, self.cursor.loop)
        self._open_ledger()

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
        return {} if number else self._fingerprint_at_first

    def _follow(self, plan: Plan, reader: Reader) -> tuple[int, int]:
        """Read ahead for this place among the members, from this step on."""
        first, rank, size = self.cursor.step, self.rank, self.size
        begin = self._parts(plan, first) if plan.loop.has(first) else []
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
        self._helpers = gates.count()
        if isinstance(self.reducer, Reducer):
            self.reducer.exchange(group, weight, self._sent, watch=self._watched <= _WATCHED)
        elif self.passes is not None:
            self.passes.start(group, self._sent)
        if self.world is not None:
            self._undo.begin(self.cursor, alone=self.size == 1)
        self._begin_proof()
        return weight

    def _some_wait(self) -> bool:
        """Whether the next batch is cut for some of the members only."""
        return self.world is not None and len(self.world.feeders) < self.size

    def _begin_proof(self) -> None:
        """In the step in which newcomers show that they compute the same."""
        self._proof = None
        world = self.world
        if world is None or not world.proving or recording.compares() or isinstance(self._plan, TurnPlan):
            return
        concerned = world.rank in world.unproven or world.rank in world.unproven.values()
        models = self.holder.models if concerned else []
        self._proof = Proof(models, self.holder.parameters() if concerned else [])
        self._proof.valid = not self._net.local_parts and not any(self._net.local.values())

    def _judge_proof(self) -> None:
        """The step is applied."""
        proof, self._proof = self._proof, None
        if proof is None:
            return
        proof.end()
        assert self.world is not None
        assert self.world.group is not None
        try:
            found = proof.compare(self.world.group, self.world.unproven, kind_of_machine())
        except GroupBroken:
            # The next sum finds out.
            return
        if found is not None:
            names = self.world.member.members
            raise checks.depends_on_history(names[found.newcomer], names[found.other], found.by)

    def _leave_behind(self, number: int) -> None:
        self._loops_behind = max(self._loops_behind, number + 1)

    def _thaw(self) -> None:
        """Parameters that were frozen are about to be trained."""
        if self.reducer is not None:
            self.reducer.take_in()
            self._watch_frozen()

    def _watch_frozen(self) -> None:
        self._frozen.watch(self.holder.models, self.holder.trained)

    def _several_steps(self) -> None:
        self._habits.goes_on = True

    def _step_asked(self) -> None:
        if self._thread not in (0, threading.get_ident()):
            raise checks.read_ahead(self.cursor.step)
        self._step_wanted()

    def _step_wanted(self) -> None:
        if self._phases.over:
            raise checks.outside_of_phases(self.cursor.step)

    def _backward_begins(self) -> None:
        self._step_wanted()
        if isinstance(self.reducer, Reducer) and self.reducer.rounds:
            self.reducer.tell(self._sent.in_round(self.reducer.rounds + 1))
        if self.gate.steps:
            self._several_steps()
        if self._plan is not None and self._plan.in_passes:
            before, self._writes = self._writes, self._undo.writes()
            if before not in (-1, self._writes) and not self.gate.steps:
                raise checks.moved_in_passes(self.cursor.step)
        if self.gate.asked_here and self._plan is not None and self._plan.in_passes:
            raise checks.phases_in_passes(self.cursor.step)

    def _feed(self, number: int, part: Part, weight: float, *, first: bool, last: bool) -> None:
        """Just before a pass through the body."""
        share = part.share / weight if weight else 1.0
        self._begin_pass(part, share, first=first, last=last)
        self._phases.fed(part, share, first=first, last=last)
        if self._ledger is not None and part.counts:
            self._ledger.fed(number, part.step, self.generation, part.indices)
        if self.world is not None:
            total = self._total_steps(number)
            with self.world.member.changed:
                self.world.member.loop, self.world.member.step = number, part.step
                self.world.member.total = total

    def _begin_pass(self, part: Part, share: float, *, first: bool, last: bool, phase: int = 0) -> None:
        """A pass through the body, or (from 1 on) of a phase."""
        self._check_whole(self.reducer)
        self.gate.begin(first=first, last=last)
        self._writes = -1
        if self.passes is not None:
            self.passes.begin(part, part.share)
        elif isinstance(self.reducer, Reducer) and not (first and last and share == 1.0):
            (self.reducer.conclude if last else self.reducer.accumulate)(share)
        self._fed, self._noises = part, 0
        several = self._plan is not None and self._plan.in_passes
        rows = self._plan.rows(part) if self._plan is not None else len(part.indices)
        self.collectives.begin(part, rows, first=first, last=last, several=several, phase=phase)
        if self._plan is not None:
            seed, loop = self._plan.loop.seed, self.cursor.loop
            place = max(part.virtual, 0) if self.virtual_ranks else part.first
            chance.begin_pass(seed, loop, part.step, place, self.device, phase)
        if self.world is not None:
            self._watchdog.moves()

    def _total_steps(self, number: int) -> int:
        """Of the job, as far as is known now: epochs of a sampler may differ in length."""
        steps = self._plan.loop.total_steps if self._plan is not None else 0
        return self.cursor.applied - self.cursor.step + steps + self._outlook.after(number, steps)

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, a row of this shape for each sample of the batch: the same at any number of workers, and
        others at each call."""
        if not self._in_body or self._fed is None or self._plan is None:
            raise TrainingError("noise() is for the body of a loop", hint="outside of loops use torch.randn")
        part, seed = self._fed, self._plan.loop.seed
        loop, phase = self.cursor.loop, self._phases.number
        call, self._noises = self._noises, self._noises + 1
        return chance.noise(seed, loop, part.step, part.indices, shape, dtype, phase, call).to(self.device)

    def _flags(self) -> Flags:
        return Flags.of(
            ahead=self.world.offset() if self.world is not None else 0,
            stop=self.holder.stopping,
            steps=self._steps_before,
            sign=self._plan.sign(self.cursor.step) if self._plan is not None else 0,
            compare=self.size > 1 and self.rank == 0 and self._wants_comparison(),
        )

    def _wants_comparison(self) -> bool:
        """After the next step, as the leader: newcomers do not know what there is to compare."""
        last = self._plan is not None and self.cursor.step + 1 >= self._plan.loop.known_end
        return self._net.wanted(self.generation) or (last and (self._net.stepped or self._steps_before > 0))

    def _settle(self) -> bool:
        """After the body: count the step, or undo it; then go where the job goes. True when the loop is to end."""
        reducer, world = self.reducer, self.world
        assert reducer is not None
        self._settled = None
        alone = world is None or world.size == 1
        self._check_whole(reducer)
        if isinstance(reducer, Reducer) and reducer.withholds:
            raise checks.went_on_without_backward(self.cursor.step, "the last pass of this worker")
        if not alone and not reducer.rounds and reducer.failed is None:
            self._skip(reducer)
        if self.passes is not None:
            self.passes.join_buffers()
        self._finish_sending()
        self._check_helpers()
        self._undo.look()
        if reducer.failed is not None:
            assert world is not None
            asked, before = self._deeds.take(), self.cursor.applied
            self._take_back()
            self.recover(reducer.failed)
            if self.cursor.applied > before:
                # Others had the gradient, and have applied the step.
                self._catch_up(asked)
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
            self._judge_proof()
        self.holder.stopping |= self._deeds.stop or recording.settled(self)
        self._deeds.stop = False
        acted = self._deeds.do()
        # What a trainer does between two attempts belongs to its step.
        saved = not self._attempts.on and self._deeds.save()
        plain = not acted and not saved
        if world is None:
            return bool(found.stop)
        if self._ledger is not None:
            self._ledger.applied(loop, step, self.generation)
        with world.member.changed:
            world.member.applied = self.cursor.applied
        world.committed(self.cursor)
        if self._attempts.on:
            self._settled = found, plain
            return bool(found.stop)
        return self._move_on(found, plain)

    def _move_on(self, found: Flags, plain: bool) -> bool:
        """After a step that was applied: write a checkpoint, go where the job goes. True when the loop is to end."""
        world = self.world
        assert world is not None
        if self.checkpoints is not None:
            plain &= not self.checkpoints.consider(self.cursor, self.generation, leader=world.rank == 0)
        ahead, size = round(found.ahead), world.size
        if found.stop:
            return True
        alone = size == 1
        if world.leaving and alone:
            self._suspend(world)
        if world.member.urgent():
            self._resume(world.recover(self.cursor, None))
            self._stand_in(world)
            self._watch()
        elif ahead and found.same_ahead(size):
            number = self.generation + ahead // size
            self._resume(world.take_up(ahead // size, self.cursor))
            self._watch()
            if self.generation == number:
                # Nobody was lost: who led before has done it.
                self._deeds.settle_debts()
        else:
            if alone:
                self._leash.pull()
            world.stepped(plain=plain)
        return False

    def _catch_up(self, asked: Asked) -> None:
        """Others have applied the step in which a worker was lost."""
        self._deeds.catch_up(asked)
        self.holder.stopping |= asked.stop

    def _compare(self, found: Flags) -> None:
        """Whether all members hold the same after this step, where they all look."""
        assert self.world is not None
        assert self.world.group is not None
        size = self.world.size
        self._net.stepped |= found.steps > 0
        ahead = round(found.ahead)
        # Whoever stays is compared in the first steps of the next generation.
        switches = ahead and found.same_ahead(size) and self.world.loses(ahead // size)
        if not (found.compare or switches or found.stop):
            self._net.passed()
            return
        try:
            difference = self._net.compare(self.world.group, self.cursor.applied)
        except GroupBroken:
            # The next sum finds out.
            return
        if difference is not None:
            raise checks.replicas_differ(*difference, self.cursor.applied)

    def _compare_left(self, world: World) -> None:
        """Whether all members held the same when they left their loop by `break`."""
        try:
            found = self._net.compare_left(world.group)
        except GroupBroken:
            # Those who are left find out in the next loop.
            return
        if found is not None:
            raise checks.replicas_differ(*found[0], found[1])

    def _share_statistics(self, world: World, loop: int) -> None:
        """Between loops all have the leader's: what they evaluate there must not depend on who does it. If a worker is
        lost meanwhile, it is that of those who are left, unless one of them has been told already."""
        own = [] if self.virtual_ranks else statistics(self.holder, self._net.local)
        while own and (told := self.holder.statistics_after(loop)) is None:
            group = world.group
            if group is None or group.size == 1:
                return
            try:
                self.holder.keep_statistics(loop, group.all_gather_bytes(pack(own) if group.rank == 0 else b"")[0])
                # Nobody goes on, to the script's end perhaps, before all have them.
                group.all_gather_bytes(b"")
            except GroupBroken as broken:
                self.recover(broken, between=True)
        if own:
            assert told is not None
            with torch.no_grad():
                for buffer, given in zip(own, unpack(told), strict=True):
                    buffer.copy_(given)

    def _sums(self) -> tuple[dict[str, int], dict[Sized, int]]:
        """Of what only the last pass of a step may change."""
        return sums(self.holder), {} if self.virtual_ranks else forward_sums(self.holder, self._net.local)

    def _check_unchanged(
        self, held: dict[str, int], buffers: dict[Sized, int], held_now: dict[str, int], buffers_now: dict[Sized, int]
    ) -> None:
        """By a pass that is not the last of its step. Buffers may appear, or grow, as they are needed."""
        if changed := [name for name, found in held_now.items() if found != held.get(name)]:
            raise checks.changed_in_pass(self.cursor.step, changed)
        if changed := [sized[0] for sized, found in buffers_now.items() if found != buffers.get(sized, found)]:
            raise checks.buffer_changed_in_pass(self.cursor.step, changed)

    def _check_helpers(self) -> None:
        """Those who come later make theirs before their first batch."""
        if gates.count() > self._helpers:
            raise checks.registered_inside("a scheduler or a scaler")

    def _learn_habits(self, reducer: Reducer | VirtualReducer) -> None:
        """After a batch: whether its gradients are needed for the next one."""
        if isinstance(reducer, Reducer) and reducer.carried is not None and not self.holder.unapplied:
            self._habits.carries = bool(self._habits.carries) or reducer.carried
        self._habits.goes_on = bool(self._habits.goes_on) or self.gate.steps > 1
        self._steps_before = self.gate.steps
        self._undo.late.learn(self.cursor.applied)
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
            # What is left over from the batch before is alike on all, and stays.
            reducer.exchange(group, 1.0 / self.size, sent)
            reducer.contribute_nothing()
        elif group is not None:
            group.abort("a body without a backward pass")
            raise checks.went_on_without_backward(self.cursor.step, "this worker")

    def _check_whole(self, reducer: Reducer | VirtualReducer | None) -> None:
        """Between passes: a backward pass that ended with an exception has left its sum half done. Alone, with whole
        batches, nothing depends on it."""
        if isinstance(reducer, Reducer) and reducer.interrupted and reducer.failed is None:
            if self.size > 1 or (self._plan is not None and self._plan.in_passes):
                raise checks.backward_failed(self.cursor.step)
            reducer.forget_interrupted()

    def _check_stepped(self) -> None:
        if self.holder.optimizers and not self.gate.asked and self.gate.arrived():
            raise checks.no_step_in_last_pass(self.cursor.step)

    def _before_step(self) -> None:
        """An optimizer is about to change the state."""
        self._check_gradients()
        if self.passes is not None:
            self.passes.join_buffers()
        self._finish_sending()
        if self.gate.steps_now:
            self._undo.before_step(self.cursor)

    def _flushes(self) -> bool:
        """Whether a step outside of loops applies what the last loop left over, which all its members hold alike."""
        return self.holder.unapplied and self._loops > 0 and (self.world is None or self.generation > 0)

    def _check_gradients(self) -> None:
        """They are those of the global batch. Where nobody listens there is nobody else."""
        reducer = self.reducer
        if reducer is None or reducer.failed is not None:
            return
        if torch._C._current_graph_task_id() != -1:
            raise checks.step_in_backward(self.cursor.step)
        self._check_groups()
        if self._watched <= _WATCHED:
            for given in self.holder.parameters():
                check_dense(given.grad)
        if reducer.unseen():
            raise checks.grows_unseen(self.cursor.step)
        listens = self.size > 1 or self._watched <= _WATCHED
        # After a batch without a step there are gradients that wait for one.
        if not listens or reducer.backwards or self.holder.unapplied:
            return
        if any(given.grad is not None for given in self.holder.parameters()):
            raise checks.step_without_backward(self.cursor.step)

    def _check_groups(self) -> None:
        """Nobody adds up the gradients of a parameter that was made in the body."""
        grouped = sum(len(group["params"]) for optimizer in self.holder.optimizers for group in optimizer.param_groups)
        if grouped == self._grouped:
            return
        self._grouped, known = grouped, set(self._reduced)
        for optimizer in self.holder.optimizers:
            for given in (given for group in optimizer.param_groups for given in group["params"]):
                if id(given) not in known:
                    raise checks.made_inside(type(optimizer).__name__, tuple(given.shape))

    def _finish_sending(self) -> None:
        """What a newcomer is being sent must not change before it is there."""
        if self.world is not None and self.reducer is not None and self.reducer.failed is None:
            try:
                self.world.finish_sending()
            except GroupBroken as broken:
                self.reducer.fail(broken)

    def _take_back(self, *, rehearsal: bool = False) -> None:
        self._deeds.drop()
        if self._proof is not None:
            self._proof.end()
            self._proof = None
        self._undo.take_back(keep_new=rehearsal)
        for helper in self.holder.helpers():
            gates.forget_scaling(helper)

    def _resume(self, cursor: Cursor) -> None:
        """A generation was entered: go on from where it is."""
        if cursor.applied > self.cursor.applied:
            # Those who have done the step have told of it, or will.
            self._deeds.settle_debts()
        self.cursor = cursor
        self._steps_before = 0
        # Not all know of the step before.
        self._net.stepped = True

    def _watch(self) -> None:
        if self.world is not None:
            with self.world.member.changed:
                self.world.member.loop, self.world.member.step = self.cursor.loop, self.cursor.step

    # Ends.

    def _end(self, how: str) -> None:
        """The barrier at the loop's end."""
        number, generation = self.cursor.loop, self.generation
        if self.world is not None:
            self.cursor = self.world.end_loop(self.cursor, how)
            self._stand_in(self.world)
            self._compare_left(self.world)
            self._share_statistics(self.world, number)
        if self.generation != generation:
            self._steps_before = 0
        self._deeds.end()
        self.holder.stopping = False
        if self.cursor.loop == self._loops - 1:
            self.cursor = Cursor(self._loops, 0, self.cursor.applied)
        self._leave_behind(number)

    def _leave_early(self) -> None:
        """The script left the loop: by `break`, or by an exception; which of them, its next call tells."""
        self._broke_off = not self.gate.last and (self.gate.asked_here or not self.gate.first)
        self.gate.end()
        if self._proof is not None:
            self._proof.end()
            self._proof = None
        reducer = self.reducer
        lost = reducer.failed if reducer is not None else None
        try:
            if lost is not None:
                asked = self._deeds.take()
                self._take_back()
                self._find_last_step(lost, asked)
            else:
                self._count_break(reducer)
        except BaseException as error:
            # Python drops what is raised while a generator is closed.
            self._failed_in_break = error
        self._left = True
        self._leave()

    def _count_break(self, reducer: Reducer | VirtualReducer | None) -> None:
        """The step in which the script left its loop, if it did one."""
        if self.gate.steps and reducer is not None:
            loop, step, applied, over = self.cursor
            self.cursor = Cursor(loop, step + 1, applied + 1, over)
            self._learn_habits(reducer)
            if self._ledger is not None:
                self._ledger.applied(loop, step, self.generation)
        if self.size > 1 and not recording.compares():
            self._net.leave(self.generation, self.cursor.applied)
        self._deeds.do()
        self._deeds.save()

    def _leave(self) -> None:
        """The script goes out of its loop."""
        self._thread = 0
        self._frozen.watch((), self.holder.trained)
        if self._plan is not None:
            chance.end_loop(self._plan.loop.seed, self.cursor.loop, self.device)
        if self.world is not None and self._inside:
            if self._failed_in_break is None:
                self.world.say_loop_end(self.cursor, "break")
            self._watchdog.leave()

    def _close_last_loop(self) -> None:
        """A loop that was left by `break` ends when the script goes on."""
        self._leave_paused()
        if self._in_body and self._inside:
            # Its batches were taken one by one.
            self._in_body = False
            self.collectives.end()
            self._leave_early()
        self._raise_of_break()
        if not self._in_body:
            self._deeds.save()
        if self._inside:
            self._attempts.put_back(self.holder)
            self._inside = False
            self._end("break")

    def _raise_of_break(self) -> None:
        """What was wrong with how the script left its loop."""
        failed, self._failed_in_break = self._failed_in_break, None
        if failed is not None:
            if isinstance(failed.__context__, GeneratorExit):
                failed.__context__ = None
            raise failed
        if self._broke_off:
            raise checks.broke_off(self.cursor.step)

    def _find_last_step(self, lost: GroupBroken, asked: Asked) -> None:
        """A worker was lost in the very step in which the script left its loop: whoever has it applied gives it to the
        others. If nobody has, the script does not come back to do it again, but those who come after it can."""
        if self.world is None or self.world.closed:
            return
        before = self.cursor.applied
        try:
            self.recover(lost)
        except SystemExit:
            # It was told to end, and nothing of the script may run any more.
            sys.stdout.flush()
            os._exit(0)
        if self.cursor.applied > before:
            self._catch_up(asked)
        else:
            if self.checkpoints is not None and self.rank == 0:
                self.checkpoints.write_now(self.cursor, self.generation)
            self.world.give_up(
                Evicted("a worker was lost in the step in which the script left its loop by break: others do it again")
            )

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
            self._ledger = PatientLedger(folder / f"{member.worker}-{member.incarnation}{SUFFIX}", member.worker)

    def forget_parent(self) -> None:
        """In a child that the script has forked: what it inherited belongs to its parent."""
        if self.world is not None:
            self.world.forget()

    def _note_departure(self) -> None:
        """How the script leaves its body."""
        how = self._departures.departure()
        self._left_by = threading.current_thread() if how is not Departure.BREAK else None
        self._exits = how is Departure.EXIT

    def ends_with_thread(self, thread: threading.Thread) -> None:
        """One has ended by what nobody caught, or by an exit, which ends a thread only."""
        if self._inside and (thread is self._left_by or (self._in_body and thread.ident == self._thread)):
            self._died = True

    def finish(self) -> None:
        """The script has ended by itself: well, unless a loop was under way."""
        goes_on = self.world is None or not self.world.closed
        if goes_on:
            self._leave_paused()
        more = self._plan is not None and self._plan.loop.has(self.cursor.step + 1)
        exits = self._exits and self._departures.ended_by_exit()
        exits |= self._in_body and more and self._departures.ended_in_body()
        # A thread that nobody waits for ends with the script.
        exits |= self._in_body and more and self._thread not in (0, threading.get_ident())
        if self._inside and (exits or self._died) and self._plan is not None and goes_on:
            raise checks.ended_inside(self.cursor.step, self._plan.loop.total_steps)
        if self._in_body and goes_on:
            # It took its batches one by one, and did not ask for another.
            self._in_body = False
            self.collectives.end()
            self._leave_early()
        if goes_on:
            self._raise_of_break()
        if self.world is None:
            self._deeds.save()
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
