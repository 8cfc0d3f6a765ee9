"""Tells web addresses that a job named what becomes of it: when it starts, when it is stopped, and when it has ended.

A POST with JSON: the event, and the job as it is then. Who does not answer with 2xx is tried again for a while; what
cannot be delivered is given up and said in the server's log. Nothing waits for it. Only addresses are told that may be
(`reaching`), directly, and without following whoever sends us on; what they answer is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from stretto.errors import Denied
from stretto.jobs import events as e
from stretto.jobs.model import Job
from stretto.server.reaching import Reach

_log = logging.getLogger("stretto.server")

_TIMEOUT_S = 10.0
_WAITS_S = (1.0, 5.0, 30.0, 120.0)
_AT_ONCE = 8


class Notifier:
    """A listener of the book."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        reach: Reach | None = None,
        told: Callable[[float], float] = lambda at_s: at_s,
    ) -> None:
        """`told`: what people's clocks call a moment of the server's."""
        self._spawn, self._told, self._reach = spawn, told, reach or Reach()
        self._room = asyncio.Semaphore(_AT_ONCE)

    def __call__(self, recorded: e.Recorded, job: Job | None) -> None:
        addresses = job.spec.get("notify", ()) if job is not None else ()
        if job is None or not addresses or not _matters(recorded.event, job):
            return
        body = msgspec.json.encode({"event": _plain(recorded, self._told), "job": about(job, self._told)})
        for address in [addresses] if isinstance(addresses, str) else addresses:
            self._spawn(self._deliver(address, body, job.id))

    async def _deliver(self, address: str, body: bytes, job: str) -> None:
        import httpx2

        problem = ""
        for wait_s in (0.0, *_WAITS_S):
            await asyncio.sleep(wait_s)
            try:
                async with self._room, asyncio.timeout(_TIMEOUT_S):
                    status = await self._tell(address, body)
                if 200 <= status < 300:
                    return
                problem = f"it answered {status}"
            except Denied as error:
                problem = str(error)
                break
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
                problem = f"{type(error).__name__}: {error}"
        _log.warning("job %s: %s could not be told: %s", job, address, problem)

    async def _tell(self, address: str, body: bytes) -> int:
        """To the very address that was looked at; the name is for its certificate, and for whoever serves several."""
        import httpx2

        url = httpx2.URL(address)
        port = url.port or (443 if url.scheme == "https" else 80)
        place = url.copy_with(host=await self._reach.find(url.host, port))
        headers = {"content-type": "application/json", "host": url.netloc.decode("ascii")}
        named = {"sni_hostname": url.raw_host.decode("ascii")}
        async with (
            httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False) as client,
            client.stream("POST", place, content=body, headers=headers, extensions=named) as answer,
        ):
            return answer.status_code


def about(job: Job, told: Callable[[float], float] = lambda at_s: at_s) -> dict[str, Any]:
    """What an outsider may know of it: no secret, no environment."""
    return {
        "id": job.id,
        "name": job.name,
        "user": job.user,
        "phase": job.phase,
        "message": job.message,
        "exit_code": job.exit_code,
        "submitted_s": told(job.submitted_s),
        "started_s": None if job.started_s is None else told(job.started_s),
        "ended_s": None if job.ended_s is None else told(job.ended_s),
        "steps": job.steps,
        "total_steps": job.total_steps,
        "lost_s": job.lost_s,
    }


def _matters(event: e.Event, job: Job) -> bool:
    if isinstance(event, (e.Ended, e.Retried, e.Wished, e.Interrupted, e.Stuck, e.Warned)):
        return True
    return isinstance(event, e.Launched) and len(job.workers) == 1


def _plain(recorded: e.Recorded, told: Callable[[float], float]) -> dict[str, Any]:
    event = recorded.event
    if isinstance(event, e.Retried):
        event = msgspec.structs.replace(event, not_before_s=told(event.not_before_s))
    body: dict[str, Any] = msgspec.to_builtins(event)
    return {"seq": recorded.seq, "at_s": told(recorded.at_s), **body}
