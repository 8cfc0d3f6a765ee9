"""History, and the stream that goes on from it without a gap."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

from api_client import Api, eventually

from stretto.jobs.events import Noted, Recorded
from stretto.server.plane import Watch


@contextlib.contextmanager
def stream(api: Api, last: int | None = None, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a live stream, each as its fields; comments are skipped."""
    connection = http.client.HTTPConnection(api.address, timeout=30)
    headers = {"Authorization": f"Bearer {api.token}"}
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    connection.request("GET", f"/v1/events/stream{query}", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.readline().startswith(b"retry:")

    def read() -> Iterator[dict[str, Any]]:
        fields: dict[str, str] = {}
        while line := answer.readline().decode():
            name, colon, value = line.rstrip("\n").partition(": ")
            if colon and name:
                fields[name] = value
            elif "data" in fields:
                event = json.loads(fields["data"])
                assert (int(fields["id"]), fields["event"]) == (event["seq"], event["event"]["kind"])
                yield event
                fields = {}

    try:
        yield read()
    finally:
        connection.close()


def take(events: Iterator[dict[str, Any]], job: str, kind: str) -> list[dict[str, Any]]:
    """All up to this one."""
    found = []
    for event in events:
        found.append(event)
        if event["job"] == int(job) and event["event"]["kind"] == kind:
            return found
    raise AssertionError("the stream ended")


def test_history_tells_a_job_from_its_beginning_to_its_end(api: Api) -> None:
    job = api.submit("true")
    api.until(job["id"], "succeeded")
    items = api.get(f"/v1/jobs/{job['id']}/events").json["items"]
    kinds = [item["event"]["kind"] for item in items]
    assert kinds[0] == "submitted"
    assert kinds[-1] == "ended"
    assert {"launched", "running", "exited"} <= set(kinds)
    assert items[0]["event"]["job"]["name"] == job["name"]


def test_history_in_pages(api: Api) -> None:
    job = api.submit("true")
    api.until(job["id"], "succeeded")
    path = f"/v1/jobs/{job['id']}/events"
    whole = [item["seq"] for item in api.get(path).json["items"]]
    for order, cursor, expected in (("oldest", "after", whole), ("newest", "before", whole[::-1])):
        found: list[int] = []
        query: dict[str, Any] = {"limit": 2, "order": order}
        while True:
            page = api.get(path, **query).json
            found += [item["seq"] for item in page["items"]]
            if page["next"] is None:
                break
            query[cursor] = page["next"]
        assert found == expected


def test_a_stream_goes_on_where_it_was_cut(api: Api) -> None:
    """Again and again, while jobs come and go: the pieces are the history, nothing twice, nothing missing."""
    start = api.get("/v1/events", order="newest", limit=1).json["items"][0]["seq"]
    done = threading.Event()
    jobs: list[str] = []

    def busy() -> None:
        jobs.extend(api.submit("true")["id"] for _ in range(12))
        done.set()

    thread = threading.Thread(target=busy)
    thread.start()
    seen: list[int] = []
    while not done.is_set():
        with stream(api, seen[-1] if seen else start) as events:
            for event, _ in zip(events, range(3), strict=False):
                seen.append(event["seq"])
    thread.join()
    for job in jobs:
        api.until(job, "succeeded")
    last = api.get("/v1/events", order="newest", limit=1).json["items"][0]["seq"]
    with stream(api, seen[-1]) as events:
        while seen[-1] < last:
            seen.append(next(events)["seq"])
    assert seen == list(range(start + 1, seen[-1] + 1))


def test_a_stream_of_one_job(api: Api) -> None:
    other, job = api.submit("true"), api.submit("sleep 60")
    with stream(api, 0, f"?job={job['id']}") as events:
        api.post(f"/v1/jobs/{job['id']}/cancel")
        found = take(events, job["id"], "ended")
    assert {event["job"] for event in found} == {job["number"]}
    assert [event["seq"] for event in found] == [
        item["seq"] for item in api.get(f"/v1/jobs/{job['id']}/events").json["items"]
    ]
    api.until(other["id"], "succeeded")


def test_a_stream_begins_now_if_nothing_else_is_said(api: Api) -> None:
    before = api.submit("true")
    api.until(before["id"], "succeeded")
    with stream(api) as events:
        eventually(lambda: _listeners(api) >= 1)
        job = api.submit("true")
        found = take(events, job["id"], "ended")
    assert before["number"] not in {event["job"] for event in found}
    assert found[0]["event"]["kind"] == "submitted"


def test_many_listen_and_all_hear_the_same(api: Api) -> None:
    with contextlib.ExitStack() as stack:
        start = api.get("/v1/events", order="newest", limit=1).json["items"][0]["seq"]
        streams = [stack.enter_context(stream(api, start)) for _ in range(20)]
        job = api.submit("true")
        heard = [[event["seq"] for event in take(events, job["id"], "ended")] for events in streams]
    assert heard[0] == list(range(start + 1, heard[0][-1] + 1))
    assert all(one == heard[0] for one in heard)
    # Who hangs up is forgotten.
    eventually(lambda: _listeners(api) == 0)


def _listeners(api: Api) -> float:
    lines = api.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("stretto_listeners ")))


def test_who_falls_far_behind_is_cut_off() -> None:
    """And hears first what had come until then."""
    watches: set[Watch] = set()
    slow, quick = Watch(watches), Watch(watches)

    async def watch() -> None:
        for seq in range(1, 10_002):
            for one in list(watches):
                one.put(Recorded(seq=seq, at_s=0.0, job=None, event=Noted(what="x")))
            assert [recorded.seq for recorded in await quick.some()] == [seq]
        assert watches == {quick}
        assert [recorded.seq for recorded in await slow.some()] == list(range(1, 10_001))
        assert await slow.some() == []
        assert await slow.some() == []

    asyncio.run(watch())
