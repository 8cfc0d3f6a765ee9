"""Submitting, listing and changing jobs, over the wire."""

from __future__ import annotations

import threading

import pytest
from api_client import Answer, Api, eventually

FIELDS = {
    "id", "number", "name", "user", "phase", "wish", "level", "queue", "priority", "labels", "message", "exit_code",
    "submitted_s", "started_s", "ended_s", "waited_s", "ran_s", "device_s", "workers", "target", "min_workers",
    "max_workers", "reason", "text", "steps", "total_steps", "rate", "rate_timed", "speeds", "stuck", "eta_s",
    "expected", "metrics", "starts", "resizes", "preemptions", "migrations", "paused_s", "keeps", "lost_s",
    "lost", "failures", "withheld", "spec",
}  # fmt: skip


def test_a_job_runs_and_ends(api: Api) -> None:
    job = api.submit("echo hello; exit 3")
    assert job.keys() == FIELDS
    assert (job["phase"], job["number"], job["id"]) == ("queued", int(job["id"]), str(job["number"]))
    ended = api.until(job["id"], "failed", "succeeded")
    assert (ended["phase"], ended["exit_code"]) == ("failed", 3)
    assert ended["ended_s"] >= ended["started_s"] >= ended["submitted_s"]


def test_a_submission_says_where_the_job_is(api: Api) -> None:
    answer = api.post("/v1/jobs", {"run": "true"})
    assert answer.headers["Location"] == f"/v1/jobs/{answer.json['id']}"


def test_surroundings_reach_the_worker_and_nobody_else(api: Api) -> None:
    order = {
        "job": {"run": 'echo "$PWD $GIVEN $OWN"', "env": {"OWN": "own-word"}},
        "cwd": "/",
        "env": {"GIVEN": "given-word"},
    }
    job = api.post("/v1/jobs", order).json
    api.until(job["id"], "succeeded")
    assert api.get(f"/v1/jobs/{job['id']}/logs").text == "/ given-word own-word\n"
    shown = [api.get(f"/v1/jobs/{job['id']}"), api.get("/v1/jobs", limit=1), api.get(f"/v1/jobs/{job['id']}/events")]
    for answer in shown:
        assert answer.status == 200
        assert not [word for word in ("given-word", "own-word", "secret", "context") if word in answer.text]


def test_yaml_is_taken_with_its_folder_in_the_query(api: Api) -> None:
    text = b"run: |\n  pwd\nname: in-yaml\nworkers: 1\n"
    answer = api.ask("POST", "/v1/jobs?cwd=/usr", text, {"Content-Type": "application/yaml; charset=utf-8"})
    assert answer.status == 201, answer.text
    assert api.until("in-yaml", "succeeded", "failed")["phase"] == "succeeded"
    assert api.get("/v1/jobs/in-yaml/logs").text == "/usr\n"


def test_a_yaml_text_is_never_taken_for_a_path(api: Api) -> None:
    answer = api.ask("POST", "/v1/jobs", b"/etc/netplan.yaml", {"Content-Type": "application/yaml"})
    assert answer.status == 422
    assert "cannot be read" not in answer.text


def test_a_dry_run_submits_nothing(api: Api) -> None:
    answer = api.post("/v1/jobs", {"run": "true", "name": "not-yet"}, dry_run="true")
    assert answer.status == 200
    assert answer.json["job"]["name"] == answer.json["forecast"]["name"] == "not-yet"
    assert answer.json["job"]["number"] == 0
    assert api.get("/v1/jobs/not-yet").status == 404
    assert api.post("/v1/jobs", {"run": "true", "workers": 99}, dry_run="true").status == 422


def test_the_same_key_gives_the_same_job(api: Api) -> None:
    def send(run: str) -> Answer:
        return api.send("POST", "/v1/jobs", {"run": run}, {"Idempotency-Key": "once"})

    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(send("true"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status for answer in answers} == {201}
    assert len({answer.json["id"] for answer in answers}) == 1
    assert send("true").json["id"] == answers[0].json["id"]
    assert send("false").status == 409


def test_a_name_is_taken_until_its_job_ends(api: Api) -> None:
    job = api.submit("sleep 60", name="the-only-one")
    answer = api.post("/v1/jobs", {"run": "true", "name": "the-only-one"})
    assert (answer.status, answer.json["code"]) == (409, "conflict")
    assert api.post("/v1/jobs/the-only-one/cancel").status == 202
    api.until(job["id"], "cancelled")
    again = api.submit("true", name="the-only-one")
    assert api.job("the-only-one")["id"] == again["id"]


def test_what_could_never_run_is_refused_with_what_is_there(api: Api) -> None:
    answer = api.post("/v1/jobs", {"run": "true", "workers": 5})
    assert (answer.status, answer.json["code"]) == (422, "impossible")
    assert "4 cpu slots" in answer.json["detail"]


def test_a_job_file_is_checked_with_all_its_problems(api: Api) -> None:
    answer = api.ask("POST", "/v1/jobs", b"run: x\nworkerz: 3\npriority: high\n", {"Content-Type": "application/yaml"})
    assert (answer.status, answer.json["code"]) == (422, "spec")
    assert [(one["line"], one["field"]) for one in answer.json["problems"]] == [(2, "workerz"), (3, "priority")]
    assert "did you mean 'workers'" in answer.json["problems"][0]["text"]


def test_pages_hold_every_job_once(api: Api) -> None:
    mine = [api.submit("true", queue="paged")["id"] for _ in range(7)]
    for order, expected in (("oldest", mine), ("newest", mine[::-1])):
        found: list[str] = []
        query: dict[str, str] = {"queue": "paged", "order": order, "limit": "3"}
        while True:
            page = api.get("/v1/jobs", **query).json
            found += [job["id"] for job in page["items"]]
            if page["next"] is None:
                break
            query["cursor"] = page["next"]
        assert found == expected


def test_lists_can_be_filtered(api: Api) -> None:
    queued = api.submit("sleep 60", name="filter-a1", queue="filtered", workers=3)
    ended = api.submit("true", name="filter-b2", queue="filtered", resources={"gpu": 0})

    def names(**query: object) -> set[str]:
        return {job["name"] for job in api.get("/v1/jobs", queue="filtered", **query).json["items"]}

    api.until(ended["id"], "succeeded")
    assert names() == {"filter-a1", "filter-b2"}
    assert names(phase="active") == {"filter-a1"}
    assert names(phase=["succeeded", "failed"]) == {"filter-b2"}
    assert names(name="filter-?1") == {"filter-a1"}
    assert names(name="*2") == {"filter-b2"}
    assert names(level="rigid") == {"filter-a1", "filter-b2"}
    assert names(level="service") == names(user="nobody") == names(label="a=b") == set()
    api.post(f"/v1/jobs/{queued['id']}/cancel")
    api.until(queued["id"], "cancelled")


def test_a_job_can_be_suspended_and_resumed(api: Api) -> None:
    job = api.submit("sleep 60")
    api.until(job["id"], "running")
    assert api.post(f"/v1/jobs/{job['id']}/suspend", {"fierce": True}).status == 422
    assert api.post(f"/v1/jobs/{job['id']}/suspend", {"force": True}).json["wish"] == "suspend"
    api.until(job["id"], "suspended")
    assert api.post(f"/v1/jobs/{job['id']}/resume").status == 202
    api.until(job["id"], "running")
    assert api.post(f"/v1/jobs/{job['id']}/cancel").status == 202
    assert api.until(job["id"], "cancelled")["workers"] == []
    assert api.post(f"/v1/jobs/{job['id']}/resume").status == 409


def test_sizes_can_be_changed(api: Api) -> None:
    job = api.submit("sleep 60", elastic={"min": 1, "max": 2}, level="restart")
    answer = api.post(f"/v1/jobs/{job['id']}/scale", {"max": 3})
    assert (answer.status, answer.json["min_workers"], answer.json["max_workers"]) == (202, 1, 3)
    assert api.post(f"/v1/jobs/{job['id']}/scale", {"min": 4, "max": 3}).status == 422
    assert api.post(f"/v1/jobs/{job['id']}/scale", {}).status == 422
    assert api.post(f"/v1/jobs/{job['id']}/scale", {"min": "two"}).status == 422
    assert api.post(f"/v1/jobs/{job['id']}/scale", {"min": 5, "max": 5}).json["code"] == "impossible"
    api.post(f"/v1/jobs/{job['id']}/cancel")
    api.until(job["id"], "cancelled")


def test_a_move_needs_another_node_that_is_there(api: Api) -> None:
    job = api.submit("sleep 60")
    api.until(job["id"], "running")
    assert api.post(f"/v1/jobs/{job['id']}/migrate", {"to": "nowhere"}).status == 404
    here = api.post(f"/v1/jobs/{job['id']}/migrate", {"to": "local"})
    assert (here.status, here.json["code"]) == (409, "conflict")
    assert api.post(f"/v1/jobs/{job['id']}/migrate", {"node": "local"}).status == 422
    api.post(f"/v1/jobs/{job['id']}/cancel")
    api.until(job["id"], "cancelled")


def test_why_is_told_with_numbers(api: Api) -> None:
    first, second = api.submit("sleep 60", workers=4), api.submit("sleep 60", workers=4)
    api.until(first["id"], "running")
    why = eventually(lambda: w if (w := api.get(f"/v1/jobs/{second['id']}/why").json)["reason"] != "new" else None)
    assert (why["job"], why["workers"], why["target"]) == (second["number"], 0, 0)
    assert why["text"]
    assert why["facts"]["devices_used"] == why["facts"]["devices_total"] == 4
    for job in (second, first):
        api.post(f"/v1/jobs/{job['id']}/cancel")
        api.until(job["id"], "cancelled")


@pytest.mark.parametrize("ref", ["0", "999999", "no-such-name", "9" * 30, "..", "-1", "%00", "x" * 3000])
def test_a_job_that_is_not_there(api: Api, ref: str) -> None:
    for method, path in (("GET", ""), ("GET", "/why"), ("GET", "/logs"), ("GET", "/events"), ("POST", "/cancel")):
        answer = api.ask(method, f"/v1/jobs/{ref}{path}")
        assert (answer.status, answer.json["code"]) == (404, "not-found")
