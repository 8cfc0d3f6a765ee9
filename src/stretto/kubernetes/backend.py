"""Workers as pods: made, bound, ended and watched. It decides nothing.

A launch is a pod of its own, whose labels say which launch it is; the pod is made under our scheduler's name and bound
to its node in a second step, so that a controller that dies in between leaves nothing that another would not complete.
A launch ends when its container has, when its pod is gone, when it will never start (and is then removed), or when its
node has been away for longer than its worker's lease. What is left of it then is removed, or marked as told; so is
whatever else lives and belongs to no launch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from stretto.backends.protocol import Exit, Launch, LaunchError, LaunchFault, News, Node, Started
from stretto.kubernetes import fitting, pods
from stretto.kubernetes.client import Api
from stretto.kubernetes.cluster import Cluster
from stretto.kubernetes.fields import SCHEDULER
from stretto.kubernetes.kinds import PODS
from stretto.kubernetes.model import Pod
from stretto.kubernetes.problems import (
    AlreadyExists,
    ApiError,
    Invalid,
    ObjectConflict,
    ObjectNotFound,
    Unreachable,
)
from stretto.kubernetes.register import Entry, Register

_log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_PATIENCE_S = 60.0
"""For what may mend itself: an image that cannot be pulled now, a pod that kube-scheduler does not bind."""
_LEASE_S = 65.0
"""A worker that nobody has heard of for so long has stopped by itself."""
_UNSEEN_S = 15.0
_AGAIN_S, _LONGEST_AGAIN_S = 0.5, 5.0
_CONFLICTS = 20
"""So often a quota that others are counted against at the same moment may send us away."""
_AT_ONCE = 48
"""So many pods are on their way from their creation to their node; whoever else asks something of the API server is
not to wait for all of them."""
_LONGEST_REFUSAL_S = 30.0
_KEPT = 10
"""So many ended pods of a job are kept, for their logs."""


class _Live(msgspec.Struct):
    """A launch that has not been told to have ended."""

    launch: str
    namespace: str
    pod: str
    since_s: float
    uid: str = ""
    started: bool = False
    ending: bool = False
    asked: bool = False
    """Its pod was seen to be asked to end, by whomever."""
    refused: bool = False
    """Its kubelet did not take it."""
    address: asyncio.Future[str] | None = None
    """That others wait for."""


class ClusterBackend:
    def __init__(self, api: Api, cluster: Cluster, register: Register, clock: Callable[[], float]) -> None:
        self._api, self._cluster, self._register, self._clock = api, cluster, register, clock
        self._tell: Callable[[News], None] = lambda news: None
        self._live: dict[str, _Live] = {}
        self._first: dict[int, str] = {}
        """By job: the launch at whose address the others meet."""
        self._refusals: dict[str, int] = {}
        """How often nodes refused pods since one last started there."""
        self._graces: dict[str, int | None] = {}
        """Of pods that are being deleted, by uid: the time that they are given; None: their own."""
        self._unwritten: set[str] = set()
        """Launches whose end was told and is not written down yet."""
        self._strays: set[str] = set()
        """Launches that nobody knew when pods were last looked through."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.launched = self.bound = 0
        """So many pods were made, and bound, by this controller."""

    # What the loop asks for.

    async def open(self, known: Iterable[str], tell: Callable[[News], None]) -> None:
        self._tell = tell
        for launch in known:
            pod = self._cluster.worker_pods.get(launch)
            if pod is None:
                tell(Exit(launch=launch, how="lost", text="its pod is gone", at_s=self._clock(), asked=True))
                continue
            self._live[launch] = self._known(launch, pod)
            if not pod.is_bound and pod.spec.scheduler_name == SCHEDULER and not pod.metadata.is_leaving:
                self._spawn(self._bind_again(pod))
        for pod in list(self._cluster.worker_pods.values()):
            if self._is_stray(pod):
                self._delete(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid, 1)
        self._cluster.on_worker(self._changed)
        for launch in list(self._live):
            self._look(launch, self._cluster.worker_pods[launch])
        self._spawn(self._sweep())

    def warm_up(self, env: Mapping[str, str]) -> None:
        """Nodes pull images, nothing else."""
        return

    def nodes(self) -> tuple[Node, ...]:
        return self._cluster.protocol_nodes()

    async def launch(self, launch: Launch) -> None:
        entry = self._register.get(launch.job)
        if entry is None or entry.object.metadata.is_leaving:
            raise LaunchFault("its job is being deleted")
        live = self._live[launch.id] = _Live(
            launch.id, entry.namespace, pods.pod_name(entry.name, launch.id), self._clock()
        )
        try:
            env = await self._where_it_meets(launch, live)
            if env is None:
                # Why is told of the first; nobody is to blame for the others.
                text = "the first member of its group is gone"
                self._end(Exit(launch=launch.id, how="lost", text=text, at_s=self._clock(), asked=True))
                return
            async with self._turns:
                if live.ending:
                    raise LaunchFault("it was asked to end before it had started")
                live.since_s = self._clock()
                await self._make(entry, launch, env, live)
        except LaunchError:
            self._drop(live)
            raise
        except Exception as error:
            self._drop(live)
            _log.exception("launch %s", launch.id)
            raise LaunchError(f"its pod cannot be made: {type(error).__name__}: {error}") from error

    def attends(self, launch: str) -> bool:
        return launch in self._live

    def terminate(self, launch: str) -> None:
        live = self._live.get(launch)
        if live is None or live.ending:
            return
        live.ending = True
        _give_up(live)
        if live.uid:
            self._delete(live.namespace, live.pod, live.uid, None)

    def kill(self, launch: str) -> None:
        """The kubelet confirms a death; an object that is removed by force says nothing about the process."""
        live = self._live.get(launch)
        if live is None:
            return
        live.ending = True
        _give_up(live)
        if live.uid:
            self._delete(live.namespace, live.pod, live.uid, 1)

    def forget(self, launch: str) -> None:
        self._unwritten.discard(launch)
        pod = self._cluster.worker_pods.get(launch)
        if pod is not None:
            self._spawn(self._settle(pod))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Making pods.

    async def _where_it_meets(self, launch: Launch, live: _Live) -> dict[str, str] | None:
        """Its variables. The members of a group but the first wait for its address; None: it is gone."""
        env = dict(launch.env)
        if pods.MEETING not in env:
            return env
        if env["RANK"] == "0":
            live.address = asyncio.get_running_loop().create_future()
            self._first[launch.job] = launch.id
            return env
        first = self._live.get(self._first.get(launch.job, ""))
        if first is None or first.address is None:
            return None
        await asyncio.wait([first.address])
        if first.address.cancelled():
            return None
        env[pods.MEETING] = first.address.result()
        return env

    async def _make(self, entry: Entry, launch: Launch, env: Mapping[str, str], live: _Live) -> None:
        pinned = fitting.needs_kube_scheduler(entry.shape)
        body = pods.worker_pod(
            pods.Blueprint(
                namespace=entry.namespace, job=entry.name, uid=entry.object.metadata.uid, launch=launch.id,
                worker=launch.worker, node=launch.node, member=int(env.get("RANK", "0")), template=entry.template,
                env=env, secret="STRETTO_COORDINATOR" in env, pinned=pinned,
            )
        )  # fmt: skip
        pod = await self._create(body, entry.namespace)
        self.launched += 1
        live.uid = pod.metadata.uid
        if live.ending:
            self._delete(live.namespace, live.pod, live.uid, 1)
        elif not pinned:
            await self._bind(live.namespace, live.pod, launch.node, live.uid)

    async def _create(self, body: dict[str, Any], namespace: str) -> Pod:
        name = body["metadata"]["name"]
        made, conflicts = False, 0
        while True:
            try:
                if made:
                    return await self._api.get(PODS, name, namespace)
                return await self._api.create(PODS, body, namespace)
            except AlreadyExists:
                # An answer was lost: names of launches are never used twice.
                made = True
                continue
            except Invalid as error:
                raise LaunchError(f"the API server refuses its pod: {error.message}") from None
            except ApiError as error:
                conflicts += isinstance(error, ObjectConflict)
                if not isinstance(error, Unreachable | ObjectConflict) or conflicts == _CONFLICTS:
                    raise LaunchFault(f"its pod may not be made: {error.message}") from None
                _log.warning("pod %s: %s", name, error.message)
            await asyncio.sleep(_AGAIN_S)

    async def _bind(self, namespace: str, pod: str, node: str, uid: str) -> None:
        while True:
            try:
                await self._api.bind(namespace, pod, node, uid)
                self.bound += 1
                return
            except (ObjectConflict, ObjectNotFound):
                # It is bound (an answer was lost), or deleted: the watch tells.
                return
            except Unreachable as error:
                _log.warning("pod %s: %s", pod, error.message)
                await asyncio.sleep(_AGAIN_S)
            except ApiError as error:
                _log.warning("pod %s cannot be bound to %s: %s", pod, node, error.message)
                self._delete(namespace, pod, uid, 0)
                return

    async def _bind_again(self, pod: Pod) -> None:
        meta = pod.metadata
        async with self._turns:
            await self._bind(meta.namespace, meta.name, pods.worker_of(pod).seat.node, meta.uid)

    # What becomes of them.

    def _known(self, launch: str, pod: Pod) -> _Live:
        meta = pod.metadata
        return _Live(launch, meta.namespace, meta.name, self._clock(), meta.uid, pod.is_running, meta.is_leaving)

    def _changed(self, old: Pod | None, new: Pod | None) -> None:
        launch = pods.launch_of(new or old)  # type: ignore[arg-type]
        if launch not in self._live:
            return
        if new is not None:
            self._look(launch, new)
        elif old is not None:
            asked = self._live[launch].asked or pods.is_asked_to_end(old)
            self._end(pods.gone(old, asked, self._clock()))

    def _look(self, launch: str, pod: Pod) -> None:
        live = self._live[launch]
        live.asked = live.asked or pods.is_asked_to_end(pod)
        if ended := pods.exit_of(pod, self._clock()):
            if pods.is_refused(pod):
                self._end_later(ended, pod.spec.node_name)
            else:
                self._end(ended)
        elif pod.is_running and not live.started:
            live.started = True
            self._refusals.pop(pod.spec.node_name, None)
            self._tell(Started(launch=launch, pid=1, how="plain"))
        elif not live.started and (why := pods.trouble(pod, patient=self._clock() - live.since_s < _PATIENCE_S)):
            self._remove(live, why)
        if pod.status.pod_ip and live.address is not None and not live.address.done():
            live.address.set_result(pod.status.pod_ip)

    def _end_later(self, ended: Exit, node: str) -> None:
        """A node that refuses pods is asked less and less often, until one starts there."""
        live = self._live[ended.launch]
        if not live.refused:
            live.refused = True
            times = self._refusals[node] = self._refusals.get(node, 0) + 1
            wait_s = min(_AGAIN_S * 2 ** min(times - 1, 10), _LONGEST_REFUSAL_S)
            asyncio.get_running_loop().call_later(wait_s, self._end, ended)

    def _remove(self, live: _Live, why: str) -> None:
        """It will never start. If others of its job run, it is the node's fault; otherwise the template's."""
        others = (one for one in self._live.values() if one.launch != live.launch and one.started)
        alone = not any(one.launch.partition(".")[0] == live.launch.partition(".")[0] for one in others)
        self._delete(live.namespace, live.pod, live.uid, 1)
        self._end(Exit(launch=live.launch, how="refused" if alone else "lost", text=why, at_s=self._clock()))

    def _end(self, ended: Exit) -> None:
        live = self._live.get(ended.launch)
        if live is not None:
            self._drop(live)
            self._unwritten.add(ended.launch)
            self._tell(ended)

    def _drop(self, live: _Live) -> None:
        self._live.pop(live.launch, None)
        _give_up(live)

    async def _sweep(self) -> None:
        """Look after what no change would tell of."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for launch, live in list(self._live.items()):
                pod = self._cluster.worker_pods.get(launch)
                if pod is None:
                    if live.uid and self._clock() - live.since_s > _UNSEEN_S:
                        self._spawn(self._is_it_there(live))
                elif self._is_cut_off(pod):
                    self._give_up_node(live, pod)
                elif pods.is_in_trouble(pod):
                    self._look(launch, pod)
                elif not pod.is_bound and not pod.metadata.is_leaving and self._clock() - live.since_s > _PATIENCE_S:
                    self._not_bound(live, pod)
            self._end_strays()

    def _end_strays(self) -> None:
        """A former leader may still make pods when we have looked already. What is seen twice will not be known."""
        seen = {launch: pod for launch, pod in self._cluster.worker_pods.items() if self._is_stray(pod)}
        for launch in self._strays & seen.keys():
            meta = seen[launch].metadata
            _log.warning("pod %s/%s belongs to no launch and is deleted", *meta.key)
            self._delete(meta.namespace, meta.name, meta.uid, None)
        self._strays = set(seen)

    def _is_stray(self, pod: Pod) -> bool:
        """Alive, and of no launch that we know; of a job that was put aside nobody can say."""
        launch, meta = pods.launch_of(pod), pod.metadata
        if launch in self._live or launch in self._unwritten or pod.is_terminal or meta.is_leaving:
            return False
        return (meta.namespace, meta.labels[pods.JOB_LABEL]) not in self._register.aside

    def _is_cut_off(self, pod: Pod) -> bool:
        """Its node has been away for so long that the worker has stopped by itself."""
        if not pod.is_bound:
            return False
        away_s = self._cluster.away_s(pod.spec.node_name, self._clock())
        return away_s is not None and away_s > _LEASE_S

    def _give_up_node(self, live: _Live, pod: Pod) -> None:
        """Whoever takes its place is made elsewhere. Should the node come back, its kubelet ends what still runs."""
        self._delete(live.namespace, live.pod, live.uid, None)
        text = f"its node {pod.spec.node_name} is away"
        self._end(Exit(launch=live.launch, how="lost", text=text, at_s=self._clock()))

    def _not_bound(self, live: _Live, pod: Pod) -> None:
        condition = pod.condition("PodScheduled")
        why = condition.message if condition is not None and condition.message else "nobody bound it"
        self._delete(live.namespace, live.pod, live.uid, 0)
        self._end(
            Exit(launch=live.launch, how="lost", text=f"kube-scheduler did not bind it: {why}", at_s=self._clock())
        )

    async def _is_it_there(self, live: _Live) -> None:
        try:
            await self._api.get(PODS, live.pod, live.namespace)
        except ObjectNotFound:
            self._end(Exit(launch=live.launch, how="lost", text="its pod is gone", at_s=self._clock()))

    # Ending and clearing up.

    def _delete(self, namespace: str, pod: str, uid: str, grace_s: int | None) -> None:
        """One request at a time, however often it is wished for; the least patient wish holds."""
        if uid not in self._graces:
            self._graces[uid] = grace_s
            self._spawn(self._until_deleted(namespace, pod, uid))
        elif grace_s is not None:
            before_s = self._graces[uid]
            self._graces[uid] = grace_s if before_s is None else min(before_s, grace_s)

    async def _until_deleted(self, namespace: str, pod: str, uid: str) -> None:
        async def ask() -> None:
            asked_s: int | None = -1
            while asked_s != self._graces[uid]:
                asked_s = self._graces[uid]
                with contextlib.suppress(ObjectConflict):  # Another pod has its name.
                    await self._api.delete(PODS, pod, namespace, grace_s=asked_s, uid=uid)

        try:
            await _insist(ask, pod)
        finally:
            del self._graces[uid]

    async def _settle(self, pod: Pod) -> None:
        """Its end is written down: no other controller may tell it again, and what is left of it ends. The latest
        are kept for their logs."""
        meta = pod.metadata
        body = {"metadata": {"labels": {pods.TOLD_LABEL: "true"}}}
        await _insist(lambda: self._api.patch(PODS, meta.name, body, meta.namespace), meta.name)
        now = self._cluster.worker_pods.get(pods.launch_of(pod))
        if now is not None and not now.is_terminal and not now.metadata.is_leaving:
            self._delete(meta.namespace, meta.name, meta.uid, None)
        ended = [one for one in self._cluster.pods_of(meta.key[0], meta.labels[pods.JOB_LABEL]) if one.is_terminal]
        ended.sort(key=lambda one: (str(one.metadata.creation_timestamp), one.metadata.name), reverse=True)
        for old in ended[_KEPT:]:
            self._delete(old.metadata.namespace, old.metadata.name, old.metadata.uid, 0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the backend failed", exc_info=task.exception())


async def _insist(ask: Callable[[], Awaitable[object]], pod: str) -> None:
    """Until the API server has done it, or the pod is gone; less and less often."""
    pause_s = _AGAIN_S
    while True:
        try:
            await ask()
            return
        except ObjectNotFound:
            return
        except ApiError as error:
            _log.warning("pod %s: %s", pod, error.message)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_AGAIN_S)


def _give_up(live: _Live) -> None:
    """Nobody need wait for its address any more."""
    if live.address is not None and not live.address.done():
        live.address.cancel()
