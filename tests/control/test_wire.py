"""Whatever comes over a worker's connection ends that connection at most: nothing hangs, nothing is raised, the job and
the event loop go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.control.admission import Admission, Refused
from stretto.control.coordination import Coordination
from stretto.control.roster import Settings
from stretto.runtime import messages as m
from stretto.runtime.handshake import Secret
from stretto.runtime.introduction import believed, introduced

PATIENCE_S = 20.0
OURS = Settings(token="secret", min_workers=1, want=1, heartbeat_timeout_s=60.0)
SECRET = Secret("secret")


class Memory:
    """A journal that keeps nothing."""

    def read(self) -> list[Any]:
        return []

    def write(self, records: Any, state: Any) -> None:
        return

    def close(self) -> None:
        return


class Wire:
    """One connection: a test's end of it. The other is a socket of the coordinator's."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self.heard: asyncio.Queue[m.Message] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.code = 0
        self.most_bytes = 0
        self.reads = True

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while (text := await self.said.get()) is not None:
            yield text

    async def send(self, message: str) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        self.heard.put_nowait(m.decode(message))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.code = code
        self.closed.set()
        self.said.put_nowait(None)

    def widen(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def say(self, *given: m.Message | str | bytes) -> None:
        for one in given:
            self.said.put_nowait(m.encode(one) if isinstance(one, m.Message) else one)

    async def hear(self, kind: type[m.Message]) -> Any:
        while not isinstance(message := await self.heard.get(), kind):
            pass
        return message

    async def introduce(self, name: str = "w0", secret: Secret = SECRET) -> None:
        challenge = await self.hear(m.Challenge)
        hello = introduced(m.Hello(worker=name, incarnation=f"i-{name}", address="h:1"), challenge, secret)
        self.say(hello)
        if secret is SECRET:
            assert believed(await self.hear(m.Proof), hello, challenge, SECRET), "and the host knows it, too"


class Desk:
    def __init__(self) -> None:
        self.coordination = Coordination(OURS, Memory())
        self.coordination.open()
        self.tasks: list[asyncio.Task[None]] = []

    def connect(self) -> Wire:
        wire = Wire()
        self.tasks.append(asyncio.create_task(self.coordination.serve(wire)))
        return wire

    async def member(self) -> Wire:
        """A worker that is in the job's first generation."""
        wire = self.connect()
        await wire.introduce()
        wire.say(m.Ready())
        switch = await wire.hear(m.Switch)
        wire.say(m.Formed(generation=switch.generation, applied=0))
        return wire

    async def close(self) -> None:
        await self.coordination.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


def play(story: Callable[[Desk], Awaitable[None]]) -> None:
    async def bounded() -> None:
        desk = Desk()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await story(desk)
        finally:
            await desk.close()

    asyncio.run(bounded())


def beat(step: int = 1) -> m.Heartbeat:
    return m.Heartbeat(generation=1, loop=0, step=step, applied=step)


def test_who_knows_the_secret_is_let_in_and_may_say_more_than_before() -> None:
    async def story(desk: Desk) -> None:
        wire = desk.connect()
        await wire.introduce()
        await wire.hear(m.Welcome)
        assert wire.most_bytes == m.LONGEST_SAID

    play(story)


def test_who_does_not_is_told_so_and_nothing_else() -> None:
    async def story(desk: Desk) -> None:
        wire = desk.connect()
        await wire.introduce(secret=Secret("another"))
        refusal = await wire.heard.get()
        assert isinstance(refusal, m.Evict)
        assert "token is wrong" in refusal.reason
        await wire.closed.wait()
        assert wire.code == 1008
        assert wire.most_bytes == 0

    play(story)


def test_a_proof_is_for_one_connection_one_worker_and_one_generation() -> None:
    async def story(desk: Desk) -> None:
        first = desk.connect()
        challenge = await first.hear(m.Challenge)
        mine = introduced(m.Hello(worker="w0", incarnation="i", address="h:1"), challenge, SECRET)
        for changed in (
            replace(mine, worker="w1"),
            replace(mine, incarnation="j"),
            replace(mine, generation=2),
            replace(mine, nonce="ab" * 32),
            replace(mine, proof=""),
            replace(mine, proof="zz"),
            mine,
        ):
            wire = desk.connect()
            await wire.hear(m.Challenge)
            wire.say(changed)
            assert "token is wrong" in (await wire.hear(m.Evict)).reason
        first.say(mine)
        await first.hear(m.Welcome)

    play(story)


BAD = {
    "no JSON": "nonsense",
    "another kind": '{"kind": "dance"}',
    "no kind": '{"kind": ["hello"]}',
    "no object": "[]",
    "too deep": "[" * 60_000,
    "too deep a message": '{"kind": "ready", "fingerprint": ' + '{"a":' * 9_000,
    "a huge number": '{"kind": "formed", "generation": ' + "9" * 50_000 + ', "applied": 1}',
    "an infinite number": '{"kind": "formed", "generation": 1e999, "applied": 1}',
    "a wrong type": '{"kind": "formed", "generation": [], "applied": {}}',
    "half a character": '{"kind": "bye", "reason": "\\ud800"}',
    "bytes": b"{}",
    "what only a coordinator says": m.encode(m.Evict(reason="go")),
    "a second hello": m.encode(m.Hello(worker="w9", incarnation="i-w9", address="h:1")),
    "too much": '{"kind": "bye", "reason": "' + "x" * m.LONGEST_SAID + '"}',
}


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_closes_its_connection_with_one_line_in_the_log(
    name: str, proven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(desk: Desk) -> None:
        member = await desk.member()
        wire = desk.connect()
        if proven:
            await wire.introduce("w1")
            await wire.hear(m.Welcome)
        wire.say(BAD[name])
        await wire.hear(m.Evict)
        await wire.closed.wait()
        assert wire.code == 1008
        member.say(beat())
        await member.hear(m.Alive)

    with caplog.at_level(logging.DEBUG):
        play(story)
    told = [record for record in caplog.records if record.name.startswith("stretto")]
    assert len(told) <= 1
    assert all(record.exc_info is None and len(record.getMessage()) < 400 for record in told)


def test_before_the_proof_a_message_is_short() -> None:
    async def story(desk: Desk) -> None:
        wire = desk.connect()
        await wire.hear(m.Challenge)
        wire.say(m.Hello(worker="w" * m.LONGEST_UNPROVEN, incarnation="i", address="h:1"))
        assert "longer than" in (await wire.hear(m.Evict)).reason

    play(story)


def test_who_says_nothing_is_sent_away_and_so_is_who_reads_nothing() -> None:
    async def story() -> None:
        entrance = Admission("secret", prove_s=0.05)
        for reads in (True, False):
            wire = Wire()
            wire.reads = reads
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Refused, match="in time"):
                    await entrance.admit(wire, aiter(wire))

    asyncio.run(story())


def test_only_so_many_have_proved_nothing_and_the_oldest_makes_room() -> None:
    async def story() -> None:
        entrance = Admission("secret", prove_s=PATIENCE_S, most=3)
        wires = [Wire() for _ in range(5)]
        tasks = []
        for wire in wires:
            tasks.append(asyncio.create_task(entrance.admit(wire, aiter(wire))))
            await wire.hear(m.Challenge)
        done, _ = await asyncio.wait(tasks[:2])
        assert all(isinstance(task.exception(), Refused) for task in done)
        assert not any(task.done() for task in tasks[2:])
        for task in tasks[2:]:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(story())


def test_who_talks_without_end_keeps_nobody_waiting() -> None:
    async def story(desk: Desk) -> None:
        member = await desk.member()
        loud = desk.connect()
        await loud.introduce("w1")
        await loud.hear(m.Welcome)
        for step in range(5_000):
            loud.say(beat(step))
        member.say(beat())
        await member.hear(m.Alive)
        assert loud.said.qsize() > 3_000, "the others are heard meanwhile"

    play(story)


def test_who_does_not_read_is_hung_up_on() -> None:
    async def story(desk: Desk) -> None:
        member = await desk.member()
        member.reads = False
        (line,) = desk.coordination._lines.values()
        for _ in range(10_000):
            line.send(m.Alive())
        await asyncio.wait(desk.tasks)
        assert desk.tasks[0].exception() is None

    play(story)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=15,
)
MESSAGES = st.sampled_from(sorted(m.KINDS.values(), key=lambda kind: kind.__name__)).flatmap(st.from_type).map(m.encode)


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    """A message of which one field was exchanged for something else."""
    fields = json.loads(draw(MESSAGES))
    fields[draw(st.sampled_from(sorted(fields)))] = draw(JUNK)
    return json.dumps(fields)


SAYINGS = st.lists(
    MESSAGES | spoilt() | JUNK.map(json.dumps) | st.text(max_size=50) | st.binary(max_size=50), max_size=6
)


@settings(max_examples=60)
@given(first=SAYINGS, then=SAYINGS)
def test_whatever_is_said_in_whatever_order_the_job_goes_on(first: list[Any], then: list[Any]) -> None:
    async def story(desk: Desk) -> None:
        member = await desk.member()
        stranger, colleague = desk.connect(), desk.connect()
        stranger.say(*first)
        await colleague.introduce("w1")
        colleague.say(*then)
        colleague.say(beat())
        # Either it is answered, or it was hung up on; and a job that a colleague has failed says so to the member.
        heard = asyncio.create_task(colleague.hear(m.Alive))
        closed = asyncio.create_task(colleague.closed.wait())
        await asyncio.wait([heard, closed, desk.tasks[2]], return_when=asyncio.FIRST_COMPLETED)
        for task in (heard, closed):
            task.cancel()
        if first:
            stranger.say("")
            await stranger.closed.wait()
        member.say(beat())
        while not isinstance(await member.heard.get(), m.Alive | m.Fail | m.Evict | m.Release):
            pass
        assert all(task.exception() is None for task in desk.tasks if task.done())

    play(story)


@given(text=st.text() | st.binary() | JUNK.map(json.dumps) | spoilt())
def test_what_is_no_message_is_a_message_error(text: str | bytes) -> None:
    with contextlib.suppress(m.MessageError):
        m.encode(m.decode(text)).encode()


@given(message=st.sampled_from([m.Bye, m.Heartbeat, m.Ready, m.Broken]).flatmap(st.from_type), times=st.integers(1, 9))
def test_a_workers_message_is_never_too_long(message: m.Message, times: int) -> None:
    if isinstance(message, m.Bye):
        message = replace(message, text=(message.text or "ä") * 40_000 * times)
    if isinstance(message, m.Heartbeat):
        message = replace(message, metrics={f"{i}": 1.0 for i in range(9_000 * times)})
    if isinstance(message, m.Ready):
        message = replace(message, fingerprint={f"{i}": "x" * 100 for i in range(900 * times)})
    text = m.encode_bounded(message)
    assert len(text) <= m.LONGEST_SAID
    assert type(m.decode(text)) is type(message)
