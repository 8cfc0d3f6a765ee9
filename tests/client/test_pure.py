"""The client without a server: what it sends, how it reads, what it remembers, where it looks."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto import errors
from stretto.client import AsyncClient, Client, Job, calls, surroundings
from stretto.client.documents import Page
from stretto.client.finding import find
from stretto.client.problems import closed_early, error_of
from stretto.client.streams import Feed, Log, Patience
from stretto.errors import Problem, SpecError, Unavailable, UsageError


def sent(call: calls.Call[Job]) -> dict[str, object]:
    return json.loads(call.body or b"")


def test_submit_sends_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text("run: a # why\n")
    body = sent(calls.submit(path))
    assert body["job"] == "run: a # why\n"
    assert body["cwd"] == str(tmp_path)
    assert body["env"] == surroundings.captured()
    assert sent(calls.submit("job.yaml"))["job"] == "run: a # why\n"
    assert sent(calls.submit("run: b"))["job"] == "run: b"
    assert sent(calls.submit({"run": "c"}, env={"A": "1"}, cwd="sub")) == {
        "job": {"run": "c"},
        "env": {"A": "1"},
        "cwd": str(tmp_path / "sub"),
    }


def test_every_submission_has_a_key_of_its_own() -> None:
    first, second = calls.submit({"run": "a"}), calls.submit({"run": "a"})
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]
    assert calls.submit({"run": "a"}, key="k").headers["Idempotency-Key"] == "k"
    assert first.safe


def test_files_that_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        calls.submit(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff")
    with pytest.raises(SpecError, match="byte 0 is not UTF-8"):
        calls.submit(tmp_path / "binary.yaml")
    with pytest.raises(UsageError, match="JSON"):
        calls.submit({"run": object()})


def test_only_calls_that_may_be_repeated_are_safe() -> None:
    assert all(call.safe for call in (calls.job(1), calls.nodes(), calls.dry_run({"run": "a"})))
    unsafe = (calls.wish(1, "cancel"), calls.scale(1, 1, 2), calls.set_policy("a", {}, None), calls.revoke_token("a"))
    assert not any(call.safe for call in unsafe)


def test_force_and_patience_are_sent_only_where_they_are_asked_for() -> None:
    assert (calls.wish(1, "suspend").body, calls.wish(1, "suspend", force=True).body) == (b"{}", b'{"force": true}')
    assert calls.scale(1, 1, 2, force=True).body == b'{"min": 1, "max": 2, "force": true}'
    assert calls.migrate(1, "n", force=True).body == b'{"to": "n", "force": true}'
    assert (calls.drain("n", "drain").body, calls.drain("n", "drain", 0.0).body) == (b"{}", b'{"within_s": 0.0}')


def test_names_cannot_leave_their_place() -> None:
    assert calls.job("a/../b?c").path == "/v1/jobs/a%2F..%2Fb%3Fc"
    assert calls.drain("n 1", "drain").path == "/v1/nodes/n%201/drain"
    for name in ("", ".", ".."):
        with pytest.raises(UsageError):
            calls.job(name)


def test_queries() -> None:
    call = calls.jobs(phase=["queued", "running"], labels={"team": "a b"}, user="ann", limit=5)
    assert call.target == "/v1/jobs?phase=queued&phase=running&label=team%3Da+b&user=ann&order=newest&limit=5"
    assert calls.logs(Job(id="3"), None, 0).target == "/v1/jobs/3/logs?tail=0"


def test_pages_stop_at_the_limit_or_the_end() -> None:
    pages = calls.Pages(1500, phase="active")
    first = pages.next_call()
    assert first is not None
    assert ("limit", "1000") in first.query
    assert len(pages.took(Page([Job()] * 1000, "c1"))) == 1000
    second = pages.next_call()
    assert second is not None
    assert {("limit", "500"), ("cursor", "c1")} <= set(second.query)
    pages.took(Page([Job()] * 500, "c2"))
    assert pages.next_call() is None
    unbounded = calls.Pages(None)
    unbounded.took(Page([], None))
    assert unbounded.next_call() is None


def test_documents_read_as_attributes_and_stay_mappings() -> None:
    job = Job(id="3", phase="failed", new_field=1)
    assert (job.ended, job.succeeded, job.id, job.new_field) == (True, False, "3", 1)
    assert json.loads(json.dumps(job)) == {"id": "3", "phase": "failed", "new_field": 1}
    with pytest.raises(AttributeError, match="this job has no field 'colour'"):
        _ = job.colour


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (404, {"code": "not-found", "detail": "no", "hint": "look"}, errors.NotFound, "not-found"),
        (422, {"code": "impossible", "detail": "no"}, errors.Impossible, "impossible"),
        (401, {"code": "unauthenticated", "detail": "no"}, errors.Denied, "unauthenticated"),
        (503, {"code": "store-full", "detail": "no"}, errors.Unavailable, "store-full"),
        (409, {"code": "never-heard-of", "detail": "no"}, errors.Conflict, "never-heard-of"),
        (500, {"code": "internal", "detail": "no"}, errors.StrettoError, "internal"),
    ],
)
def test_errors_come_back_as_what_they_were(
    status: int, body: dict[str, str], kind: type[errors.StrettoError], code: str
) -> None:
    error = error_of(status, json.dumps(body).encode())
    assert isinstance(error, kind)
    assert (error.code, error.message, error.hint) == (code, "no", body.get("hint", ""))


def test_problems_of_a_job_file_come_back() -> None:
    told = {"code": "spec", "detail": "job file: bad", "problems": [{"line": 2, "field": "run", "text": "is missing"}]}
    error = error_of(422, json.dumps(told).encode())
    assert isinstance(error, SpecError)
    assert error.problems == (Problem(2, "run", "is missing"),)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff", b'{"problems": 3}'])
def test_answers_that_are_no_problem_documents(body: bytes) -> None:
    error = error_of(502, body)
    assert isinstance(error, Unavailable)
    assert "502" in error.message


def test_sockets_that_were_closed() -> None:
    class Frame:
        code, reason = 1008, "no"

    assert isinstance(closed_early(Frame()), errors.Denied)
    assert isinstance(closed_early(None), Unavailable)


def event(seq: int) -> str:
    return json.dumps({"seq": seq, "at_s": 0.0, "job": 1, "event": {"kind": "noted", "what": "x"}})


def test_a_feed_knows_where_to_go_on() -> None:
    feed = Feed()
    lines = ["retry: 1000", "", ": still here", "", "id: 7", "event: noted", f"data: {event(7)}", ""]
    found = [told for line in lines if (told := feed.line(line)) is not None]
    assert [told.seq for told in found] == [7]
    assert feed.last == 7
    assert feed.line(f"data: {event(8)}") is None
    feed.broken()
    assert feed.line("") is None, "half an event is none"
    for line in (f"data: {event(7)}", "", f"data:{event(8)}"):
        assert feed.line(line) is None, "7 was there before"
    told = feed.line("")
    assert told is not None
    assert told.seq == 8
    assert told.kind == "noted"


def piece(offset: int, text: str, worker: str = "w0") -> str:
    return json.dumps({"worker": worker, "offset": offset, "text": text})


def test_a_log_does_not_repeat_itself_after_a_new_connection() -> None:
    log = Log()
    assert log.message(piece(0, "äb\n")) == ("w0", "äb\n")
    assert log.message(piece(3, "x")) == ("w0", "x"), "the server's offsets are right, our lengths are guesses"
    log.broken()
    assert log.message(piece(0, "äb")) is None
    assert log.message(piece(3, "xyz")) == ("w0", "yz")
    assert log.message(piece(0, "new", "w1")) == ("w1", "new")
    assert log.message('{"end": "succeeded"}') is None
    assert log.ended


def test_patience_ends() -> None:
    now = [0.0]
    patience, error = Patience(1.0, lambda: now[0]), Unavailable("away")
    assert [patience.failed(error) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    patience.worked()
    assert patience.failed(error) == 0.1
    now[0] = 1.0
    with pytest.raises(Unavailable, match="away"):
        patience.failed(error)


def test_where_the_server_is(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no server is known") as caught:
        find(environment={"STRETTO_HOME": str(tmp_path)})
    assert "stretto up" in caught.value.hint
    (tmp_path / "server.json").write_text('{"url": "http://127.0.0.1:5/", "pid": 1}')
    (tmp_path / "token").write_text("local\n")
    here = {"STRETTO_HOME": str(tmp_path)}
    assert find(environment=here) == ("http://127.0.0.1:5", "local")
    assert find(environment={**here, "STRETTO_TOKEN": "mine"}) == ("http://127.0.0.1:5", "mine")
    elsewhere = {**here, "STRETTO_SERVER": "https://a.example"}
    assert find(environment=elsewhere) == ("https://a.example", ""), "the local token stays here"
    assert find(data=tmp_path, environment={"STRETTO_SERVER": "https://a.example"}).url == "http://127.0.0.1:5"
    assert find("http://127.0.0.1:5/", "t", environment=elsewhere) == ("http://127.0.0.1:5", "t")
    for url in ("127.0.0.1:5", "ftp://a", "http://"):
        with pytest.raises(UsageError, match="not the address"):
            find(url, environment=here)


def test_only_what_a_job_needs_is_taken_along() -> None:
    assert surroundings.captured({"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/h"}) == {
        "PATH": "/bin",
        "HOME": "/h",
    }


def test_the_two_clients_are_alike() -> None:
    def names(method: Callable[..., object]) -> Iterator[str]:
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                (options,) = typing.get_args(typing.get_type_hints(method)[parameter.name])
                yield from typing.get_type_hints(options)
            else:
                yield parameter.name

    def methods(kind: type) -> dict[str, set[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: set(names(method)) for name, method in found if not name.startswith("_")}

    assert methods(Client) == methods(AsyncClient)
    assert "submit" in methods(Client)
