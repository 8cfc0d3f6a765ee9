"""What was learned of classes of jobs, what is expected of the next, and how it is forgotten."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from api_client import Api


def taught(api: Api, run: str, **fields: Any) -> str:
    """A class, by its command, of one job that has succeeded."""
    job = api.submit(run, **fields)
    assert api.until(job["id"], "succeeded", "failed")["phase"] == "succeeded"
    return run


@pytest.mark.parametrize("name", ["echo a/b", "echo 'ä ? # % &'", "echo //x//", "echo ../."])
def test_a_class_is_shown_and_forgotten(api: Api, name: str) -> None:
    taught(api, name, hyperparameters={"epochs": 3, "model": "small"})
    path = "/v1/classes/" + quote(name, safe="")
    found = api.get(path).json
    assert (found["name"], found["runs"], found["steps"], found["speeds"]) == (name, 1, None, [])
    (variant,) = found["variants"]
    assert variant["hyperparameters"] == {"epochs": 3.0, "model": "small"}
    assert 0 < variant["seconds"] == found["seconds"]
    listed = {one["name"]: one for one in api.get("/v1/classes", limit=1000).json["items"]}
    assert listed[name]["runs"] == 1
    assert "variants" not in listed[name]
    assert api.ask("DELETE", path).status == 204
    assert [api.ask(method, path).status for method in ("GET", "DELETE")] == [404, 404]
    assert name not in {one["name"] for one in api.get("/v1/classes", limit=1000).json["items"]}


def test_classes_come_in_pages(api: Api) -> None:
    names = [taught(api, f"echo page-{i}") for i in range(3)]
    first = api.get("/v1/classes", name="echo page-*", limit=2).json
    assert [one["name"] for one in first["items"]] == names[:2]
    rest = api.get("/v1/classes", name="echo page-*", limit=2, cursor=first["next"]).json
    assert ([one["name"] for one in rest["items"]], rest["next"]) == (names[2:], None)


def test_only_an_admin_forgets(api: Api, tokens: dict[str, str]) -> None:
    taught(api, "echo kept")
    for who in ("viewer", "user"):
        assert api.as_(tokens[who]).ask("DELETE", "/v1/classes/echo kept").status == 403
    assert api.as_(tokens["viewer"]).get("/v1/classes/echo kept").status == 200


def test_what_is_expected_of_the_next(api: Api) -> None:
    """A class whose jobs take as long as they have epochs."""
    run = 'sleep "$SECONDS_TO_SLEEP"'
    jobs = [
        api.submit(run, hyperparameters={"epochs": epochs}, env={"SECONDS_TO_SLEEP": str(0.4 * epochs)})
        for epochs in (1, 2, 4, 8)
    ]
    for job in jobs:
        api.until(job["id"], "succeeded")
    next_one = api.submit(run, hyperparameters={"epochs": 20}, env={"SECONDS_TO_SLEEP": "60"})
    told = next_one["expected"]
    assert (told["source"], told["runs"]) == ("class", 4)
    assert 4 < told["seconds"] < 16, "8 s by the law; 1 s is the middle of what was seen"
    assert "(4 earlier runs of its class)" in told["text"]
    running = api.until(next_one["id"], "running")
    assert 0 < running["eta_s"] < 20
    listed = next(one for one in api.get("/v1/jobs", phase="active").json["items"] if one["id"] == next_one["id"])
    assert listed["expected"]["source"] == "class"
    assert listed["expected"]["seconds"] == pytest.approx(told["seconds"], rel=0.3)


def test_a_hint_is_told_while_nothing_better_is_known(api: Api) -> None:
    job = api.submit("sleep 61", expect="2h", workers=2)
    assert (job["expected"]["source"], job["expected"]["seconds"]) == ("hint", pytest.approx(7200.0))
    assert api.submit("sleep 62")["expected"]["source"] == "unknown"
    ended = api.submit("echo hinted", expect="5000 steps")
    assert (ended["expected"]["source"], ended["expected"]["seconds"]) == ("hint", None)
    assert api.until(ended["id"], "succeeded")["expected"] is None
    answer = api.post("/v1/jobs", {"run": "true", "expect": "5000 stpes"})
    assert (answer.status, answer.json["problems"][0]["field"]) == (422, "expect")
