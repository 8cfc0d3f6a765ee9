"""What workers and their coordinator say to each other: JSON objects with a `kind`.

The coordinator begins with a challenge; a worker says hello first, with the answer to it, and the coordinator proves
itself in turn (`handshake.py`). Then a worker says whatever happened, and the coordinator what to do. Plain
dataclasses: this module is loaded in every user's environment. What is no object of a known kind, lacks a field or has
one of a wrong type is refused with `MessageError`, whatever it is instead; fields that are not known are passed over,
so that a newer peer may say more. A whole number that nobody can have counted to is taken for the largest that can be
reckoned with.

Messages are bounded: to a few kilobytes before the proof, and by what they may be after it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass, field

PROTOCOL = 2
NOTICE = "coordinator"
"""The file in a job's folder that says where its coordinator is by now."""
LARGEST = 2**53
"""Of whole numbers: beyond it floating-point numbers skip some."""

LONGEST_UNPROVEN = 2**12
"""Of messages, in bytes, as long as their sender has not proved to belong to the job."""
LONGEST_SAID = 2**16
"""Of a worker's messages after that."""
LONGEST_TOLD = 2**22
"""Of a coordinator's: a list of all members is among them."""
_LONG_TEXT = 2**10
_SHOWN = 40


class MessageError(ValueError):
    """What arrived is not a message of ours."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all; `kind` is the class name in lower case with underscores."""


# From a worker.


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """The first message on every connection, also after a reconnection."""

    worker: str
    incarnation: str
    """Chosen at the start of the process: tells a reconnection from a second process with the same name."""
    address: str
    """Where its rendezvous store listens, host:port."""
    generation: int = 0
    """The one it is in; 0 before its first."""
    applied: int = 0
    holds_state: bool = False
    ready: bool = False
    protocol: int = PROTOCOL
    nonce: str = ""
    proof: str = ""
    """That it knows the job's secret: for this challenge, name, process and generation."""


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The script asked for its first batch. The fingerprint must be the same on all workers of the job."""

    fingerprint: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Formed(Message):
    """Connected to everybody of the generation, and holding the state after `applied` steps, in this loop."""

    generation: int
    applied: int
    loop: int = 0


@dataclass(frozen=True, kw_only=True)
class Committed(Message):
    """The first commit of a generation."""

    generation: int
    applied: int


@dataclass(frozen=True, kw_only=True)
class Broken(Message):
    """The group of this generation does not work any more, or could not be formed."""

    generation: int
    cause: str
    suspects: tuple[str, ...] = ()
    """Members that could not be reached, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps that the leader of a generation has timed: see `pace`."""

    number: int
    """Ascending: a window is said several times, and counts once."""
    generation: int
    members: int
    count: int
    median_s: float
    spread_s: float
    lasted_s: float
    """From the beginning of the first step to the end of the last."""
    age_s: float = 0.0
    """Since that end, when this was said."""
    mean_s: float = 0.0
    """Of the same steps as the median; 0 of older workers, which do not tell."""
    slow: int = 0
    """Steps in between that took several times as long, and are in none of these figures."""
    slow_s: float = 0.0
    """What these took together."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A worker has made no step for too long."""

    seconds: float
    place: str = "loop"
    """`loop`; `first`: in the first pass, or a rehearsal; `after`: between or after loops."""
    overdue: bool = False
    """For so long that it should be ended."""
    waits: bool = False
    """For others: it is not to blame."""
    line: str = ""
    """The innermost line of the user's script, `file:line function`."""
    stack: tuple[str, ...] = ()
    """The innermost few frames of all, the innermost last."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    generation: int
    loop: int
    step: int
    """The step under way in that loop."""
    applied: int
    metrics: dict[str, float] = field(default_factory=dict)
    total: int = 0
    """Steps of the job, those done included, as far as its script has said; 0: not known."""
    paused_s: float = 0.0
    """Time that this worker, as a member, spent on getting into generations instead of training."""
    saved: int = -1
    """Applied steps of the last checkpoint that it has written whole; -1: none."""
    windows: tuple[Window, ...] = ()
    """The latest that it has timed, oldest first; only the leader of a generation tells."""
    epochs: tuple[tuple[int, ...], ...] = ()
    """Of every count of epochs in its script that is not over: its number, the epoch, the loop that this began with,
    and how many counts had begun."""
    stuck: tuple[Stuck, ...] = ()
    """One while it makes no steps."""
    waits: bool = False
    """At this moment its training thread waits for others in a collective."""


@dataclass(frozen=True, kw_only=True)
class LoopEnd(Message):
    """Waits at the end of a loop. `how`: `end`, `stop` (agreed) or `break` (its script left the loop)."""

    generation: int
    loop: int
    applied: int
    how: str = "end"
    step: int = -1
    """The step under way when its script left the loop, as heartbeats count it; -1 if not said."""


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """It was told to end soon (SIGTERM), and would leave at a boundary."""


@dataclass(frozen=True, kw_only=True)
class Bye(Message):
    """The last message: `left` (as asked), `finished` (the script has ended) or `error` (with its text)."""

    reason: str
    text: str = ""
    loops: int = -1
    """Of a script that has ended: how many loops it had."""


# From the coordinator.


@dataclass(frozen=True, kw_only=True)
class Challenge(Message):
    """Its first message on every connection."""

    nonce: str


@dataclass(frozen=True, kw_only=True)
class Proof(Message):
    """That it knows the job's secret, too. A worker believes nothing before."""

    proof: str


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    generation: int
    loops_done: int
    """Loops below this number are finished: their batches are not handed out again."""
    heartbeat_s: float
    lease_s: float
    size: int = 0
    """Members of that generation."""
    leads: bool = False
    """Whether this worker leads them, or those who wait for the first."""
    epochs: tuple[tuple[int, ...], ...] = ()
    """As in `Heartbeat`."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    worker: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Switch(Message):
    """A generation: exactly these members, ranked in this order; the first one's store is used."""

    generation: int
    members: tuple[Peer, ...]
    leavers: tuple[str, ...] = ()
    planned: bool = False
    loops_done: int = 0
    """As in `Welcome`, at the time of this list."""
    epochs: tuple[tuple[int, ...], ...] = ()
    ended: tuple[str, ...] = ()
    """Workers whose scripts have come to their end."""


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """To a leaver: nobody needs its state any more."""


@dataclass(frozen=True, kw_only=True)
class End(Message):
    """Everybody is at the end of the loop."""

    loop: int


@dataclass(frozen=True, kw_only=True)
class Fail(Message):
    """The job has failed; the worker raises this and ends."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Evict(Message):
    """To a worker that is out: end without writing anything."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """Answers a heartbeat, and prolongs the lease."""


KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "ready": Ready,
    "formed": Formed,
    "committed": Committed,
    "broken": Broken,
    "heartbeat": Heartbeat,
    "loop_end": LoopEnd,
    "leaving": Leaving,
    "bye": Bye,
    "challenge": Challenge,
    "proof": Proof,
    "welcome": Welcome,
    "switch": Switch,
    "release": Release,
    "end": End,
    "fail": Fail,
    "evict": Evict,
    "alive": Alive,
}
_NAMES = {cls: kind for kind, cls in KINDS.items()}


def encode(message: Message) -> str:
    """One line of JSON."""
    return json.dumps({"kind": _NAMES[type(message)], **dataclasses.asdict(message)}, separators=(",", ":"))


def encode_bounded(message: Message) -> str:
    """As `encode`, and never longer than a worker's message may be: long texts are cut, and figures left out."""
    text = encode(message)
    while len(text) > LONGEST_SAID and (shorter := _shortened(message)) != message:
        message = shorter
        text = encode(message)
    return text


def _shortened(message: Message) -> Message:
    """Every long text cut to its second half, where errors say what they are, and every table halved."""
    cut: dict[str, object] = {}
    for column in dataclasses.fields(message):
        given = getattr(message, column.name)
        if isinstance(given, str) and len(given) > _LONG_TEXT:
            cut[column.name] = given[len(given) // 2 :]
        elif isinstance(given, dict):
            cut[column.name] = dict(list(given.items())[: len(given) // 2])
        elif isinstance(given, tuple):
            cut[column.name] = given[: len(given) // 2]
    return dataclasses.replace(message, **cut)


def decode(text: str | bytes) -> Message:
    """The message that was encoded, or `MessageError`."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {str(error)[:_SHOWN]}") from None
    if not isinstance(given, dict):
        raise MessageError("not an object")
    name = given.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageError(f"unknown kind {repr(name)[:_SHOWN]}; known: {', '.join(KINDS)}")
    return typing.cast(Message, _build(kind, given))


@functools.cache
def _hints(cls: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, given: dict[str, object]) -> object:
    found = {}
    hints = _hints(cls)
    for column in dataclasses.fields(cls):
        if column.name in given:
            found[column.name] = _read(f"{cls.__name__}.{column.name}", hints[column.name], given[column.name])
        elif column.default is dataclasses.MISSING and column.default_factory is dataclasses.MISSING:
            raise MessageError(f"{cls.__name__}.{column.name} is missing")
    return cls(**found)


def _read(name: str, wanted: typing.Any, given: object) -> object:
    origin = typing.get_origin(wanted)
    if origin is tuple and isinstance(given, list):
        return tuple(_read(name, typing.get_args(wanted)[0], item) for item in given)
    if origin is dict and isinstance(given, dict):
        return {_text(name, key): _read(name, typing.get_args(wanted)[1], item) for key, item in given.items()}
    if dataclasses.is_dataclass(wanted) and isinstance(given, dict):
        return _build(typing.cast(type, wanted), given)
    if wanted in (int, float) and isinstance(given, int) and not isinstance(given, bool):
        return wanted(min(max(given, -LARGEST), LARGEST))
    if isinstance(origin, types.GenericAlias) or origin is not None or not isinstance(given, wanted):
        raise MessageError(f"{name}: expected {getattr(wanted, '__name__', wanted)}, got {type(given).__name__}")
    if wanted is int and isinstance(given, bool):
        raise MessageError(f"{name}: expected int, got bool")
    return _text(name, given) if isinstance(given, str) else given


def _text(name: str, given: str) -> str:
    """Half a character cannot be written down."""
    if not given.isascii():
        try:
            given.encode()
        except UnicodeEncodeError:
            raise MessageError(f"{name}: expected text, got half a character") from None
    return given
