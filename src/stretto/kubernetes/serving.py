"""What a controller answers: workers at their coordinator, health, readiness and metrics.

A controller that does not lead sends workers away for a moment: they try again until they meet the one that does.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response, WebSocket

from stretto.api.hosts import Checked, Hosts
from stretto.api.joining import WorkerSocket
from stretto.kubernetes.controller import Controller
from stretto.kubernetes.metrics import exposition

_TRY_AGAIN = 1013
_STALE_S = 300.0
"""A controller that has heard nothing of the API server for so long is of no use."""


class Parts:
    """What requests see of the process."""

    def __init__(self, is_leader: Callable[[], bool]) -> None:
        self.controller: Controller | None = None
        """While it leads."""
        self.is_leader = is_leader
        self.stopping = False

    def stop(self) -> None:
        self.stopping = True


def application(parts: Parts, hosts: Hosts | None = None) -> FastAPI:
    """`hosts`: under which names it answers; any, if not given."""
    app = FastAPI(title="Stretto controller", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.parts = parts

    @app.websocket("/v1/jobs/{namespace}/{name}/join")
    async def join(websocket: WebSocket, namespace: str, name: str) -> None:
        await websocket.accept()
        socket = WorkerSocket(websocket)
        try:
            if parts.controller is None:
                await socket.close(_TRY_AGAIN, "this controller does not lead")
            else:
                await parts.controller.join(namespace, name, socket)
        except ConnectionError:
            return
        finally:
            await socket.finish()

    @app.get("/healthz")
    async def health() -> Response:
        stale_s = parts.controller.cluster.stale_s() if parts.controller is not None else 0.0
        if stale_s > _STALE_S:
            return Response(f"nothing was heard of the API server for {stale_s:.0f} s\n", 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readiness() -> Response:
        """Whoever stands by is ready to."""
        starting = parts.controller is not None and not parts.controller.ready.is_set()
        if starting or parts.stopping:
            return Response("starting\n", 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        body, kind = exposition(parts.controller, parts.is_leader())
        return Response(body, headers={"Content-Type": kind})

    if hosts is not None:
        app.add_middleware(Checked, hosts=hosts)
    return app
