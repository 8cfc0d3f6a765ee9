"""Who may do what."""

from __future__ import annotations

import contextlib
import http.client
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_client import PATIENCE_S, Api
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from stretto.api.reading import FIRST_MESSAGE

VIEWER, USER, ADMIN = {"viewer", "user", "other", "admin"}, {"user", "admin"}, {"admin"}
CALLS = [
    ("GET", "/v1/jobs", None, VIEWER),
    ("GET", "/v1/jobs/{job}", None, VIEWER),
    ("GET", "/v1/jobs/{job}/why", None, VIEWER),
    ("GET", "/v1/jobs/{job}/events", None, VIEWER),
    ("GET", "/v1/jobs/{job}/logs", None, VIEWER),
    ("GET", "/v1/events", None, VIEWER),
    ("GET", "/v1/nodes", None, VIEWER),
    ("GET", "/v1/policy", None, VIEWER),
    ("GET", "/v1/forecast", None, VIEWER),
    ("GET", "/v1/cluster", None, VIEWER),
    ("POST", "/v1/jobs?dry_run=true", {"run": "true"}, USER | {"other"}),
    ("POST", "/v1/jobs/{job}/suspend", None, USER),
    ("POST", "/v1/jobs/{job}/resume", None, USER),
    ("POST", "/v1/jobs/{job}/scale", {"max": 1}, USER),
    ("POST", "/v1/jobs/{job}/migrate", {"to": "nowhere"}, USER),
    ("POST", "/v1/jobs/{job}/cancel", None, USER),
    ("POST", "/v1/nodes/local/undrain", None, ADMIN),
    ("POST", "/v1/nodes/nowhere/drain", None, ADMIN),
    ("PUT", "/v1/policy", {"name": "no-such-policy"}, ADMIN),
    ("GET", "/v1/tokens", None, ADMIN),
    ("POST", "/v1/tokens", {"user": "", "role": "viewer"}, ADMIN),
    ("DELETE", "/v1/tokens/none", None, ADMIN),
]


@pytest.mark.parametrize(("method", "path", "body", "allowed"), CALLS, ids=[f"{c[0]} {c[1]}" for c in CALLS])
def test_the_matrix(api: Api, tokens: dict[str, str], method: str, path: str, body: object, allowed: set[str]) -> None:
    job = api.as_(tokens["user"]).submit("true")
    path = path.format(job=job["id"])

    def status(token: str | None) -> int:
        asking = api.as_(token)
        return (asking.ask(method, path) if body is None else asking.send(method, path, body)).status

    for who, token in tokens.items():
        assert (status(token) != 403) == (who in allowed), who
        assert status(token) != 401
    assert status(None) == status("wrong") == status("") == 401


def test_who_is_not_known_is_told_how(api: Api) -> None:
    answer = api.as_(None).get("/v1/jobs")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert answer.json["code"] == "unauthenticated"
    for header in ("Basic eDp5", "Bearer", "Bearer  ", "stretto"):
        assert api.as_(None).ask("GET", "/v1/jobs", headers={"Authorization": header}).status == 401


def test_some_things_need_no_token(api: Api) -> None:
    anybody = api.as_(None)
    for path in ("/healthz", "/readyz", "/metrics", "/v1/openapi.json", "/docs"):
        assert anybody.get(path).status == 200


def test_a_token_is_shown_once_and_stored_as_a_hash(api: Api, data: Path) -> None:
    answer = api.post("/v1/tokens", {"user": "ada", "role": "viewer"})
    assert answer.status == 201
    made = answer.json
    assert len(made["secret"]) > 40
    listed = api.get("/v1/tokens")
    assert made["secret"] not in listed.text
    assert {key: made[key] for key in made if key != "secret"} in [
        {**one, "last_used_s": None} for one in listed.json["items"]
    ]
    with sqlite3.connect(data / "stretto.db") as connection:
        assert made["secret"] not in str(connection.execute("SELECT * FROM tokens").fetchall())
    connection.close()
    assert api.as_(made["secret"]).get("/v1/jobs").status == 200
    assert api.ask("DELETE", f"/v1/tokens/{made['id']}").status == 204
    assert api.as_(made["secret"]).get("/v1/jobs").status == 401
    assert api.ask("DELETE", f"/v1/tokens/{made['id']}").status == 404


def test_a_token_expires(api: Api) -> None:
    soon_s = time.time() + 0.5  # noqa: TID251
    secret = api.post("/v1/tokens", {"user": "ada", "role": "viewer", "expires_s": soon_s}).json["secret"]
    asking = api.as_(secret)
    while time.time() < soon_s:  # noqa: TID251
        assert asking.get("/v1/nodes").status in (200, 401)
    assert asking.get("/v1/nodes").status == 401


@pytest.mark.parametrize(
    "body",
    [
        {"user": "a b", "role": "user"},
        {"user": "a", "role": "root"},
        {"user": "a"},
        {"user": "a", "role": "user", "expires_s": 1},
    ],
)
def test_bad_tokens_are_not_made(api: Api, body: dict[str, object]) -> None:
    assert api.post("/v1/tokens", body).status == 422


def test_the_last_admin_cannot_be_removed(api: Api) -> None:
    mine = [one["id"] for one in api.get("/v1/tokens").json["items"] if one["role"] == "admin"]
    assert len(mine) == 1
    assert api.ask("DELETE", f"/v1/tokens/{mine[0]}").status == 409


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/events/stream", "/v1/jobs/{job}/logs/follow"])
def test_a_token_in_an_address_is_refused(api: Api, tokens: dict[str, str], path: str) -> None:
    """Addresses end in logs and histories. With a header, too: whoever sends it in both places is told."""
    path = path.format(job=api.submit("true")["id"])
    for asking in (api.as_(None), api):
        if path.endswith("/follow"):
            headers = {"Authorization": f"Bearer {asking.token}"} if asking.token else {}
            url = api.websocket(f"{path}?token={tokens['viewer']}")
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers=headers)
            status, body = refused.value.response.status_code, refused.value.response.body or b""
        else:
            answer = asking.get(path, token=tokens["viewer"])
            status, body = answer.status, answer.body
        assert status == 401
        assert b"unauthenticated" in body
        assert b"Authorization: Bearer" in body


def test_a_browser_sends_its_token_as_the_first_message(api: Api, tokens: dict[str, str]) -> None:
    job = api.submit("true")
    url = api.websocket(f"/v1/jobs/{job['id']}/logs/follow")
    with connect(url, subprotocols=[Subprotocol(FIRST_MESSAGE)]) as socket:
        assert socket.subprotocol == FIRST_MESSAGE
        socket.send(json.dumps({"token": tokens["viewer"]}))
        assert socket.recv(timeout=30)
    too_long = 1009
    for said, code in (
        ('{"token": "wrong"}', 4401),
        ("no token", 4401),
        (b"\xff", 4401),
        ("[" * 4000, 4401),
        ("[" * 100_000, too_long),
    ):
        with connect(url, subprotocols=[Subprotocol(FIRST_MESSAGE)]) as socket:
            socket.send(said)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=30)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == code


def listen_to_events(api: Api, token: str) -> Iterator[bytes]:
    with contextlib.closing(http.client.HTTPConnection(api.address, timeout=30)) as connection:
        connection.request("GET", "/v1/events/stream", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        yield str(answer.status).encode()
        while line := answer.readline():
            yield line


def listen_to_log(api: Api, token: str, job: str) -> Iterator[bytes]:
    url = api.websocket(f"/v1/jobs/{job}/logs/follow")
    with connect(url, additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        yield b"200"
        with contextlib.suppress(ConnectionClosed):
            while True:
                yield str(socket.recv(timeout=30)).encode()
        assert socket.close_code == 1008


@pytest.mark.parametrize("what", ["events", "log"])
@pytest.mark.parametrize("how", ["revoked", "removed", "expired"])
def test_a_stream_ends_when_its_token_does(api: Api, data: Path, what: str, how: str) -> None:
    """`removed`: by somebody else than this server. A busy stream ends as well as a silent one."""
    job = api.submit("while true; do echo tick; sleep 0.2; done")
    api.until(job["id"], "running")
    expires_s = time.time() + 3 if how == "expired" else None  # noqa: TID251
    made = api.post("/v1/tokens", {"user": "ada", "role": "viewer", "expires_s": expires_s}).json
    listening = (
        listen_to_events(api, made["secret"]) if what == "events" else listen_to_log(api, made["secret"], job["id"])
    )
    assert next(listening) == b"200"
    if how == "revoked":
        assert api.ask("DELETE", f"/v1/tokens/{made['id']}").status == 204
    elif how == "removed":
        with contextlib.closing(sqlite3.connect(data / "stretto.db", timeout=30)) as connection, connection:
            connection.execute("DELETE FROM tokens WHERE id = ?", (made["id"],))
    deadline_s = time.monotonic() + PATIENCE_S
    for _ in listening:
        assert time.monotonic() < deadline_s, "it goes on"
    assert api.as_(made["secret"]).get("/v1/nodes").status == 401


def test_the_file_for_the_command_line_is_private(data: Path, api: Api) -> None:
    assert (data / "token").stat().st_mode & 0o777 == 0o600
    assert data.stat().st_mode & 0o077 == 0 or data.parent.stat().st_mode & 0o077 == 0
