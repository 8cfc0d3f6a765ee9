"""Who reads what: everything that could tell something of a job is asked for, by its owner, by others and by admins."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from api_client import Api, eventually, serving
from fastapi.routing import APIWebSocketRoute
from websockets.sync.client import connect

from stretto.api import classes, cluster, health, history, jobs, joining, reading, seeing, tokens
from stretto.jobs import events as e

CANARY = "canary-9c41"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("closed"), opened=False) as api:
        yield api


@pytest.fixture(scope="module")
def people(closed: Api) -> dict[str, Api]:
    made = {}
    for name, role in (("ana", "user"), ("bob", "user"), ("vera", "viewer")):
        made[name] = closed.as_(closed.post("/v1/tokens", {"user": name, "role": role}).json["secret"])
    return {**made, "admin": closed}


@pytest.fixture(scope="module")
def told(people: dict[str, Api]) -> dict[str, Any]:
    """A job of Ana's that says its word wherever it can: in its file, its log, its message, and while it waits."""
    ana = people["ana"]
    run = f"echo {CANARY} log; python3 -c 'raise SystemExit(\"{CANARY} exits\")'; raise {CANARY} 2>/dev/null; exit 7"
    job = ana.submit(run, name="told", labels={"what": CANARY}, retries=0)
    done = ana.until(job["id"], "failed")
    assert done["exit_code"] == 7
    waits = ana.submit(f"echo {CANARY}; kill -9 $$", name="waits", retries=5)
    eventually(lambda: ana.job(waits["id"])["failures"] >= 1)
    return done


READS = (
    "/v1/jobs", "/v1/jobs?phase=active", "/v1/jobs/told", "/v1/jobs/waits", "/v1/jobs/told/why", "/v1/jobs/waits/why",
    "/v1/jobs/told/events?limit=1000", "/v1/jobs/waits/events?limit=1000", "/v1/events?limit=1000", "/v1/nodes",
    "/v1/policy", "/v1/forecast", "/v1/classes", "/v1/cluster", "/metrics", "/readyz", f"/v1/jobs?label=what={CANARY}",
    "/v1/jobs/told/logs", "/v1/jobs/told/logs/pages", "/v1/jobs/told/logs?worker=w0",
)  # fmt: skip


@pytest.mark.parametrize("path", READS)
def test_what_a_job_is_and_says_is_read_by_its_owner_and_by_admins(
    people: dict[str, Api], told: dict[str, Any], path: str
) -> None:
    del told
    path, _, query = path.partition("?")
    asked = dict(pair.split("=", 1) for pair in query.split("&") if pair)
    seen = {name: api.get(path, **asked) for name, api in people.items()}
    for name in ("bob", "vera"):
        assert CANARY not in seen[name].text, (name, seen[name].text)
        assert seen[name].status == (403 if "/logs" in path else 200)
    assert seen["ana"].status == 200
    if "told" in path and "why" not in path:
        assert CANARY in seen["ana"].text
        assert CANARY in seen["admin"].text


def test_everybody_sees_that_a_job_is_there(people: dict[str, Api], told: dict[str, Any]) -> None:
    seen = people["vera"].job("told")
    common = ("id", "number", "name", "user", "phase", "submitted_s", "started_s", "ended_s", "min_workers", "reason")
    assert {name: seen[name] for name in common} == {name: told[name] for name in common}
    assert (seen["withheld"], told["withheld"]) == (True, False)
    assert (seen["spec"], seen["message"], seen["labels"], seen["exit_code"]) == ({}, "", {}, None)


def test_labels_find_ones_own_jobs(people: dict[str, Api], told: dict[str, Any]) -> None:
    found = {name: api.get("/v1/jobs", label=f"what={CANARY}").json["items"] for name, api in people.items()}
    assert {name: [job["number"] for job in jobs] for name, jobs in found.items()} == {
        "ana": [told["number"]], "admin": [told["number"]], "bob": [], "vera": [],
    }  # fmt: skip


def test_streams_say_no_more(people: dict[str, Api], told: dict[str, Any]) -> None:
    for name, api in people.items():
        connection = http.client.HTTPConnection(api.address, timeout=60)
        connection.request("GET", "/v1/events/stream?after=0", headers={"Authorization": f"Bearer {api.token}"})
        answer, text = connection.getresponse(), b""
        while f'"job":{told["number"]}'.encode() not in text or b'"kind":"ended"' not in text:
            text += answer.readline()
        connection.close()
        assert (CANARY.encode() in text) == (name in ("ana", "admin")), name
        url = api.websocket(f"/v1/jobs/{told['id']}/logs/follow")
        headers = {"Authorization": f"Bearer {api.token}"}
        if name in ("ana", "admin"):
            with connect(url, additional_headers=headers) as following:
                assert CANARY in str(following.recv())
        else:
            with pytest.raises(Exception, match="403"), connect(url, additional_headers=headers):
                pass


def test_others_learn_nothing_from_what_was_learned(people: dict[str, Api]) -> None:
    ana = people["ana"]
    command = f"true {CANARY}"
    ana.until(ana.submit(command)["id"], "succeeded")
    eventually(lambda: CANARY in ana.get("/v1/classes").text)
    assert ana.get(f"/v1/classes/{command}").status == 200
    for name in ("bob", "vera"):
        assert CANARY not in people[name].get("/v1/classes").text
        assert people[name].get(f"/v1/classes/{command}").status == 404


def test_an_open_server_tells_everybody_everything(tmp_path: Path) -> None:
    with serving(tmp_path, opened=True) as api:
        secret = api.post("/v1/tokens", {"user": "vera", "role": "viewer"}).json["secret"]
        job = api.until(api.submit(f"echo {CANARY}")["id"], "succeeded")
        vera = api.as_(secret)
        assert vera.job(job["id"])["spec"]["run"] == f"echo {CANARY}"
        assert vera.get(f"/v1/jobs/{job['id']}/logs").text == f"{CANARY}\n"


def test_every_route_has_a_rule(closed: Api) -> None:
    """And every kind of event: a new one is not forgotten."""
    document = json.loads(closed.get("/v1/openapi.json").text)
    described = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("get", "post", "put", "delete", "patch")
    }
    ruled = {(method, path.replace(":path", "")) for method, path in seeing.RULES}
    modules = (classes, cluster, health, history, jobs, joining, reading, tokens)
    sockets = {("WS", path) for module in modules for path in _sockets(module.router.routes)}
    assert len(sockets) == 2
    assert described | sockets <= ruled, (described | sockets) - ruled
    kinds = set(get_args(e.Event)) - {e.Submitted}
    assert kinds == set(seeing._OF_AN_EVENT)
    for kind, hidden in seeing._OF_AN_EVENT.items():
        assert set(hidden) <= set(kind.__struct_fields__), kind
        told = {name for name in kind.__struct_fields__ if name in ("text", "why", "message", "stack", "metrics")}
        assert told <= set(hidden), kind


def _sockets(routes: Iterable[object]) -> list[str]:
    return [route.path for route in routes if isinstance(route, APIWebSocketRoute)]
