"""Ending tasks of an event loop."""

from __future__ import annotations

import asyncio
from typing import Any


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
