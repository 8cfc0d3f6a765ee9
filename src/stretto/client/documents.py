"""What the API answers, as values: mappings whose fields can be read as attributes.

They stay mappings, so that fields of a newer server are kept, and so that each is its own JSON.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

D = TypeVar("D")

ENDED = frozenset({"succeeded", "failed", "cancelled"})


class Document(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this {type(self).__name__.lower()} has no field {name!r}") from None


class Job(Document):
    """docs/api.md says what the fields mean. Times are seconds since 1970."""

    id: str
    number: int
    name: str
    user: str
    phase: str
    wish: str
    level: str
    message: str
    exit_code: int | None
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    waited_s: float
    ran_s: float
    workers: list[dict[str, Any]]
    target: int
    min_workers: int
    max_workers: int
    steps: int
    total_steps: int | None
    rate: float
    rate_timed: bool
    speeds: list[dict[str, Any]]
    eta_s: float | None
    expected: dict[str, Any] | None
    lost_s: float
    """Seconds of work that it lost to others and to faults; `lost` says to which."""
    lost: dict[str, float]
    spec: dict[str, Any]

    @property
    def ended(self) -> bool:
        return self["phase"] in ENDED

    @property
    def succeeded(self) -> bool:
        return bool(self["phase"] == "succeeded")


class Event(Document):
    seq: int
    at_s: float
    job: int | None
    event: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self["event"]["kind"])


class Why(Document):
    job: int
    name: str
    phase: str
    workers: int
    target: int
    reason: str
    text: str
    policy: str
    facts: dict[str, Any]


class Node(Document):
    name: str
    pool: str
    devices: int
    drained: bool
    waits_for: list[str]
    """Names of the jobs that are still on a drained node."""
    used: float
    workers: list[dict[str, Any]]


class Policy(Document):
    name: str
    options: dict[str, Any]
    placement: str
    settings: dict[str, Any]


class Preview(Document):
    """Of a submission that was not made."""

    job: dict[str, Any]
    forecast: dict[str, Any]


class Forecast(Document):
    """`jobs`: one entry for each job that has not ended."""

    at_s: float
    policy: str
    text: str

    @property
    def jobs(self) -> list[dict[str, Any]]:
        return list(self["items"])


class Class(Document):
    """What was learned of a class of jobs. In lists without `variants` and `speeds`."""

    name: str
    runs: int
    seconds: float | None
    spread: float | None
    steps: float | None
    last_s: float | None


class Cluster(Document):
    devices: float
    used: float
    jobs: dict[str, int]
    series: list[dict[str, Any]]


class Token(Document):
    id: str
    user: str
    role: str
    created_s: float
    expires_s: float | None


class Piece(NamedTuple):
    """Some text of one worker's log."""

    worker: str
    text: str


class LogPage(Document):
    """A part of a log, and where the rest begins."""

    text: str
    next: str | None


class Page(NamedTuple, Generic[D]):
    """A part of a list, and where the rest begins."""

    items: list[D]
    next: str | None
