"""The application: all endpoints around one control plane."""

from __future__ import annotations

from fastapi import FastAPI, Response

from stretto.api import classes, cluster, health, history, jobs, joining, problems, reading, tokens
from stretto.api.auth import Auth
from stretto.api.describing import describe
from stretto.api.hosts import Checked, Hosts
from stretto.api.observed import Observed
from stretto.api.parts import Parts
from stretto.api.seeing import Seeing
from stretto.server.plane import Plane


def create_app(plane: Plane, auth: Auth, hosts: Hosts | None = None, *, opened: bool = False) -> FastAPI:
    """`hosts`: under which names it answers; any, if not given. `opened`: everybody with a token reads everything.

    `app.state.parts` is what its endpoints work with; call its `stop` before the server is shut down.
    """
    app = FastAPI(
        title="Stretto",
        openapi_url="/v1/openapi.json",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        telemetry={"tracing": False, "metrics": False},
    )
    parts = app.state.parts = Parts(plane, auth, Observed(plane, plane.clock), Seeing(plane, opened=opened))
    app.state.registry = health.registry(parts)
    # The first is found first.
    app.router.routes.insert(0, jobs.submission_route())
    for module in (jobs, history, reading, joining, cluster, classes, tokens, health):
        app.router.routes.extend(module.router.routes)
    problems.install(app)
    describe(app)
    if hosts is not None:
        app.add_middleware(Checked, hosts=hosts)
    return app
