"""Logs: whole, in parts, from the end, while they grow; and nothing but logs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_client import Api, eventually
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stretto.api import logs
from stretto.backends.local.supervisor import punch
from stretto.errors import NotFound, UsageError

TEXT = "zwölf Boxkämpfer: 🥊🥊\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "jobs" / "7" / "logs"
    made.mkdir(parents=True)
    return made


def log_folder(folder: Path) -> logs.LogFolder:
    return logs.LogFolder(folder.parents[2], folder)


def pieces(path: Path, limit: int, final: bool = True) -> Iterator[logs.Text]:
    fd = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        while (text := logs.read(fd, offset, limit, final=final)).text:
            yield text
            offset = text.next
    finally:
        os.close(fd)


@pytest.mark.parametrize("limit", range(4, 30))
def test_no_character_is_cut(folder: Path, limit: int) -> None:
    path = folder / "w0.log"
    path.write_text(TEXT * 5)
    found = list(pieces(path, limit))
    assert "".join(one.text for one in found) == TEXT * 5
    assert [one.offset for one in found[1:]] == [one.next for one in found[:-1]]


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_bytes_that_are_no_text_are_replaced_and_never_stop_it(folder: Path, limit: int) -> None:
    path = folder / "w0.log"
    path.write_bytes(b"a\xff\xfeb\xf0\x9f" + b"\x80" * 5 + b"c\xe2\x82")
    found = list(pieces(path, limit))
    assert found[-1].next == path.stat().st_size
    assert [char for one in found for char in one.text if char.isascii()] == ["a", "b", "c"]


def test_half_a_character_waits_for_its_other_half(folder: Path) -> None:
    path = folder / "w0.log"
    path.write_bytes("ab🥊".encode()[:4])
    assert [one.text for one in pieces(path, 100, final=False)] == ["ab"]
    path.write_bytes("ab🥊".encode())
    assert [one.text for one in pieces(path, 100, final=False)] == ["ab🥊"]


def test_what_was_given_up_is_skipped(folder: Path) -> None:
    path = folder / "w0.log"
    lines = [f"line {number} ü\n" for number in range(20_000)]
    path.write_text("".join(lines))
    fd = os.open(path, os.O_RDWR)
    try:
        if not punch(fd, 65536):
            pytest.skip("this file system has no holes")
        first = logs.start(fd)
        assert first == 65536
        text = logs.read(fd, 0, 2**20, final=True)
        assert text.offset in range(65536, 65540)
        assert "\0" not in text.text
        assert "".join(lines).endswith(text.text)
        assert logs.read(fd, logs.tail_offset(fd, 2), 2**20, final=True).text == "".join(lines[-2:])
        assert logs.tail_offset(fd, 10**6) == first
        assert punch(fd, path.stat().st_size + 4096)
        assert logs.read(fd, 0, 100, final=True).text == ""
    finally:
        os.close(fd)


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 4, 100])
@pytest.mark.parametrize("contents", ["", "a", "a\n", "a\nb\nc", "a\nb\nc\n", "\n\n\n", "x" * 200_000 + "\nb\n"])
def test_tails_are_those_of_tail(folder: Path, lines: int, contents: str) -> None:
    path = folder / "w0.log"
    path.write_text(contents)
    fd = os.open(path, os.O_RDONLY)
    try:
        found = logs.read(fd, logs.tail_offset(fd, lines), 2**20, final=True).text
    finally:
        os.close(fd)
    assert found == "".join(contents.splitlines(keepends=True)[-lines:] if lines else [])


@pytest.mark.parametrize("name", ["..", "../w0", "/etc/passwd", "w0.log", "", "w0\0", "a/b", "w" * 65, "."])
def test_names_that_are_none(folder: Path, name: str) -> None:
    with pytest.raises(UsageError):
        log_folder(folder).open(name)


def test_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "w1.log").symlink_to(tmp_path / "secret")
    (folder / "w2.log").mkdir()
    os.mkfifo(folder / "w3.log")
    for name in ("w1", "w2", "w3"):
        with pytest.raises(NotFound):
            log_folder(folder).open(name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w0.log").write_text("secret")
    (folder.parent / "logs").rename(folder.parent / "before")
    (folder.parent / "logs").symlink_to(elsewhere)
    with pytest.raises(NotFound):
        log_folder(folder).open("w0")
    assert log_folder(folder).workers() == []


def test_workers_are_listed_in_order(folder: Path) -> None:
    for name in ("w10.log", "w2.log", "w0.log", "notes.txt", ".w1.log"):
        (folder / name).touch()
    assert log_folder(folder).workers() == ["w0", "w2", "w10"]


# Over the wire.


def test_parts_of_a_log(api: Api) -> None:
    job = api.submit("seq 1 5")
    api.until(job["id"], "succeeded")
    path = f"/v1/jobs/{job['id']}/logs"
    assert api.get(path).text == "1\n2\n3\n4\n5\n"
    assert api.get(path, tail=2).text == "4\n5\n"
    answer = api.get(path, worker="w0", offset=4, limit=2)
    assert (answer.text, answer.headers["Log-Offset"], answer.headers["Log-Next"]) == ("3\n", "4", "6")
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert api.get(path, worker="w0", offset=10**6).text == ""
    assert api.get(path, worker="w0", limit=4).text == "4\n5\n"


def test_workers_have_headings_when_there_are_several(api: Api) -> None:
    job = api.submit("echo $RANK", workers=2)
    api.until(job["id"], "succeeded")
    assert api.get(f"/v1/jobs/{job['id']}/logs").text == "==> w0 <==\n0\n\n==> w1 <==\n1\n"


@pytest.mark.parametrize(
    ("query", "status"),
    [("worker=w9", 404), ("worker=../w0", 422), ("worker=..%2F..%2F..%2Ftoken", 422), ("worker=%00", 422),
     ("worker=", 422), ("tail=-1", 422), ("offset=3", 422), ("worker=w0&offset=1&tail=1", 422), ("limit=0", 422)],
)  # fmt: skip
def test_bad_questions(api: Api, query: str, status: int) -> None:
    job = api.submit("true")
    api.until(job["id"], "succeeded")
    assert api.get(f"/v1/jobs/{job['id']}/logs?{query}").status == status


def test_links_in_a_job_folder_lead_nowhere(api: Api, data: Path) -> None:
    job = api.submit("ln -s $STRETTO_TEST_SECRET ../logs-link; true")
    api.until(job["id"], "succeeded")
    (data / "records" / job["id"] / "logs" / "w7.log").symlink_to(data / "token")
    assert api.get(f"/v1/jobs/{job['id']}/logs", worker="w7").status == 404
    assert api.token not in api.get(f"/v1/jobs/{job['id']}/logs").text  # type: ignore[operator]


def follow(api: Api, job: str, query: str = "") -> ClientConnection:
    return connect(
        api.websocket(f"/v1/jobs/{job}/logs/follow{query}"),
        additional_headers={"Authorization": f"Bearer {api.token}"},
    )


def messages(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    while True:
        yield json.loads(socket.recv(timeout=30))


def test_a_log_is_followed_until_the_job_ends(api: Api, tmp_path: Path) -> None:
    job = api.submit(
        f"echo one; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo two; printf 'drei \\303'; printf '\\274'"
    )
    text = ""
    with follow(api, job["id"]) as socket:
        for message in messages(socket):
            if "end" in message:
                assert message == {"end": "succeeded"}
                break
            assert message["offset"] == len(text.encode())
            text += message["text"]
            if text == "one\n":
                (tmp_path / "go").touch()
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
    assert text == "one\ntwo\ndrei ü"


def test_following_can_begin_with_the_tail(api: Api) -> None:
    job = api.submit("seq 1 100; echo err >&2")
    api.until(job["id"], "succeeded")
    with follow(api, job["id"], "?worker=w0&tail=2") as socket:
        assert list(_until_end(socket)) == ["100\nerr\n"]
    with follow(api, job["id"]) as socket:
        assert "".join(_until_end(socket)) == "".join(f"{n}\n" for n in range(1, 101)) + "err\n"


def test_following_a_job_that_waits(api: Api) -> None:
    blocker = api.submit("sleep 60", workers=4)
    api.until(blocker["id"], "running")
    job = api.submit("echo at last")
    with follow(api, job["id"]) as socket:
        api.post(f"/v1/jobs/{blocker['id']}/cancel")
        assert "".join(_until_end(socket)) == "at last\n"
    api.until(blocker["id"], "cancelled")


def test_a_follower_who_leaves_is_forgotten(api: Api) -> None:
    job = api.submit("echo x; sleep 60")
    before = _descriptors(api)
    with contextlib.ExitStack() as stack:
        for socket in [stack.enter_context(follow(api, job["id"])) for _ in range(5)]:
            assert json.loads(socket.recv(timeout=30))["text"] == "x\n"
        assert _descriptors(api) > before
    api.post(f"/v1/jobs/{job['id']}/cancel")
    api.until(job["id"], "cancelled")
    eventually(lambda: _descriptors(api) <= before)


@pytest.mark.parametrize(("query", "status"), [("?worker=../w0", 422), ("?tail=x", 422), ("?worker=%00", 422)])
def test_bad_questions_of_followers(api: Api, query: str, status: int) -> None:
    job = api.submit("true")
    with pytest.raises(InvalidStatus) as refused:
        follow(api, job["id"], query).__enter__()
    assert refused.value.response.status_code == status
    with pytest.raises(InvalidStatus) as refused:
        follow(api, "no-such-job").__enter__()
    assert refused.value.response.status_code == 404


def _until_end(socket: ClientConnection) -> Iterator[str]:
    for message in messages(socket):
        if "end" in message:
            return
        yield message["text"]


def _descriptors(api: Api) -> float:
    lines = api.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("process_open_fds ")))
