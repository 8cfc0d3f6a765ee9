"""How jobs are driven on a cluster: as on one machine, but for where the journal is and how workers find each other."""

from __future__ import annotations

from pathlib import Path

from stretto import pins
from stretto.backends.protocol import Exit
from stretto.control.journal import Journal
from stretto.jobs.model import Seat, Worker
from stretto.kubernetes.keeping import ObjectJournal
from stretto.kubernetes.pods import FOLDER
from stretto.kubernetes.register import Entry
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, Surroundings
from stretto.server.drivers.elastic import ElasticDriver
from stretto.server.drivers.group import GroupDriver
from stretto.server.drivers.torchrun import contract
from stretto.spec.model import JobFile

_MASTER_PORT = 29500


class ClusterElasticDriver(ElasticDriver):
    def __init__(self, active: Active, surroundings: Surroundings, entry: Entry) -> None:
        self._entry = entry
        super().__init__(active, surroundings)

    def _journal(self) -> Journal:
        return ObjectJournal(self._entry.card)

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        """But for the secret and the address, which its pod knows from elsewhere."""
        file, entry = self.active.file, self._entry
        return {
            "STRETTO_COORDINATOR": pins.below(self.around.url(), f"/v1/jobs/{entry.namespace}/{entry.name}/join"),
            "STRETTO_WORKER": worker,
            "STRETTO_CONSISTENCY": file.consistency,
            "STRETTO_CHECKPOINT_S": f"{file.checkpoint.every:g}",
            "STRETTO_CHECKPOINT_KEEP": str(file.checkpoint.keep),
            **folders(entry, file),
        }

    def _confirm(self, worker: Worker, exit: Exit) -> None:
        """Who is lost may still run somewhere: only its lease says when it has surely stopped."""
        if exit.how != "lost":
            super()._confirm(worker, exit)


class ClusterGroupDriver(GroupDriver):
    """The members of a group meet at the pod of the first: the others are made when it has an address."""

    def __init__(self, active: Active, surroundings: Surroundings, entry: Entry) -> None:
        self._entry = entry
        super().__init__(active, surroundings)

    def prepare(self, size: int) -> None:
        super().prepare(size)
        self._port = _MASTER_PORT

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        job, file = self.active.job, self.active.file
        given = {"STRETTO_WORKER": worker, **folders(self._entry, file)}
        if size == 1 and job.level == "rigid":
            return given
        variables = contract(
            member, size, self._port, restarts=job.starts, max_restarts=file.retries, run_id=job.name, env=given
        )
        # Every member is a machine of its own.
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(member)}
        variables |= {"GROUP_WORLD_SIZE": str(size), "MASTER_ADDR": ""}
        return variables

    def _find_checkpoints(self) -> Path | None:
        """On a volume that only its pods see."""
        return None

    def _says_it_saved(self) -> bool:
        """It has somewhere to save its state, and says that all is well."""
        return bool(self.active.file.checkpoint.dir) and all(end.status == 0 for end in self._ends)


def folders(entry: Entry, file: JobFile) -> dict[str, str]:
    """Where a worker keeps state. Every job has a folder of its own in the one that was named."""
    if not file.checkpoint.dir:
        return {"STRETTO_FOLDER": FOLDER}
    own = f"{file.checkpoint.dir.rstrip('/')}/{entry.namespace}-{entry.name}-{entry.object.metadata.uid[:8]}"
    return {"STRETTO_FOLDER": own, "STRETTO_CHECKPOINT_DIR": f"{own}/checkpoints"}


def driver_for(active: Active, around: Surroundings, entry: Entry) -> Driver:
    kind = ClusterElasticDriver if active.job.level == "elastic" else ClusterGroupDriver
    return kind(active, around, entry)
