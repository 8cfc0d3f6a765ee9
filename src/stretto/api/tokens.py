"""Tokens, for admins."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response

from stretto.api import answers, bodies
from stretto.api.describing import ERRORS, takes
from stretto.api.describing import answers as documented
from stretto.api.parts import Admin, Server
from stretto.errors import UsageError

_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

router = APIRouter(tags=["tokens"])


@router.get("/v1/tokens", responses=documented("TokenList"))
async def list_tokens(server: Server, caller: Admin) -> Response:
    """All tokens, without their secrets, which nobody knows."""
    return answers.json(answers.List([answers.token(token) for token in await server.auth.all()]))


@router.post(
    "/v1/tokens", status_code=201, responses=documented("NewToken", 201), openapi_extra=takes("TokenRequest")
)  # fmt: skip
async def create_token(request: Request, server: Server, caller: Admin) -> Response:
    """A new token; its secret is shown this once."""
    asked = await bodies.read(request, bodies.TokenRequest)
    if not _USER.fullmatch(asked.user):
        raise UsageError(f"user: {asked.user!r} is not a name", hint="use up to 64 letters, digits, '.', '_', '@', '-'")
    if asked.expires_s is not None and asked.expires_s <= server.plane.told(server.plane.clock()):
        raise UsageError("expires_s: that time is past", hint="give seconds since 1970, or leave it out")
    token, secret = await server.auth.create(
        asked.user, asked.role, asked.expires_s, name=asked.account, shared=asked.shared
    )
    return answers.json(answers.new_token(token, secret), 201, {"Cache-Control": "no-store"})


@router.delete("/v1/tokens/{token}", status_code=204, responses=ERRORS)
async def revoke_token(server: Server, caller: Admin, token: str) -> Response:
    """From now on nobody can use it."""
    await server.auth.revoke(bodies.plain(token, "token"))
    return Response(status_code=204)
