"""What was learned of classes of jobs. A class's name is a job's name or its whole command, slashes and all."""

from __future__ import annotations

import fnmatch
from typing import Annotated

from fastapi import APIRouter, Query, Response

from stretto.api import answers, bodies
from stretto.api.describing import ERRORS
from stretto.api.describing import answers as documented
from stretto.api.parts import Admin, Server, Viewer
from stretto.errors import NotFound
from stretto.server import classes

router = APIRouter(tags=["classes"])


@router.get("/v1/classes", responses=documented("ClassList"))
async def list_classes(
    server: Server,
    caller: Viewer,
    name: Annotated[str | None, Query(description="`*` is any text, `?` any one character.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="`next` of the page before.")] = None,
) -> Response:
    """Classes of which something was learned, by name, a page at a time."""
    plane, pattern = server.plane, None if name is None else bodies.plain(name, "name")
    seen = await server.seeing.classes(caller)
    names = [one for one in seen if pattern is None or fnmatch.fnmatchcase(one, pattern)]
    rest = [one for one in names if cursor is None or one > cursor]
    items = [classes.summary(one, plane.known(one)) for one in rest[:limit]]
    return answers.json(answers.List(items, rest[limit - 1] if len(rest) > limit else None))


@router.get("/v1/classes/{name:path}", responses=documented("Class"))
async def show_class(server: Server, caller: Viewer, name: str) -> Response:
    """Everything that was learned of one: lengths by hyper-parameters, speeds by device type."""
    if name not in await server.seeing.classes(caller):
        # As if there were none: that there is one tells what others run.
        raise NotFound(f"nothing was learned of a class {name!r}", hint="`stretto class list` lists them all")
    return answers.json(classes.details(name, server.plane.known(name)))


@router.delete(
    "/v1/classes/{name:path}", status_code=204, responses={204: {"description": "It is forgotten."}, **ERRORS}
)
async def forget_class(server: Server, caller: Admin, name: str) -> Response:
    """Forget a class: the next job of it is as new as the first was."""
    await server.plane.forget_class(name, caller.user)
    return Response(status_code=204)
