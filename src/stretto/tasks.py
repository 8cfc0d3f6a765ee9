"""Ending tasks of an event loop, and waiting in it for what may never come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancel it and wait for its end; what it failed with is raised.

    Awaiting the task itself would take our own cancellation for its end.
    """
    if task is None:
        return
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def aside(work: Callable[[], T]) -> T:
    """Do it in a thread of its own. A file system may hang for ever: then it takes neither a thread that others wait
    for, nor the end of the process. Who may wait no longer cancels this, and the thread is left to itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # The loop has ended meanwhile.

    threading.Thread(target=run, name="stretto-aside", daemon=True).start()
    return await done
