"""Who may do what."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from api_client import Api
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

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


def test_a_query_token_is_for_streams_only(api: Api, tokens: dict[str, str]) -> None:
    anybody, viewer = api.as_(None), tokens["viewer"]
    assert anybody.get("/v1/jobs", token=viewer).status == 401
    job = api.submit("true")
    with connect(api.websocket(f"/v1/jobs/{job['id']}/logs/follow?token={viewer}")) as socket:
        assert socket.recv(timeout=30)
    with pytest.raises(InvalidStatus) as refused:
        connect(api.websocket(f"/v1/jobs/{job['id']}/logs/follow")).__enter__()
    assert refused.value.response.status_code == 401
    assert b"unauthenticated" in (refused.value.response.body or b"")


def test_the_file_for_the_command_line_is_private(data: Path, api: Api) -> None:
    assert (data / "token").stat().st_mode & 0o777 == 0o600
    assert data.stat().st_mode & 0o077 == 0 or data.parent.stat().st_mode & 0o077 == 0
