"""The status of ElasticJobs, as one controller keeps it: written by condition, so that an old leader cannot.

Every write names the version of the object that it changes. When somebody else has changed it meanwhile it is read
again: if the one who leads now has signed it with a later term, we are *fenced* and write no more. A status is written
again and again until it is there; several wishes become one write; what is not urgent waits a while for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.control.journal import Record, kept
from stretto.control.roster import State
from stretto.errors import Conflict
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import ELASTIC_JOBS
from stretto.kubernetes.model import ElasticJob
from stretto.kubernetes.problems import ApiError, ObjectConflict, ObjectNotFound, Unreachable
from stretto.tasks import stop

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""How long a wish that is not urgent waits for others."""
_AGAIN_S = 0.5
_LONGEST_AGAIN_S = 10.0


class Fenced(Conflict, OSError):
    """Another controller leads now."""

    code = "fenced"


class Card:
    """The status of one job."""

    def __init__(self, api: Api, job: ElasticJob, term: int) -> None:
        self.key, self.uid, self.term = job.metadata.key, job.metadata.uid, term
        self.status = dict(job.status)
        """As it was last read or written."""
        self.gone = False
        """The object is not there any more: what would be written concerns nobody."""
        self.fenced = False
        self._api, self._version = api, job.metadata.resource_version
        self._wishes: dict[str, Any] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def claim(self) -> None:
        """Sign it with our term; raises `Fenced` if a later one is on it. From then on no earlier leader can write."""
        if term_of(self.status) > self.term:
            raise self._fence()
        await self.put({"coordinator": {"term": self.term}}, urgent=True)

    def put(self, fields: Mapping[str, Any], *, urgent: bool) -> asyncio.Future[None]:
        """These fields of the status, merged into what is there; done when they are. Raises `Fenced`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.fenced:
            written.set_exception(self._fence())
            written.exception()
            return written
        _merge(self._wishes, fields)
        self._waiting.append(written)
        if urgent:
            self._urgent.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        return written

    async def close(self) -> None:
        """Write no more."""
        await stop(self._task)

    async def _write(self) -> None:
        while self._waiting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._urgent.wait()
            self._urgent.clear()
            fields, self._wishes = self._wishes, {}
            waiting, self._waiting = self._waiting, []
            try:
                await self._until_written(fields)
            except Fenced as error:
                self.fenced = True
                for future in (*waiting, *self._waiting):
                    if not future.done():
                        future.set_exception(error)
                        future.exception()
                self._waiting = []
                return
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def _until_written(self, fields: dict[str, Any]) -> None:
        pause_s = _AGAIN_S
        while not self.gone:
            body = {"metadata": {"resourceVersion": self._version}, "status": fields}
            try:
                written = await self._api.patch(ELASTIC_JOBS, self.key[1], body, self.key[0], sub="status")
                self._take(written)
                return
            except ObjectConflict:
                await self._read()
            except ObjectNotFound:
                self.gone = True
            except ApiError as error:
                if not isinstance(error, Unreachable):
                    _log.error("the status of %s/%s cannot be written: %s", *self.key, error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_AGAIN_S, 2 * pause_s)
                await self._read()

    async def _read(self) -> None:
        """As it is now; whether it went through or not, an unanswered write is in it or will be a conflict."""
        pause_s = _AGAIN_S
        while True:
            try:
                self._take(await self._api.get(ELASTIC_JOBS, self.key[1], self.key[0]))
                break
            except ObjectNotFound:
                self.gone = True
                return
            except ApiError as error:
                _log.warning("%s/%s cannot be read: %s", *self.key, error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_AGAIN_S, 2 * pause_s)
        if term_of(self.status) > self.term:
            raise self._fence()

    def _take(self, job: ElasticJob) -> None:
        if job.metadata.uid != self.uid:
            self.gone = True
            return
        self._version, self.status = job.metadata.resource_version, dict(job.status)

    def _fence(self) -> Fenced:
        return Fenced(f"another controller has taken over {'/'.join(self.key)}", hint="this one ends")


class ObjectJournal:
    """A coordinator's journal in the status of its job: all that still matters, written anew each time."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def read(self) -> list[Record]:
        text = (self._card.status.get("coordinator") or {}).get("journal")
        return list(json.loads(text)) if text else []

    def write(self, records: Sequence[Record], state: State) -> asyncio.Future[None]:
        text = json.dumps(kept(state), separators=(",", ":"))
        return self._card.put({"coordinator": {"term": self._card.term, "journal": text}}, urgent=True)

    def close(self) -> None:
        return


def term_of(status: Mapping[str, Any]) -> int:
    """The term that signed a status; 0: nobody yet."""
    return int((status.get("coordinator") or {}).get("term") or 0)


def _merge(into: dict[str, Any], fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            into[name] = {**into[name], **value}
        else:
            into[name] = value
