"""One worker of a simulated job, as it sees itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.runtime import messages as m


@dataclass(frozen=True)
class Held:
    """A worker's state: for every step applied, the generation it was applied in; and the loop that it is in."""

    lineage: tuple[int, ...] = ()
    loop: int = 0


@dataclass
class Process:
    name: str
    incarnation: str
    heard_s: float
    alive: bool = True
    frozen: bool = False
    stuck: bool = False
    """Its heart beats, but it does nothing else."""
    cut_off: bool = False
    """From the coordinator."""
    vague: bool = False
    """When it reports a broken group it does not know whom it missed."""
    connection: int | None = None
    to_coordinator: list[m.Message] = field(default_factory=list)
    from_coordinator: list[m.Message] = field(default_factory=list)
    facts: dict[type[m.Message], m.Message] = field(default_factory=dict)
    newest: m.Switch | None = None
    entered: m.Switch | None = None
    formed: int = 0
    received: tuple[int, Held] | None = None
    """What the exchange of a generation gave it, not yet taken in."""
    reduced: tuple[int, m.Switch | None] | None = None
    """A reduction that it has not applied yet, and the generation to go to after it."""
    holds: bool = False
    held: Held = Held()
    loops_done: int = 0
    broken: bool = False
    waiting: bool = False
    """For its release, or to be needed after all."""
    out: str = ""

    @property
    def generation(self) -> int:
        return self.entered.generation if self.entered else 0

    @property
    def lineage(self) -> tuple[int, ...]:
        return self.held.lineage

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen and not self.out

    @property
    def talks(self) -> bool:
        """It runs, or waits until its last word is said."""
        return self.alive and not self.frozen and (not self.out or m.Bye in self.facts)

    @property
    def address(self) -> str:
        return f"{self.incarnation}:1"

    def named(self, switch: m.Switch) -> bool:
        return self.address in [peer.address for peer in switch.members]

    def hello(self) -> m.Hello:
        return m.Hello(
            worker=self.name,
            incarnation=self.incarnation,
            address=self.address,
            generation=self.generation,
            applied=len(self.lineage),
            holds_state=self.holds,
            ready=m.Ready in self.facts,
        )
