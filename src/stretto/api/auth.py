"""Who asks, and what they may do.

A token's secret is 256 random bits; the store knows its SHA-256 only. What the store said is believed for a moment, so
that a burst of requests costs no query each; tokens that are revoked here are forgotten at once. While the store cannot
be asked, who was known a minute ago still is.

Whoever listens is asked again and again: a stream asks `still` every second, and ends when its token is worth nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import HTTPConnection

from stretto.accounts import Accounts
from stretto.api import local
from stretto.api.problems import Unauthenticated
from stretto.errors import Conflict, Denied, NotFound, UsageError
from stretto.jobs.model import Account, Job
from stretto.store import Role, Store, StoreError, Token

_BELIEVED_S = 2.0
_BELIEVED_IN_TROUBLE_S = 60.0
_MOST_REMEMBERED = 10_000
_RANK: dict[Role, int] = {"viewer": 0, "user": 1, "admin": 2}
_PREFIX = "stretto_"


class Caller(NamedTuple):
    user: str
    role: Role
    secret: str = ""
    """What the token was, for `still`."""
    uid: int | None = None
    """The account that came through the Unix socket, if there was no token."""
    account: Account | None = None
    """As whom jobs are run that come with it; None: as the server itself."""

    def may(self, role: Role) -> bool:
        return _RANK[self.role] >= _RANK[role]


class Auth:
    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        counts: Callable[[], float] = time.monotonic,
        accounts: Accounts | None = None,
    ) -> None:
        """Tokens expire by `clock`, which people set; for how long something is believed is counted by `counts`.
        `accounts`: None where nobody has any."""
        self._store, self._clock, self._counts, self._accounts = store, clock, counts, accounts
        self._known: dict[str, tuple[Token, float]] = {}
        """Digest → the token, and when the store said so."""

    async def caller(self, connection: HTTPConnection, role: Role) -> Caller:
        """By the token; without one by the account, if it came through the Unix socket. Raises `Unauthenticated`, or
        `Denied` when this role is more than the caller's."""
        uid = local.peer_in(connection.scope.get("state") or {})
        if uid is not None and "authorization" not in connection.headers:
            return self._of_uid(uid, role)
        return await self.caller_with(secret_of(connection), role)

    async def caller_with(self, secret: str, role: Role) -> Caller:
        token = await self._token(secret)
        caller = _with_role(Caller(token.user, token.role, secret, account=_account(token)), role)
        if role != "viewer" and (refusal := self._refusal(token, caller.account)):
            make = f"`stretto token create {token.user} --role {token.role}`"
            raise Denied(refusal, hint=f"an admin makes another: {make}, and revokes this one, {token.id}")
        return caller

    def _refusal(self, token: Token, account: Account | None) -> str:
        """Why it is good for reading only; empty if it is good for more."""
        return "" if self._accounts is None else self._accounts.refusal(account, token.hash)

    async def still(self, caller: Caller, role: Role = "viewer") -> bool:
        """Whether the token that somebody came with is good for that even now."""
        try:
            if caller.uid is not None:
                self._of_uid(caller.uid, role)
            else:
                await self.caller_with(caller.secret, role)
        except (Unauthenticated, Denied):
            return False
        except StoreError:
            # Nobody was revoked by a store that does not answer.
            return True
        return True

    async def create(
        self, user: str, role: Role, expires_s: float | None, *, name: str | None = None, shared: bool = False
    ) -> tuple[Token, str]:
        """A new token and its secret, which nobody can read again. `name`: of the account that its jobs run as."""
        account = None
        if self._accounts is not None:
            account = await asyncio.to_thread(self._accounts.for_token, user, role, name, shared=shared)
        elif name is not None:
            raise UsageError("account: nobody has accounts here", hint="leave it out")
        secret = new_secret()
        token = make_token(secret, user, role, self._clock(), expires_s, account)
        await asyncio.wrap_future(self._store.add_token(token))
        return token, secret

    async def all(self) -> list[Token]:
        return await asyncio.to_thread(self._store.tokens)

    async def revoke(self, token_id: str) -> None:
        """The last admin stays: nobody could make another."""
        tokens, now_s = await self.all(), self._clock()
        admins = [token.id for token in tokens if token.role == "admin" and not token.expired(now_s)]
        if admins == [token_id]:
            raise Conflict(f"token {token_id} is the last one of an admin", hint="create another one first")
        if not await asyncio.wrap_future(self._store.revoke_token(token_id)):
            raise NotFound(f"there is no token {token_id!r}", hint="`stretto token list` lists them")
        self._known = {digest: kept for digest, kept in self._known.items() if kept[0].id != token_id}

    def _of_uid(self, uid: int, role: Role) -> Caller:
        """Where accounts are told apart each of a person is a user; elsewhere there is only our own."""
        if self._accounts is not None and (account := self._accounts.person(uid)) is not None:
            return _with_role(Caller(account.name, "user", uid=uid, account=account), role)
        user, own = local.user_of_uid(uid)
        account = None if self._accounts is None else self._accounts.own
        return _with_role(Caller(user, own, uid=uid, account=account), role)

    async def _token(self, secret: str) -> Token:
        digest, counted_s = digest_of(secret), self._counts()
        token, heard_s = self._known.get(digest, (None, 0.0))
        if token is None or counted_s - heard_s >= _BELIEVED_S:
            token = await self._asked(digest, token, counted_s - heard_s)
            if token is None:
                self._known.pop(digest, None)
                raise Unauthenticated("the token is not known, or not any more", hint="ask an admin for a new one")
        if token.expired(self._clock()) or not hmac.compare_digest(token.hash, digest):
            raise Unauthenticated("the token has expired", hint="ask an admin for a new one")
        return token

    async def _asked(self, digest: str, known: Token | None, since_s: float) -> Token | None:
        """What the store says; while it cannot be read, what it said."""
        asked_s = self._counts()
        try:
            token = await asyncio.to_thread(self._store.token_by_hash, digest)
        except StoreError:
            if known is None or since_s >= _BELIEVED_IN_TROUBLE_S:
                raise
            return known
        if token is not None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[digest] = token, asked_s
        return token


def _with_role(caller: Caller, role: Role) -> Caller:
    if not caller.may(role):
        raise Denied(f"a token of the role {role!r} is needed, and yours is {caller.role!r}", hint="ask an admin")
    return caller


def check_owner(caller: Caller, job: Job) -> None:
    """Users change their own jobs only."""
    if caller.role != "admin" and caller.user != job.user:
        raise Denied(f"job {job.id} belongs to {job.user}", hint="ask them, or an admin")


def new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _account(token: Token) -> Account | None:
    if token.account is None or token.uid is None:
        return None
    return Account(name=token.account, uid=token.uid)


def make_token(
    secret: str, user: str, role: Role, now_s: float, expires_s: float | None = None, account: Account | None = None
) -> Token:
    return Token(
        id=secrets.token_hex(6),
        user=user,
        role=role,
        hash=digest_of(secret),
        created_s=now_s,
        expires_s=expires_s,
        account=None if account is None else account.name,
        uid=None if account is None else account.uid,
    )


def secret_of(connection: HTTPConnection) -> str:
    """From the header, and from nowhere else: addresses end in logs, histories and lists of processes."""
    if connection.scope["query_string"] and "token" in connection.query_params:
        raise Unauthenticated("a token does not belong into an address", hint=f"{_HOW}; and revoke this one")
    header = connection.headers.get("authorization", "")
    scheme, _, secret = header.partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    if header:
        raise Unauthenticated("the Authorization header is not `Bearer TOKEN`", hint="send the token as it was shown")
    raise Unauthenticated("no token came with the request", hint=_HOW)


_HOW = "send `Authorization: Bearer TOKEN`; a browser's WebSocket sends it as its first message, see docs/api.md"
