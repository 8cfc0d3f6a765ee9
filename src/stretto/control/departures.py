"""A worker is gone for certain, or the job goes on without it."""

from __future__ import annotations

from stretto.control import lists
from stretto.control.events import Evicted
from stretto.control.journal import out_record
from stretto.control.roster import Generation, State, Worker
from stretto.control.turn import Turn
from stretto.runtime.messages import Evict

WITHOUT_A_WORD = "its process has ended"


def closed(turn: Turn, connection: int) -> None:
    worker = turn.state.on(connection)
    if worker is not None:
        turn.update(worker.incarnation, connection=None, away_s=turn.now_s)


def exited(turn: Turn, name: str, incarnation: str, status: int | None) -> None:
    worker = turn.state.workers.get(incarnation) if incarnation else turn.state.named(name)
    if worker is not None:
        turn.update(worker.incarnation, exited=True, content=status == 0)


def gone(turn: Turn, key: str, reason: str, *, finished: bool = False) -> None:
    """It is certain that the process does nothing any more."""
    worker = turn.state.workers[key]
    worker = turn.update(key, ended=True, out=worker.out or reason, finished=finished or worker.finished)
    turn.journal(out_record(worker))


def evict(turn: Turn, key: str, reason: str) -> None:
    """The job goes on without it, though it may still run somewhere."""
    worker = turn.state.workers[key]
    if worker.out:
        return
    worker = turn.update(key, out=reason)
    turn.journal(out_record(worker))
    turn.send(key, Evict(reason=reason))
    turn.effects.append(Evicted(worker.name, reason))


def evict_culprits(turn: Turn, gen: Generation, protected: frozenset[str]) -> bool:
    """Whoever stands in the way of a generation, as far as can be told; whether there is anybody."""
    culprits = lists.culprits(turn.state, gen, protected)
    for key in culprits:
        evict(turn, key, f"generation {gen.number} could not be formed with it")
    return bool(culprits)


def confirm_ends(turn: Turn) -> None:
    """Of those whose process has ended, once its last word must have been read; and of those whose lease has."""
    for key, worker in turn.state.workers.items():
        lost = turn.now_s >= turn.state.lost_s(worker)
        if worker.exited and not worker.ended and (lost or worker.connection is None):
            gone(turn, key, WITHOUT_A_WORD)
        elif _leased(turn.state, worker) and (worker.out or lost) and turn.now_s >= turn.state.lease_ends_s(worker):
            gone(turn, key, "its lease has run out")
            turn.send(key, Evict(reason="its lease has run out"))


def times_s(state: State) -> list[float]:
    """When workers count as lost, and when leases end."""
    workers = state.workers.values()
    lost = [state.lost_s(w) for w in workers if not w.ended]
    return lost + [state.lease_ends_s(w) for w in workers if _leased(state, w)]


def _leased(state: State, worker: Worker) -> bool:
    """Its lease may decide something: it is unreachable and not confirmed to have ended."""
    return not worker.ended and any(g.concerns(worker.incarnation) for g in state.open)
