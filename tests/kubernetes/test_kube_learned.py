"""What is learned of jobs is written, bounded, and read again; nothing of it may hold a controller up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted_api import Asked, Reply, ScriptedApi, refusal

from stretto.kubernetes import learned
from stretto.kubernetes.client import Api
from stretto.kubernetes.learned import Learned

PATH = "/api/v1/namespaces/home/configmaps"


class Shelf:
    """One ConfigMap, if it is there."""

    def __init__(self) -> None:
        self.data: dict[str, str] | None = None
        self.refuses = False
        self.busy, self.asked = False, asyncio.Event()
        """Whether nothing is answered; it was asked then."""
        self.writes = 0

    async def script(self, asked: Asked, reply: Reply) -> None:
        if self.busy:
            self.asked.set()
            await asyncio.Event().wait()
        elif self.refuses:
            reply.json(refusal(403, "Forbidden", "no"), 403)
        elif asked.method == "POST":
            assert asked.path == PATH
            self.data = dict(json.loads(asked.body)["data"])
            self._written(reply)
        elif self.data is None:
            reply.json(refusal(404, "NotFound", 'configmaps "stretto-learned" not found'), 404)
        elif asked.method == "GET":
            reply.json({"data": self.data})
        else:
            changes: dict[str, str | None] = json.loads(asked.body)["data"]
            kept = {**self.data, **changes}
            self.data = {key: text for key, text in kept.items() if text is not None}
            self._written(reply)

    def _written(self, reply: Reply) -> None:
        self.writes += 1
        reply.json({"data": self.data})

    @asynccontextmanager
    async def opened(self, clock: Callable[[], float] = lambda: 1.0) -> AsyncIterator[Learned]:
        async with asyncio.timeout(60), ScriptedApi(self.script).serving() as where, Api(where) as api:
            yield Learned(api, "home", clock)


def story(play: Callable[[Shelf], Any]) -> None:
    asyncio.run(play(Shelf()))


def test_what_one_controller_learned_the_next_one_knows() -> None:
    async def play(shelf: Shelf) -> None:
        async with shelf.opened() as first:
            assert await first.load() == {}
            first.put("team/bert", b'{"a":1}')
            first.put("team/gpt", b'{"b":1}')
            await first.close()
            first.put("team/bert", b'{"a":2}')
            await first.close()
            await first.close()
        assert shelf.writes == 2
        async with shelf.opened() as second:
            assert await second.load() == {"team/bert": b'{"a":2}', "team/gpt": b'{"b":1}'}

    story(play)


def test_what_a_policy_remembers_outlives_the_controller() -> None:
    async def play(shelf: Shelf) -> None:
        kept = {"policy": ["themis", {}], "state": {"$dict": [[3, 1.5]]}}
        async with shelf.opened() as first:
            await first.load()
            assert first.memory is None
            first.put_memory(kept)
            first.put("a", b"1")
            await first.close()
            first.put_memory(kept)
            await first.close()
        assert shelf.writes == 1
        async with shelf.opened() as second:
            assert await second.load() == {"a": b"1"}
            assert second.memory == kept

    story(play)


def test_more_memory_than_there_is_room_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(shelf: Shelf) -> None:
        async with shelf.opened() as one:
            one.put_memory({"state": 1})
            await one.close()
            monkeypatch.setattr(learned, "_MOST_MEMORY_BYTES", 10)
            one.put_memory({"state": "something longer"})
            await one.close()
            assert shelf.data == {}
            shelf.data = {"memory": "damaged"}
            assert await one.load() == {}
            assert one.memory is None

    story(play)


def test_the_oldest_give_way_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "_MOST_BYTES", 900)
    times = iter(range(100))

    async def play(shelf: Shelf) -> None:
        known = json.dumps("x" * 300).encode()
        async with shelf.opened(lambda: next(times)) as first:
            for name in ("a", "b"):
                first.put(name, known)
            await first.close()
        async with shelf.opened(lambda: next(times)) as second:
            assert set(await second.load()) == {"a", "b"}
            second.put("a", known)
            second.put("c", known)
            await second.close()
        async with shelf.opened() as third:
            assert set(await third.load()) == {"a", "c"}

    story(play)


def test_a_refusal_costs_nothing_but_what_was_learned() -> None:
    async def play(shelf: Shelf) -> None:
        shelf.refuses = True
        async with shelf.opened() as one:
            assert await one.load() == {}
            one.put("a", b"1")
            await one.close()
            shelf.refuses = False
            await one.close()
            assert await one.load() == {"a": b"1"}

    story(play)


def test_a_controller_that_ends_while_it_writes_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether the write that was cut short had arrived."""
    monkeypatch.setattr(learned, "_SPACING_S", 0.0)

    async def play(shelf: Shelf) -> None:
        async with shelf.opened() as one:
            shelf.busy = True
            running = asyncio.create_task(one.run())
            one.put_memory({"state": 1})
            await shelf.asked.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            shelf.busy = False
            await one.close()
        async with shelf.opened() as another:
            await another.load()
            assert another.memory == {"state": 1}

    story(play)


def test_what_cannot_be_read_is_left_alone() -> None:
    async def play(shelf: Shelf) -> None:
        shelf.data = {"readme": "somebody wrote this by hand"}
        async with shelf.opened() as one:
            assert await one.load() == {}
            one.put("a", b"1")
            await one.close()
        assert len(shelf.data) == 2

    story(play)
