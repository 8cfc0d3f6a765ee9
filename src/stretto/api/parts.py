"""What every endpoint needs, and how it asks for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Security
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection

from stretto.api.auth import Auth, Caller
from stretto.api.observed import Observed
from stretto.api.seeing import Seeing
from stretto.server.plane import Plane
from stretto.server.readiness import Readiness
from stretto.store import Role


@dataclass
class Parts:
    plane: Plane
    auth: Auth
    observed: Observed
    seeing: Seeing
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.plane.store, self.trouble)

    def trouble(self) -> str:
        """Why nothing is accepted now, as far as it is known without trying."""
        return "the server is going down" if self.stopping.is_set() else self.plane.ready

    def stop(self) -> None:
        """End what would go on for ever: event streams, followed logs."""
        self.stopping.set()
        self.plane.dismiss()


def parts_of(connection: HTTPConnection) -> Parts:
    parts: Parts = connection.app.state.parts
    return parts


async def _parts(connection: HTTPConnection) -> Parts:
    """As a dependency: FastAPI would call what is not a coroutine in a thread."""
    return parts_of(connection)


_bearer = HTTPBearer(auto_error=False, scheme_name="token", description="`Authorization: Bearer TOKEN`")


class Needs:
    """The caller, who must have at least this role."""

    def __init__(self, role: Role) -> None:
        self.role: Role = role

    async def __call__(self, connection: HTTPConnection, _: Annotated[object, Security(_bearer)] = None) -> Caller:
        return await parts_of(connection).auth.caller(connection, self.role)


Server = Annotated[Parts, Depends(_parts)]
Viewer = Annotated[Caller, Depends(Needs("viewer"))]
User = Annotated[Caller, Depends(Needs("user"))]
Admin = Annotated[Caller, Depends(Needs("admin"))]
