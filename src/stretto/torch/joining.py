"""How a script joins the job that its process was started for: what the environment says, and how the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stretto.errors import StrettoError
from stretto.runtime import address, watchdog
from stretto.runtime.channel import NoCoordinator
from stretto.runtime.member import Evicted
from stretto.runtime.messages import NOTICE, Bye
from stretto.torch import checks, departures, virtual
from stretto.torch.checks import TrainingError
from stretto.torch.job import Job
from stretto.torch.state import Holder
from stretto.torch.world import World


def join(
    device: torch.device | str | None = None,
    *,
    consistency: str | None = None,
    virtual_ranks: int = 8,
    threads: int = 1,
) -> Job:
    """Join the job that this process was started for; outside Stretto, a world of one.

    With `consistency="bitwise"` (or STRETTO_CONSISTENCY) the weights have the same bits for every number of workers up
    to `virtual_ranks` and every history of resizes, at the cost of speed; `threads` is part of what fixes the bits.
    """
    global _joined
    if _joined is not None:
        raise TrainingError("join() was called twice", hint="keep what the first call returned")
    chosen = _numbered(torch.device(device)) if device is not None else _device()
    folder = os.environ.get("STRETTO_FOLDER")
    url = os.environ.get("STRETTO_COORDINATOR")
    holder = Holder()
    chosen_consistency = consistency or os.environ.get("STRETTO_CONSISTENCY", "default")
    if chosen_consistency not in ("default", "bitwise"):
        raise TrainingError(f"unknown consistency {chosen_consistency!r}", hint="known: default, bitwise")
    if chosen_consistency == "bitwise":
        virtual.fix_kernels(threads)
    limits = _limits()
    world = None
    if not url and (count := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        raise TrainingError(
            f"this is one of {count} processes, but they have no coordinator: each would train alone",
            hint="run it as an elastic job (`stretto run --workers 1..N`), or as one process",
        )
    if url:
        notice = Path(folder) / NOTICE if folder else None
        world = World(url, _given("STRETTO_WORKER"), _given("STRETTO_TOKEN"), _host(), chosen, holder, notice)
        world.member.watchdog.limits = limits
        # In bitwise mode every member owns virtual ranks in every step.
        world.overlap = chosen_consistency != "bitwise"
        _open(world)
    ranks = virtual_ranks if chosen_consistency == "bitwise" else 0
    job = Job(chosen, Path(folder) if folder else None, world, holder, ranks)
    _joined = job
    _end_with_a_word(job)
    if world is not None:
        _leave_when_terminated(world)
    return job


_joined: Job | None = None
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _end_with_a_word(job: Job) -> None:
    """Tell the coordinator how the script ended. A child that the script forks does not speak for it."""
    before, before_in_threads = sys.excepthook, threading.excepthook
    failed = threading.Event()
    process = os.getpid()
    known = getattr(sys, "last_value", None)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, StopIteration) and job._passed_over:
            error.add_note(f"  hint: {checks.passed_over()}")
        if isinstance(error, StrettoError):
            trace = _of_the_script(trace)
            error = error.with_traceback(trace)
        before(kind, error, trace)
        failed.set()
        if os.getpid() == process:
            job.close(Bye(reason="error", text="".join(traceback.format_exception(kind, error, trace))))

    def in_threads(end: threading.ExceptHookArgs) -> None:
        before_in_threads(end)
        if end.thread is not None and os.getpid() == process:
            job.ends_with_thread(end.thread)

    def finish() -> None:
        if failed.is_set() or os.getpid() != process:
            return
        if (error := getattr(sys, "last_value", None)) is not None and error is not known:
            # The script has a hook of its own.
            job.close(Bye(reason="error", text="".join(traceback.format_exception(error))))
            return
        try:
            job.finish()
        except Exception as error:
            # Too late to change the exit status in any other way.
            with contextlib.suppress(OSError):  # Nobody dies of a log that cannot be written.
                traceback.print_exception(error.with_traceback(_of_the_script(error.__traceback__)))
            job.close(Bye(reason="error", text=f"{type(error).__name__}: {error}"))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(1)

    sys.excepthook, threading.excepthook = hook, in_threads
    departures.make_exits_seen()
    atexit.register(finish)
    os.register_at_fork(after_in_child=job.forget_parent)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the steps that lead from the script to what is wrong with it."""
    steps: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            steps.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for step in reversed(steps):
        found = TracebackType(found, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return found


def _leave_when_terminated(world: World) -> None:
    """SIGTERM becomes a planned leave at the next boundary, unless the script has a use for it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

        def leave(*_: object) -> None:
            world.ask_to_leave()

        signal.signal(signal.SIGTERM, leave)
        _let_children_end(leave)


def _let_children_end(leave: Callable[..., None]) -> None:
    """A child that the script forks ends by SIGTERM as usual. One that is told to at once must not be lost between the
    two ways to take it: the signal waits until the child has made up its mind."""
    masks: list[set[Any]] = []

    def block() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def end_as_usual() -> None:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=end_as_usual)


def _open(world: World) -> None:
    try:
        world.open(float(os.environ.get("STRETTO_CONNECT_S", "30")))
    except NoCoordinator as error:
        raise TrainingError(str(error), hint="is the job still there? look at STRETTO_COORDINATOR") from None
    except Evicted as error:
        raise TrainingError(
            f"the coordinator does not take this worker: {error}",
            hint="every worker needs a name of its own and the secret of its job (STRETTO_WORKER, STRETTO_TOKEN)",
        ) from None


def _limits() -> watchdog.Limits:
    try:
        return watchdog.limits(os.environ)
    except ValueError as error:
        raise TrainingError(
            str(error), hint="give seconds such as 600, or 0 for never; without the variable it is as documented"
        ) from None


def _numbered(device: torch.device) -> torch.device:
    """`cuda` is the GPU that this process uses: from now on always the same."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _host() -> str:
    """Where the other workers reach this one."""
    name = os.environ.get("STRETTO_INTERFACE")
    try:
        return address.of_interface(name) if name else os.environ.get("STRETTO_HOST", "127.0.0.1")
    except address.NoAddress as error:
        raise TrainingError(str(error), hint="STRETTO_INTERFACE names a network interface of the workers") from None


def _given(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise TrainingError(
            f"the environment variable {name} is missing",
            hint="start workers through Stretto, or unset STRETTO_COORDINATOR",
        )
    return value
