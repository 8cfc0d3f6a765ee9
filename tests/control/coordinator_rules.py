"""What must hold after every single event, whatever happened before: to be set as the `watch` of a simulated job."""

from __future__ import annotations

from simulated_job import Job

from stretto.control import events as c
from stretto.control.coordinator import handle, wake_s
from stretto.control.journal import Record
from stretto.runtime import messages as m


class Rules:
    def __init__(self) -> None:
        self._seen = 0
        self._lists: dict[int, Record] = {}
        self._out: dict[str, str] = {}
        """Incarnation of everybody whose end or eviction is on disk, and its name."""
        self._leaving: set[str] = set()
        self._loops = 0
        self._over = False

    def __call__(self, job: Job) -> None:
        for effect in job.effects[self._seen :]:
            if isinstance(effect, c.Journal):
                self._written(effect.record)
            elif isinstance(effect, c.Send):
                self._sent(effect)
            elif isinstance(effect, c.Announced):
                assert effect.number in self._lists, "announced before it was on disk"
        self._seen = len(job.effects)
        self._nothing_is_due(job)

    def _written(self, record: Record) -> None:
        assert not self._over or record["kind"] in ("out", "want"), "nothing comes after the end"
        match record["kind"]:
            case "generation":
                members, leavers = record["members"], record["leavers"]
                assert record["number"] > max(self._lists, default=0), "a number is never used twice"
                assert members, "somebody is on every list"
                assert len({*members, *leavers}) == len(members) + len(leavers), "everybody is on a list once"
                assert not {*members, *leavers} & set(self._out), "whoever is out never comes back"
                self._lists[record["number"]] = record
            case "out":
                self._out[record["incarnation"]] = record["name"]
            case "want":
                self._leaving |= set(record["leaving"])
            case "loops":
                self._loops = record["done"]
            case "done" | "failed":
                self._over = True

    def _sent(self, effect: c.Send) -> None:
        """Nothing is said that a restart could take back."""
        match effect.message:
            case m.Switch() as switch:
                made = self._lists[switch.generation]
                addresses = {w["incarnation"]: w["address"] for w in made["workers"]}
                names = {w["incarnation"]: w["name"] for w in made["workers"]}
                assert [peer.address for peer in switch.members] == [addresses[key] for key in made["members"]]
                assert list(switch.leavers) == [names[key] for key in made["leavers"]]
                assert switch.planned == made["planned"]
                assert effect.worker in names.values(), "a list is only for those it concerns"
            case m.Evict():
                assert effect.worker in self._out.values()
            case m.Release():
                assert self._over or effect.worker in [key.partition("-")[2] for key in self._leaving]
            case m.End(loop=loop):
                assert loop < self._loops

    def _nothing_is_due(self, job: Job) -> None:
        """Everything was done at once, and the coordinator will be woken before there is more to do."""
        wakes_s = wake_s(job.state, job.now_s)
        assert wakes_s > job.now_s
        between_s = job.now_s + 0.9 * min(wakes_s - job.now_s, 500.0)
        again, effects = handle(job.state, c.Tick(), min(between_s, wakes_s - 1e-6))
        assert not effects, f"between {job.now_s} and {wakes_s}: {effects}"
        assert again == job.state
