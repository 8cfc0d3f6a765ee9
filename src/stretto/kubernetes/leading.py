"""Who of several controllers acts: the holder of a Lease object, renewed all the time.

The protocol is client-go's, so that `kubectl get lease` reads as usual. Clocks of other machines are never compared
with ours: a candidate watches the record, and takes the lease when it has not changed for its whole duration by the
candidate's own monotonic clock. The holder stops acting `renew_deadline_s` after it sent its last successful renewal,
which is before anybody may take the lease. All writes are conditional on the version that was read.

`term` counts the holders. It grows with every one of them, the same process holding it a second time included, and
fences what an earlier holder may still have under way. (It starts anew only if somebody deletes the Lease object.)
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import LEASES
from stretto.kubernetes.model import Lease
from stretto.kubernetes.problems import AlreadyExists, ObjectConflict, ObjectNotFound

log = logging.getLogger(__name__)


class Leading:
    """A candidate. `term = await leading.acquire()`; act while `is_leader`; `lost` is set when it is over."""

    def __init__(
        self,
        api: Api,
        identity: str,
        *,
        namespace: str,
        name: str = "stretto-controller",
        duration_s: float = 15.0,
        renew_deadline_s: float = 10.0,
        retry_s: float = 2.0,
        on_lost: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        rng: random.Random | None = None,
    ) -> None:
        """`identity` must be this process's alone: a pod's name and a random part. `now` is written for people."""
        if not 0 < 1.2 * retry_s < renew_deadline_s < duration_s:
            raise UsageError("a lease needs retry < renew deadline < duration", hint="defaults: 2 s, 10 s, 15 s")
        self.lost = asyncio.Event()
        self.lost.set()
        self.term = 0
        self._api = api
        self._identity = identity
        self._namespace = namespace
        self._name = name
        self._duration_s = duration_s
        self._renew_deadline_s = renew_deadline_s
        self._retry_s = retry_s
        self._on_lost = on_lost
        self._clock = clock
        self._now = now
        self._rng = rng or random.Random()
        self._lease: Lease | None = None
        """As we last saw it."""
        self._seen_s = 0.0
        """When we first saw it as it is."""
        self._until_s = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def is_leader(self) -> bool:
        """Ask before every action: it is right even when the event loop was held up for longer than the lease."""
        return not self.lost.is_set() and self._is_in_time

    @property
    def holder(self) -> str:
        """Who has it, as far as we know; empty when nobody has."""
        return (self._lease.spec.holder_identity or "") if self._lease else ""

    async def acquire(self) -> int:
        """Wait until we lead; from then on renew in the background. Returns the term."""
        if not self.lost.is_set():
            raise RuntimeError("we lead already")
        if self._renewing is not None:
            await self._renewing
        while not await self._try_to_acquire():
            await asyncio.sleep(self._retry_s * self._rng.uniform(1.0, 1.2))
        self.lost.clear()
        log.info("%s leads, term %d", self._identity, self.term)
        self._renewing = asyncio.create_task(self._renew_until_lost())
        return self.term

    async def close(self) -> None:
        """Stop; give the lease back so that the next one need not wait for its end."""
        was_leader = self.is_leader
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        # Cancelled before its first step, it did not come to that.
        self._end()
        if not was_leader or self._lease is None:
            return
        try:
            async with asyncio.timeout(self._retry_s):
                await self._write(self._lease, {"holderIdentity": None, "leaseDurationSeconds": 1})
        except (StrettoError, TimeoutError) as error:
            log.info("the lease could not be given back, it ends by itself: %s", str(error) or "no answer in time")

    async def _try_to_acquire(self) -> bool:
        sent_s = self._clock()
        try:
            async with asyncio.timeout(self._renew_deadline_s):
                self._observe(await self._read_or_create())
                assert self._lease is not None
                if not self._may_take(self._lease):
                    return False
                sent_s = self._clock()
                self._observe(await self._write(self._lease, self._record(self._lease)))
        except (ObjectConflict, AlreadyExists):
            return False
        except (StrettoError, TimeoutError) as error:
            log.warning("cannot compete for the lease: %s", str(error) or "no answer in time")
            return False
        self.term = self._lease.spec.lease_transitions or 0
        self._until_s = sent_s + self._renew_deadline_s
        return self._is_in_time

    @property
    def _is_in_time(self) -> bool:
        return self._clock() < self._until_s

    async def _renew_until_lost(self) -> None:
        try:
            while self._is_in_time:
                await asyncio.sleep(min(self._retry_s, max(self._until_s - self._clock(), 0.0)))
                if not await self._renewed():
                    break
        finally:
            self._end()

    async def _renewed(self) -> bool:
        """False when another has it. Errors leave it as it is: time will tell."""
        sent_s = self._clock()
        try:
            async with asyncio.timeout(max(self._until_s - sent_s, 0.0)):
                assert self._lease is not None
                try:
                    lease = await self._write(self._lease, {"renewTime": self._stamp()})
                except ObjectConflict:
                    # Our own write whose answer was lost, or somebody's label: only another holder matters.
                    self._observe(await self._api.get(LEASES, self._name, self._namespace))
                    if not self._is_still_ours(self._lease):
                        return False
                    sent_s = self._clock()
                    lease = await self._write(self._lease, {"renewTime": self._stamp()})
                self._observe(lease)
                self._until_s = sent_s + self._renew_deadline_s
        except ObjectNotFound:
            return False
        except (StrettoError, TimeoutError) as error:
            log.warning("the lease was not renewed: %s", str(error) or "no answer in time")
        return True

    async def _read_or_create(self) -> Lease:
        try:
            return await self._api.get(LEASES, self._name, self._namespace)
        except ObjectNotFound:
            empty = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": {"leaseTransitions": 0},
            }
            return await self._api.create(LEASES, empty, self._namespace)

    def _observe(self, lease: Lease) -> None:
        if self._lease is None or self._lease.metadata.resource_version != lease.metadata.resource_version:
            self._seen_s = self._clock()
        self._lease = lease

    def _may_take(self, lease: Lease) -> bool:
        """Free, our own from before, or not renewed for as long as its holder said it would hold."""
        holder = lease.spec.holder_identity
        if not holder or holder == self._identity:
            return True
        return self._clock() - self._seen_s > (lease.spec.lease_duration_seconds or self._duration_s)

    def _is_still_ours(self, lease: Lease) -> bool:
        return lease.spec.holder_identity == self._identity and lease.spec.lease_transitions == self.term

    def _record(self, lease: Lease) -> dict[str, Any]:
        stamp = self._stamp()
        return {
            "holderIdentity": self._identity,
            # Whole seconds; rounded up, as others wait that long.
            "leaseDurationSeconds": max(1, math.ceil(self._duration_s)),
            "acquireTime": stamp,
            "renewTime": stamp,
            "leaseTransitions": (lease.spec.lease_transitions or 0) + 1,
        }

    async def _write(self, seen: Lease, spec: dict[str, Any]) -> Lease:
        """Change the record unless somebody else did since we saw it."""
        body = {"metadata": {"resourceVersion": seen.metadata.resource_version}, "spec": spec}
        return await self._api.patch(LEASES, self._name, body, self._namespace)

    def _stamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _end(self) -> None:
        if not self.lost.is_set():
            log.info("%s no longer leads, term %d", self._identity, self.term)
            self.lost.set()
            self._on_lost()
