"""A server that may be killed: `python crash_server.py WORK`.

WORK/plan.json says what it does: launches to start (`id`, `command`, `warm`), where to kill itself (`die`), options of
the backend. What a real server keeps in its store is here the file WORK/events: a line `launched ID` before a launch is
asked for, `exited ID HOW STATUS` for each end. A second start knows from it what has no end yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from local_world import NODES

from stretto.backends.local import backend as module
from stretto.backends.local import forkserver, runs, supervisor
from stretto.backends.protocol import Exit, Launch, News

POINTS: dict[str, tuple[Any, str, bool]] = {
    "before the run directory": (runs.Runs, "create", True),
    "after launch.json": (runs.Runs, "create", False),
    "after a plain supervisor": (module, "spawn", False),
    "after a forked supervisor": (forkserver.ForkServer, "supervise", False),
    "when the worker runs": (module.LocalBackend, "_watch", True),
    "when the supervisor has ended": (module.LocalBackend, "_ended", True),
    "before the exit is written": (supervisor, "write", True),
}
"""Where it may die → what is called there, and whether it dies before or after the call."""


def die_at(point: str) -> None:
    owner, name, before = POINTS[point]
    real: Callable[..., Any] = getattr(owner, name)

    def last(*args: Any, **kwargs: Any) -> Any:
        if point == "before the exit is written" and args[1] != supervisor.EXIT:
            return real(*args, **kwargs)
        if not before:
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(owner, name, last)


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        self.launched = [line[1] for line in lines if line[0] == "launched"]
        self.ended = {line[1] for line in lines if line[0] == "exited"}

    def add(self, *words: object) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)


async def main(work: Path) -> None:
    plan = json.loads((work / "plan.json").read_text())
    if plan.get("die"):
        die_at(plan["die"])
    store = Store(work / "events")
    backend = module.LocalBackend(work / "data", NODES, **{"preload": ("json",), **plan["options"]})

    def tell(news: News) -> None:
        if isinstance(news, Exit):
            store.add("exited", news.launch, news.how, news.status)
            store.ended.add(news.launch)
            backend.forget(news.launch)

    with runs.serving(work / "data", patience_s=20.0):
        await backend.open([each for each in store.launched if each not in store.ended], tell)
        for words in plan["launches"]:
            if words["id"] not in store.launched:
                store.add("launched", words["id"])
                store.launched.append(words["id"])
                await backend.launch(
                    Launch(
                        job=1, worker="w", node="n", cwd=str(work), env=dict(os.environ),
                        log=str(work / "logs" / words["id"]), **words
                    )
                )  # fmt: skip
        while plan["stay"] or set(store.launched) - store.ended:
            await asyncio.sleep(0.01)
        await backend.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
