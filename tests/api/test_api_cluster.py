"""Nodes, the policy, the forecast, numbers, and the way in for workers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from api_client import Api, eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def test_nodes_say_who_uses_them(api: Api) -> None:
    job = api.submit("sleep 60", workers=2)
    api.until(job["id"], "running")
    node = api.get("/v1/nodes").json["items"][0]
    assert (node["name"], node["devices"], node["used"], node["drained"]) == ("local", 4, 2.0, False)
    assert {(one["job"], one["worker"]) for one in node["workers"]} == {(job["number"], "w0"), (job["number"], "w1")}
    cluster = api.get("/v1/cluster").json
    assert (cluster["devices"], cluster["used"], cluster["jobs"]["running"]) == (4, 2.0, 1)
    assert cluster["series"][-1]["used"] == 2.0
    api.post(f"/v1/jobs/{job['id']}/cancel")
    api.until(job["id"], "cancelled")
    eventually(lambda: api.get("/v1/cluster").json["used"] == 0)
    series = api.get("/v1/cluster").json["series"]
    assert [point["at_s"] for point in series] == sorted(point["at_s"] for point in series)


def test_a_drained_node_takes_nothing(api: Api) -> None:
    drained = api.post("/v1/nodes/local/drain", {"within_s": 600}).json
    assert (drained["drained"], drained["waits_for"]) == (True, [])
    assert 0 < drained["leaves_s"] - api.get("/v1/cluster").json["at_s"] <= 600
    assert api.post("/v1/nodes/local/drain", {"within_s": -1}).status == 422
    drained = api.post("/v1/nodes/local/drain").json
    assert (drained["drained"], drained["leaves_s"]) == (True, None)
    job = api.submit("true")
    eventually(lambda: api.get(f"/v1/jobs/{job['id']}/why").json["reason"] != "new")
    assert api.job(job["id"])["phase"] == "queued"
    assert api.get("/v1/cluster").json["devices"] == 0
    assert api.post("/v1/nodes/local/undrain").json["drained"] is False
    api.until(job["id"], "succeeded")
    assert api.post("/v1/nodes/nowhere/drain").status == 404


def test_the_policy_can_be_changed(api: Api) -> None:
    before = api.get("/v1/policy").json
    answer = api.send("PUT", "/v1/policy", {"name": "fifo"})
    assert (answer.status, answer.json["name"], answer.json["placement"]) == (200, "fifo", before["placement"])
    job = api.submit("true")
    api.until(job["id"], "succeeded")
    answer = api.send("PUT", "/v1/policy", {"name": "fifo", "options": {"stops_lose_work": True}})
    assert (answer.json["settings"], answer.json["options"]) == ({"stops_lose_work": True}, {})
    answer = api.send("PUT", "/v1/policy", {"name": "fifo", "options": {"stops_lose_work": False}})
    assert answer.json["settings"] == {}
    for wrong in (
        {"name": "fifo", "options": {"reserve_after_s": "soon"}},
        {"name": "fifoo"},
        {"name": "fifo", "placement": "x"},
        {"name": "fifo", "options": {"x": 1}},
    ):
        answer = api.send("PUT", "/v1/policy", wrong)
        assert (answer.status, answer.headers["Content-Type"]) == (422, "application/problem+json"), answer.text
    assert api.get("/v1/policy").json["name"] == "fifo"
    assert api.send("PUT", "/v1/policy", {"name": before["name"], "options": before["options"]}).status == 200


def test_the_forecast_names_all_jobs(api: Api) -> None:
    jobs = [api.submit("sleep 60", workers=4) for _ in range(2)]
    api.until(jobs[0]["id"], "running")
    items = api.get("/v1/forecast").json["items"]
    first, second = ({item["job"]: item for item in items}[job["number"]] for job in jobs)
    assert (first["expected_from"], first["start_guessed"], first["end_guessed"]) == ("unknown", False, True)
    assert (second["expected_from"], second["start_guessed"], second["end_guessed"]) == ("unknown", True, True)
    told = api.submit("sleep 60", workers=1, expect="60s")
    item = next(item for item in api.get("/v1/forecast").json["items"] if item["job"] == told["number"])
    assert (item["expected_from"], item["end_guessed"]) == ("hint", True), "it waits for those"
    jobs.append(told)
    for job in jobs[::-1]:
        api.post(f"/v1/jobs/{job['id']}/cancel")
        api.until(job["id"], "cancelled")


def test_metrics_are_those_of_the_documentation(api: Api) -> None:
    job = api.submit("true")
    api.until(job["id"], "succeeded")
    text = api.get("/metrics").text
    documented = set(re.findall(r"`(stretto_\w+)", DOCS.read_text()))
    found = set(re.findall(r"^(stretto_\w+)[ {]", text, re.MULTILINE))
    assert found == documented
    assert "process_resident_memory_bytes" in text
    assert 'stretto_jobs{phase="succeeded"}' in text
    submits = float(re.findall(r"^stretto_submits_total (\S+)", text, re.MULTILINE)[0])
    assert submits >= 1
    api.submit("true")
    assert f"stretto_submits_total {submits + 1}" in api.get("/metrics").text


def test_every_path_of_the_documentation_is_there(api: Api) -> None:
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if re.match(r"\| `(GET|POST|WS)", line)]
    documented = set()
    for row in rows:
        base = ""
        for method, path in re.findall(r"`(?:(GET|POST|PUT|DELETE|WS) )?(/[^`]*)`", row):
            base = path if method else re.sub(r"/\w+$", path, base)
            documented.add(base)
    paths = set(api.get("/v1/openapi.json").json["paths"])
    sockets = {"/v1/jobs/{job}/join", "/v1/jobs/{job}/logs/follow"}
    assert {re.sub(r"{\w+}", "{}", path) for path in documented - sockets} == {
        re.sub(r"{\w+}", "{}", path) for path in paths
    }


@pytest.mark.parametrize("ref", ["no-such-job", "0"])
def test_workers_of_no_job_are_sent_away(api: Api, ref: str) -> None:
    with connect(api.websocket(f"/v1/jobs/{ref}/join")) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_a_worker_without_the_secret_is_sent_away(api: Api) -> None:
    job = api.submit("sleep 60", elastic={"min": 1, "max": 2})
    api.until(job["id"], "running")
    with connect(api.websocket(f"/v1/jobs/{job['id']}/join")) as socket:
        assert json.loads(socket.recv(timeout=30))["kind"] == "challenge"
        socket.send("this is no message")
        assert json.loads(socket.recv(timeout=30))["kind"] == "evict"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    api.post(f"/v1/jobs/{job['id']}/cancel")
    api.until(job["id"], "cancelled")
