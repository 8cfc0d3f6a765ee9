"""Mistakes of a script that would stop its job later, or train another model than it says: each is said at once."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset

from stretto.errors import StrettoError
from stretto.torch.flags import Flags
from stretto.torch.state import Holder

_SAME_LOOPS = (
    "give all workers the same dataset and the same arguments of batches(): seed what splits or shuffles data, and "
    "sort what comes from a set or a folder; a sampler runs on each of them, with random, numpy.random and torch "
    "seeded by (seed, epoch), and must give all the same order"
)
_ALIKE = "let the body do the same on all workers, whatever its samples are"


class TrainingError(StrettoError):
    """The loop cannot go on; the message says why and what to change."""

    code = "training"


def length(dataset: Dataset[Any]) -> int:
    has = "no length"
    try:
        if not isinstance(dataset, IterableDataset):
            return len(dataset)  # type: ignore[arg-type]
        has = "no samples to ask for"
        len(dataset)  # type: ignore[arg-type]
    except TypeError:
        has = "no length"
    raise TrainingError(
        f"a {type(dataset).__name__} has {has}: batches() must know every sample by its index",
        hint="use a dataset with __len__ and __getitem__; streams are not supported yet (for a loop that makes its "
        "own data there is job.steps(n))",
    )


def unsteady_sample(index: int, epoch: int) -> TrainingError:
    return TrainingError(
        f"sample {index} of epoch {epoch} is another when it is read again: the dataset has randomness of its own, "
        "which would depend on who reads what",
        hint="let it use the global generators of random, numpy.random and torch, which are seeded for each sample "
        "by (seed, epoch, index), instead of a generator that it keeps",
    )


def parameters(holder: Holder) -> None:
    """All there, all known."""
    ours = holder.parameters()
    if any(is_lazy(given) for given in ours):
        raise TrainingError(
            "a model has parameters that are not made yet (a lazy module)",
            hint="put one batch through it before you give it to job.model()",
        )
    known = {id(given) for given in ours}
    for optimizer in holder.optimizers:
        for given in (p for group in optimizer.param_groups for p in group["params"]):
            if id(given) not in known:
                raise TrainingError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(given.shape)} "
                    "that belongs to no model of the job",
                    hint="register every module with job.model(), and put single parameters into a module; where a "
                    "part of a model was replaced, job.forget(optimizer) before the new one is registered",
                )


def step_outside(optimizer: str) -> TrainingError:
    return TrainingError(
        f"{optimizer} was asked to step outside of the job's loops: every worker would train a model of its own",
        hint="train inside of `for batch in job.batches(…)`, or of `for step in job.steps(n)` on data of your own",
    )


def closure(optimizer: str) -> TrainingError:
    return TrainingError(
        f"{optimizer}.step() was given a closure: it would evaluate the model several times in one step",
        hint="optimizers that need that (LBFGS) are not supported; call backward() in the body, and step() without one",
    )


def not_registered(optimizer: str) -> TrainingError:
    return TrainingError(
        f"{optimizer} steps on parameters of the job, but was not registered: every worker would train its own model",
        hint="make it known with job.optimizer(…), also one that is part of another (sam.base_optimizer)",
    )


def stranger(optimizer: str) -> TrainingError:
    return TrainingError(
        f"{optimizer} trains parameters that no model of the job has, from batch to batch: every worker would train "
        "them on its own samples",
        hint="register the module with job.model(…) and the optimizer with job.optimizer(…); an optimizer for one "
        "batch alone (an adversarial example) is to be made in the body",
    )


def step_without_backward(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: step() was called on gradients that came from no backward pass of this batch",
        hint="call loss.backward() instead of setting p.grad, in the same pass through the body as step(): it is what "
        "adds gradients up over the workers",
    )


def grows_unseen(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: a parameter began to require gradients in the middle of the forward pass",
        hint="call requires_grad_() before the parameter's module is called; with a compiled model, before the loop",
    )


def phases_in_passes(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: a backward pass follows a step() in one body, where batches are cut into passes: that step "
        "counts only in the last pass, so what follows would see a model that has not changed",
        hint="make a function of each part, with its forward pass, zero_grad(), backward() and step(), and call "
        "job.phases(batch, first, second) in the body; or leave per_worker and accumulate out (and bitwise mode)",
    )


def no_phases(why: str) -> TrainingError:
    return TrainingError(
        f"phases() takes the batch and then functions of a batch: {why}",
        hint="write job.phases(batch, critic, generator) in the body of a loop: the functions themselves, not what "
        "they return",
    )


def phases_twice(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: phases() was called twice in one body",
        hint="give one call all phases, in their order; a function may be given several times",
    )


def phases_left_out(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: phases() was called in some passes through the body only",
        hint="call it in every pass, batch.last or not: those before the last keep their batches for it",
    )


def other_phases(step: int, before: int, now: int) -> TrainingError:
    return TrainingError(
        f"step {step}: phases() got {before} phases in one pass through the body and {now} in another",
        hint="let the step decide which phases there are (batch.step), not the samples",
    )


def outside_of_phases(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: a body that calls phases() has a backward pass or a step() outside of them",
        hint="make a phase of it, too",
    )


def phase_without_backward(step: int, name: str) -> TrainingError:
    return TrainingError(
        f"step {step}: the phase {name} did no backward pass",
        hint="call backward() in every phase, whatever its samples are; leave a phase out of phases() in steps that "
        "do without it",
    )


def no_attempt(why: str) -> TrainingError:
    return TrainingError(
        f"attempt() takes a function of a batch and a loop of this job: {why}",
        hint="write loss = job.attempt(train_step, batches) outside of loops' bodies, where batches is what "
        "job.batches() or job.steps() returned, and let train_step return something (the loss)",
    )


def moved_in_passes(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: a backward pass follows a change of parameters by hand in one body, where batches are cut into "
        "passes: the gradient of the whole batch is there only in the last pass",
        hint="leave per_worker and accumulate out (and bitwise mode)",
    )


def step_in_backward(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: step() was called inside of the backward pass, before gradients were added up over the workers",
        hint="call it after loss.backward(), not in a hook",
    )


def again() -> TrainingError:
    return TrainingError(
        "a loop of batches() or steps() was gone through a second time, and it is over",
        hint="give batches() the number of epochs, or call it anew in each: "
        "`for epoch in job.epochs(n): for batch in job.batches(…, seed=epoch):`",
    )


def read_ahead(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: one thread takes batches from the loop, and another one trains on them: which batch is under "
        "way then is a matter of luck",
        hint="take them in the thread that trains; batches(workers=2) reads ahead in processes of its own, and "
        "job.attempt(…) is for trainers that read ahead",
    )


def passed_over() -> str:
    return (
        "a worker that comes later gets no batches from loops that are over, and next() on such a loop raises "
        "StopIteration: go through loops with `for batch in …`, or count their epochs with job.epochs(n)"
    )


def not_a_number(name: str, given: object) -> TrainingError:
    return TrainingError(f"{name}={given!r}", hint=f"give a whole number as {name}")


def two_loops() -> TrainingError:
    return TrainingError(
        "two loops of batches() or steps() were gone through at once, and a step belongs to one of them",
        hint="take all samples of a step from one loop: a dataset whose samples are pairs, one of each kind",
    )


def registered_inside(what: str) -> TrainingError:
    return TrainingError(
        f"{what} was registered in the body of a loop: a worker that comes later would not have it",
        hint="register it before the loop, or between two loops",
    )


def no_state(name: str, part: object) -> TrainingError:
    return TrainingError(
        f"the part {name!r} is a {type(part).__name__}: it has no state_dict() and load_state_dict()",
        hint="put it into an object that has both: one gives plain values, tensors and arrays, the other takes them",
    )


def made_inside(optimizer: str, shape: tuple[int, ...]) -> TrainingError:
    return TrainingError(
        f"{optimizer} was given a parameter of shape {shape} that was made, or put into a model, in the body of a loop",
        hint="make all parameters before the loop, or between two loops; in the body they can be frozen and thawed",
    )


def wrapped(kind: str) -> TrainingError:
    return TrainingError(
        f"the model is wrapped in {kind}, for a number of workers that is fixed",
        hint="give job.model() the model itself: backward() adds gradients up over whoever trains at that step",
    )


def changed_in_pass(step: int, names: list[str]) -> TrainingError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return TrainingError(
        f"step {step}: {', '.join(names[:3])}{more} changed in a pass through the body that is not the last of its "
        "step: how often that happens depends on the number of workers",
        hint="change it `if batch.last:`, after step() (an average of the weights, a target that follows, a count)",
    )


def buffer_changed_in_pass(step: int, names: list[str]) -> TrainingError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return TrainingError(
        f"step {step}: {', '.join(names[:3])}{more} changes in every forward pass, and with more workers a step takes "
        "fewer of them",
        hint="leave per_worker and accumulate out; or change it once a step, `if batch.last:` after step(); or, where "
        "training does not depend on it, name it in job.model(…, local=[…])",
    )


def broke_off(step: int) -> TrainingError:
    return TrainingError(
        f"the script left its loop by break in step {step}, in a pass through the body that is not the last of its "
        "step: which samples were in it depends on the number of workers, and the step was not done",
        hint="break `if batch.last:` and your reason, or call job.stop(), which ends the loop after this step",
    )


def left_in_rehearsal() -> TrainingError:
    return TrainingError(
        "the script left its loop by break in its first batch, which counted for nothing: this worker came later, and "
        "had no weights yet",
        hint="call job.stop() to end a loop early; or break after step(), by what all agree on (job.all_reduce)",
    )


def ended_inside(step: int, total: int) -> TrainingError:
    return TrainingError(
        f"the script ended inside its loop, at step {step} of {total}",
        hint="call job.stop() to end a loop early",
    )


def went_on_without_backward(step: int, who: str) -> TrainingError:
    return TrainingError(f"step {step}: {who} went on without a backward pass", hint=_ALIKE)


def counts_batches(what: str) -> TrainingError:
    return TrainingError(
        f"the batches of the loop are counted by {what}(), which does not know of a batch that is done again, nor of "
        "those before this worker came",
        hint="use batch.step or job.step; to stop after so many steps, `if batch.last and job.step >= n: job.stop()`",
    )


def backward_failed(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: the script went on after a backward pass that had failed; what others have of it cannot be "
        "taken back",
        hint="let the error end the script; or find out before backward() whether the batch can be done, and leave it "
        "out on all workers (job.all_reduce)",
    )


def no_step_in_last_pass(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: the last pass of an accumulated step called no optimizer's step()",
        hint="call step() in every pass through the body: it counts only in the last one",
    )


def depends_on_history(newcomer: str, other: str, by: float) -> TrainingError:
    return TrainingError(
        f"worker {newcomer}, which came later, finds other gradients than {other} for the same samples (by {by:.1e} of "
        "their norm): the script relies on something that is not part of the job's state",
        hint="usual causes: a count or a schedule in a variable of its own (use batch.step, or job.keep(…)); a second "
        "model that was not given to job.model(); a random generator of its own (use job.noise, or the global ones); "
        "code that depends on job.rank; data that is not the same on all workers; reading batches ahead (job.attempt)",
    )


def backwards_differ(step: int) -> TrainingError:
    return TrainingError(
        f"step {step}: some workers called backward() more often than others, and each call is a sum over all of them",
        hint="call it equally often on all workers, whatever number of samples they have: to put a batch through the "
        "model in parts, give batches() per_worker=, or add the losses up and call backward() once",
    )


def replicas_differ(names: tuple[str, ...], since: int, applied: int) -> TrainingError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return TrainingError(
        f"the workers train different models: {', '.join(names[:3])}{more} came to differ between steps {since} and "
        f"{applied}",
        hint="usual causes: a decision on the loss of this worker's samples alone, or on an evaluation with BatchNorm, "
        "whose statistics are each worker's own; code that depends on job.rank; gradients that did not come from "
        "backward(); what an optimizer of its own kind keeps outside of its `state`; a buffer, or a kept part, that "
        "depends on the samples (job.model(…, local=[…]), job.keep(…, local=True); or exchange it with job.all_reduce)",
    )


def other_loop(loop: int, here: str, there: str) -> TrainingError:
    return TrainingError(
        f"the workers of the job differ in loop {loop}: here, on a worker that came later, it has {here}; on others it "
        f"has {there}",
        hint=f"{_SAME_LOOPS}; data that the script makes from its model between loops (pseudo labels) is to be made on "
        "all workers from the same model: those who come later have the weights of this moment, so register what was "
        "made with job.keep()",
    )


def alike(found: Flags, size: int, loop: int, step: int, plan: str) -> None:
    """All members did the same with the last two batches, or they would train different models. `plan`: what this
    member's loop is like."""
    skipped = round(found.skipped)
    if not found.same_round(size):
        raise backwards_differ(step)
    if 0 < skipped < size:
        raise went_on_without_backward(step, f"{skipped} of {size} workers")
    if not found.same_sign(size):
        raise TrainingError(f"the workers of the job differ in loop {loop}: here it has {plan}", hint=_SAME_LOOPS)
    if not found.same_steps(size):
        raise TrainingError(
            f"step {step - 1}: some workers called step() of an optimizer more often than others", hint=_ALIKE
        )
