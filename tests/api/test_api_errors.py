"""Whatever comes in, the answer is a problem that says what to change, and never a 5xx."""

from __future__ import annotations

import socket

import pytest
from api_client import Api

JSON, YAML = {"Content-Type": "application/json"}, {"Content-Type": "application/yaml"}


@pytest.mark.parametrize(
    ("status", "code", "headers", "body"),
    [
        (400, "malformed", JSON, b""),
        (400, "malformed", JSON, b"{"),
        (400, "malformed", JSON, b'{"run": "\xff"}'),
        (400, "malformed", JSON, b'{"run": "\\ud800"}'),
        (400, "malformed", JSON, b'{"run": NaN}'),
        (400, "malformed", JSON, b"1" * 5000),
        (400, "malformed", JSON, b"[" * 100_000 + b"]" * 100_000),
        (400, "malformed", JSON, b'{"job": {"run": "x"}, "cwd": "/a\\u0000"}'),
        (400, "malformed", JSON, b'{"run": "x", "hyperparameters": {"a": "\\u0000"}}'),
        (400, "malformed", YAML, b"run: \xff"),
        (422, "spec", YAML, b""),
        (422, "spec", YAML, b"run: [" * 5000),
        (400, "malformed", YAML, b'run: "\\ud800"'),
        (400, "malformed", YAML, b'run: x\nhyperparameters: {a: "\\ud800"}'),
        (422, "spec", YAML, b"a: &a [x]\nb: &b [*a, *a]\nrun: *b"),
        (422, "usage", JSON, b"[]"),
        (422, "usage", JSON, b"null"),
        (422, "spec", JSON, b'"run"'),
        (422, "spec", JSON, b'{"job": "/etc/netplan.yaml"}'),
        (400, "malformed", JSON, b'{"job": "run: \\"\\\\ud800\\""}'),
        (422, "spec", JSON, b"{}"),
        (422, "spec", JSON, b'{"run": 1e300}'),
        (422, "spec", JSON, b'{"run": "x", "workers": 123456789012345678901234567890}'),
        (422, "usage", JSON, b'{"job": []}'),
        (422, "usage", JSON, b'{"job": {"run": "x"}, "cwd": "relative"}'),
        (422, "usage", JSON, b'{"job": {"run": "x"}, "env": {"A=B": "x"}}'),
        (422, "usage", JSON, b'{"job": {"run": "x"}, "other": 1}'),
        (404, "not-found", JSON, b'{"run": "x", "after": ["nobody"]}'),
        (413, "too-large", JSON, b'{"run": "' + b"x" * 2**20 + b'"}'),
        (413, "too-large", YAML, b"x" * (2**20 + 1)),
        (415, "media-type", {"Content-Type": "text/html"}, b"run: x"),
        (415, "media-type", {"Content-Type": ""}, b"run: x"),
        (422, "usage", {**JSON, "Idempotency-Key": "k" * 256}, b'{"run": "x"}'),
    ],
)
def test_bad_submissions(api: Api, status: int, code: str, headers: dict[str, str], body: bytes) -> None:
    before = api.get("/v1/jobs", limit=1).json["items"]
    answer = api.ask("POST", "/v1/jobs", body, headers)
    assert (answer.status, answer.json["code"]) == (status, code), answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json["status"] == status
    assert answer.json["type"] == f"https://stretto.dev/problems/{code}"
    assert answer.json["detail"]
    assert answer.json["hint"]
    assert api.get("/v1/jobs", limit=1).json["items"] == before


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "cursor=x", "cursor=-1", f"cursor={2**64}", "phase=x", "order=x", "level=x",
     "label=x", "label==x", "label=a=1&label=a=2"],
)  # fmt: skip
def test_bad_queries(api: Api, query: str) -> None:
    answer = api.get(f"/v1/jobs?{query}")
    assert (answer.status, answer.json["code"]) == (422, "usage")


@pytest.mark.parametrize("query", ["name=%00", "user=%00", "queue=%00", "label=a=%00"])
def test_nul_is_refused(api: Api, query: str) -> None:
    assert api.get(f"/v1/jobs?{query}").status == 400


@pytest.mark.parametrize("name", ["%ff", "[", "[!a]", "*" * 500, "%F0%90%80%80", "'; DROP TABLE jobs; --"])
def test_odd_patterns_find_nothing(api: Api, name: str) -> None:
    answer = api.get(f"/v1/jobs?name={name.replace(' ', '%20')}&queue=none")
    assert (answer.status, answer.json["items"]) == (200, [])


def test_unknown_paths_and_methods(api: Api) -> None:
    answer = api.get("/v2/jobs")
    assert (answer.status, answer.json["code"]) == (404, "not-found")
    answer = api.ask("DELETE", "/v1/jobs")
    assert (answer.status, answer.json["code"], answer.headers["Allow"]) == (405, "method", "GET, POST")
    assert api.get("/v1/jobs/").status == 404


def test_a_body_without_end_is_not_kept(api: Api) -> None:
    """Its sender hears why, or is hung up on; the server goes on."""
    connection = _connect(api)
    connection.sendall(_head(api, "Transfer-Encoding: chunked"))
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    try:
        for _ in range(1024):
            connection.sendall(chunk)
    except OSError:
        pass
    else:
        raise AssertionError("64 MiB were taken")
    finally:
        connection.close()
    assert api.get("/healthz").status == 200


def test_an_announced_giant_is_refused_at_once(api: Api) -> None:
    with _connect(api) as connection:
        connection.sendall(_head(api, f"Content-Length: {10**12}"))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("sent", [b"X-Long: " + b"x" * 70_000 + b"\r\n\r\n", b"X-Many: x\r\n" * 20_000, b"x" * 100_000])
def test_headers_without_end_are_refused(api: Api, sent: bytes) -> None:
    with _connect(api) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 431")
    assert api.get("/healthz").status == 200


@pytest.mark.parametrize(
    "sent", [b"\x00\xff\xfe", b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_is_refused(api: Api, sent: bytes) -> None:
    with _connect(api) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


def _connect(api: Api) -> socket.socket:
    host, _, port = api.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _head(api: Api, *lines: str) -> bytes:
    head = [
        "POST /v1/jobs HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {api.token}",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*head, *lines, "", ""]).encode()
