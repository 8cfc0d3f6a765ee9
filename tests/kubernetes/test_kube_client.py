"""The client: what goes over the wire, what is repeated and what is not, and the same verbs on a real API server."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from scripted_api import Asked, Reply, ScriptedApi, refusal

from stretto import errors
from stretto.errors import UsageError
from stretto.kubernetes import access, client, problems
from stretto.kubernetes.access import Access, ExecPlugin, TokenFile
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import (
    CONFIG_MAPS,
    HPAS,
    HPAS_BEFORE_1_23,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    Kind,
)
from stretto.kubernetes.model import Pod, PodSpec
from stretto.testing.kubernetes.control_plane import ControlPlane

PATIENCE_S = 60.0
POD = {"metadata": {"name": "p", "namespace": "x", "uid": "u", "resourceVersion": "7"}}
Story = Callable[[Api, ScriptedApi], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)


def play(script: Callable[[Asked, Reply], Awaitable[None]], story: Story, timeout_s: float = PATIENCE_S) -> None:
    async def run() -> None:
        server = ScriptedApi(script)
        async with asyncio.timeout(PATIENCE_S), server.serving() as where, Api(where, timeout_s=timeout_s) as api:
            await story(api, server)

    asyncio.run(run())


def always(content: Any, status: int = 200, **headers: str) -> Callable[[Asked, Reply], Awaitable[None]]:
    async def script(_: Asked, reply: Reply) -> None:
        reply.json(content, status, **headers)

    return script


def in_turn(*answers: Callable[[Asked, Reply], Awaitable[None]]) -> Callable[[Asked, Reply], Awaitable[None]]:
    """The first answer to the first request, and so on; the last one to all that follow."""
    left = list(answers)

    async def script(asked: Asked, reply: Reply) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(asked, reply)

    return script


async def cut(_: Asked, reply: Reply) -> None:
    reply.cut()


def test_requests_say_what_the_verbs_mean() -> None:
    async def story(api: Api, server: ScriptedApi) -> None:
        assert (await api.get(PODS, "p", "x")).metadata.uid == "u"
        await api.create(PODS, {"spec": {}}, "x")
        await api.patch(PODS, "p", {"a": 1}, "x", sub="status")
        await api.patch(PODS, "p", [{"op": "add"}], "x", how="json")
        await api.patch(PODS, "p", {"a": 1}, "x", how="apply", manager="stretto", force=True)
        await api.replace(PODS, "p", {"a": 1}, "x")
        await api.delete(PODS, "p", "x", grace_s=0, uid="u", propagation="Background")
        await api.bind("x", "p", "n1", "u")
        await api.get(NODES, "n/1")
        seen = [(one.method, one.path, one.query, one.headers.get("content-type", "")) for one in server.asked]
        pods = "/api/v1/namespaces/x/pods"
        assert seen == [
            ("GET", f"{pods}/p", {}, ""),
            ("POST", pods, {}, "application/json"),
            ("PATCH", f"{pods}/p/status", {}, "application/merge-patch+json"),
            ("PATCH", f"{pods}/p", {}, "application/json-patch+json"),
            ("PATCH", f"{pods}/p", {"fieldManager": "stretto", "force": "true"}, "application/apply-patch+yaml"),
            ("PUT", f"{pods}/p", {}, "application/json"),
            ("DELETE", f"{pods}/p", {}, "application/json"),
            ("POST", f"{pods}/p/binding", {}, "application/json"),
            ("GET", "/api/v1/nodes/n%2F1", {}, ""),
        ]
        assert json.loads(server.asked[6].body) == {
            "gracePeriodSeconds": 0,
            "propagationPolicy": "Background",
            "preconditions": {"uid": "u"},
        }
        assert json.loads(server.asked[7].body)["target"] == {"apiVersion": "v1", "kind": "Node", "name": "n1"}
        assert {one.headers["authorization"] for one in server.asked} == {"Bearer secret"}
        assert server.connections == 1

    play(always(POD), story)


def test_nothing_is_asked_of_all_objects_by_mistake() -> None:
    async def story(api: Api, server: ScriptedApi) -> None:
        with pytest.raises(ValueError, match="needs a name"):
            await api.delete(PODS, "", "x")
        with pytest.raises(ValueError, match="and a namespace"):
            await api.delete(PODS, "p")
        assert server.asked == []

    play(always(POD), story)


def test_a_list_is_read_page_by_page() -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        page = int(asked.query.get("continue", 0))
        more = str(page + 1) if page < 2 else ""
        item = {"metadata": {"name": f"p{page}"}}
        reply.json({"metadata": {"resourceVersion": "9", "continue": more}, "items": [item]})

    async def story(api: Api, server: ScriptedApi) -> None:
        listing = await api.list(PODS, "x", labels="a=b,c", fields="spec.nodeName=n", page=1)
        assert [pod.metadata.name for pod in listing.items] == ["p0", "p1", "p2"]
        assert listing.resource_version == "9"
        assert server.asked[1].query == {
            "labelSelector": "a=b,c", "fieldSelector": "spec.nodeName=n", "limit": "1", "continue": "1",
        }  # fmt: skip

    play(script, story)


def test_an_empty_list_may_be_null() -> None:
    async def story(api: Api, _: ScriptedApi) -> None:
        assert (await api.list(PODS)).items == []

    play(always({"metadata": {"resourceVersion": "1"}, "items": None}), story)


@pytest.mark.parametrize(
    ("code", "reason", "expected", "ours"),
    [
        (404, "NotFound", problems.ObjectNotFound, errors.NotFound),
        (409, "AlreadyExists", problems.AlreadyExists, errors.Conflict),
        (409, "Conflict", problems.ObjectConflict, errors.Conflict),
        (410, "Expired", problems.Gone, errors.Conflict),
        (410, "Gone", problems.Gone, errors.Conflict),
        (422, "Invalid", problems.Invalid, errors.UsageError),
        (400, "BadRequest", problems.Invalid, errors.UsageError),
        (401, "Unauthorized", problems.Refused, errors.Denied),
        (403, "Forbidden", problems.Refused, errors.Denied),
        (429, "TooManyRequests", problems.TooMany, errors.Unavailable),
        (500, "InternalError", problems.Unreachable, errors.Unavailable),
        (503, "ServiceUnavailable", problems.Unreachable, errors.Unavailable),
        (418, "Teapot", problems.ApiError, errors.StrettoError),
    ],
)
def test_every_refusal_is_an_error_of_ours(code: int, reason: str, expected: type, ours: type) -> None:
    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(errors.StrettoError) as caught:
            await api.create(PODS, {}, "x")
        assert type(caught.value) is expected
        assert isinstance(caught.value, ours)
        assert caught.value.exit_code == ours.exit_code  # type: ignore[attr-defined]

    play(always(refusal(code, reason), code), story)


def test_an_invalid_object_names_its_fields() -> None:
    answer = refusal(422, "Invalid", "spec is bad", causes=[{"field": "spec.min", "message": "must be positive"}])

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Invalid, match="spec is bad") as caught:
            await api.create(PODS, {}, "x")
        assert caught.value.causes == (("spec.min", "must be positive"),)

    play(always(answer, 422), story)


def test_a_refusal_that_is_not_json_is_told_as_it_came() -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.whole(b"upstream connect error", 503)

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable, match="upstream connect error"):
            await api.create(PODS, {}, "x")

    play(script, story)


def test_too_many_requests_are_repeated_whatever_they_were() -> None:
    busy = always(refusal(429, "TooManyRequests"), 429, Retry_After="1")

    async def story(api: Api, server: ScriptedApi) -> None:
        assert (await api.create(PODS, {}, "x")).metadata.name == "p"
        assert len(server.asked) == 3

    play(in_turn(busy, busy, always(POD)), story)


@pytest.mark.parametrize("trouble", [cut, always(refusal(500, "InternalError"), 500)])
def test_what_can_be_done_twice_is_repeated(trouble: Callable[[Asked, Reply], Awaitable[None]]) -> None:
    async def story(api: Api, server: ScriptedApi) -> None:
        await api.get(PODS, "p", "x")
        assert len(server.asked) == 2

    play(in_turn(trouble, always(POD)), story)


@pytest.mark.parametrize("trouble", [cut, always(refusal(500, "InternalError"), 500)])
@pytest.mark.parametrize(
    "act",
    [
        lambda api: api.create(PODS, {}, "x"),
        lambda api: api.bind("x", "p", "n"),
        lambda api: api.replace(PODS, "p", {}, "x"),
        lambda api: api.patch(PODS, "p", [{"op": "add"}], "x", how="json"),
        lambda api: api.patch(PODS, "p", {"metadata": {"resourceVersion": "7"}}, "x"),
        lambda api: api.delete(PODS, "p", "x"),
    ],
)
def test_what_cannot_is_not(
    trouble: Callable[[Asked, Reply], Awaitable[None]], act: Callable[[Api], Awaitable[Any]]
) -> None:
    async def story(api: Api, server: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable):
            await act(api)
        assert len(server.asked) == 1

    play(in_turn(trouble, always(POD)), story)


def test_a_server_that_never_answers_is_unreachable() -> None:
    async def script(_: Asked, __: Reply) -> None:
        await asyncio.Event().wait()

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable, match="no answer in time"):
            await api.create(PODS, {}, "x")

    play(script, story, timeout_s=0.05)


def test_nobody_there_is_unreachable() -> None:
    async def run() -> None:
        server = ScriptedApi(always(POD))
        async with server.serving() as where:
            pass
        async with Api(where) as api:
            with pytest.raises(problems.Unreachable, match="cannot reach http://127"):
                await api.create(PODS, {}, "x")

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"<html>", b"[1, 2", b'{"metadata": 3}'])
def test_an_answer_that_is_no_object_is_unreadable(body: bytes) -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.whole(body)

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreadable):
            await api.get(PODS, "p", "x")

    play(script, story)


def test_what_is_not_http_is_unreachable() -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.raw(b"220 mail.example ESMTP\r\n")

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable, match="not HTTP"):
            await api.create(PODS, {}, "x")

    play(script, story)


def test_a_request_that_was_given_up_does_not_mix_up_the_next() -> None:
    """Its answer comes late, on a connection that nobody uses any more."""
    release = asyncio.Event()

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.path.endswith("/slow"):
            await release.wait()
        reply.json({"metadata": {"name": asked.path.rpartition("/")[2]}})

    async def story(api: Api, server: ScriptedApi) -> None:
        slow = asyncio.create_task(api.get(PODS, "slow", "x"))
        while not server.asked:
            await asyncio.sleep(0)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        release.set()
        names = await asyncio.gather(*(api.get(PODS, f"p{i}", "x") for i in range(20)))
        assert [pod.metadata.name for pod in names] == [f"p{i}" for i in range(20)]

    play(script, story)


def test_no_more_connections_than_allowed() -> None:
    async def run() -> None:
        server = ScriptedApi(always(POD))
        async with server.serving() as where, Api(where, connections=3) as api:
            await asyncio.gather(*(api.get(PODS, "p", "x") for _ in range(50)))
        assert len(server.asked) == 50
        assert server.connections == 3

    asyncio.run(run())


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.json(POD, Connection="close")
        reply.hang_up()

    async def story(api: Api, server: ScriptedApi) -> None:
        for _ in range(3):
            await api.create(PODS, {}, "x")
        assert server.connections == 3

    play(script, story)


def test_a_log_comes_in_pieces_and_may_end_with_the_connection() -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        assert asked.query == {"container": "c", "tailLines": "5"}
        reply.raw(b"HTTP/1.1 200 OK\r\n\r\nhello ")
        reply.raw(b"world")
        reply.hang_up()

    async def story(api: Api, _: ScriptedApi) -> None:
        assert b"".join([piece async for piece in api.log("x", "p", "c", tail=5)]) == b"hello world"

    play(script, story)


def test_a_log_that_is_cut_short_is_told() -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.begin()
        reply.piece(b"hello ")
        await reply.sent()
        reply.hang_up()

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable):
            assert not [piece async for piece in api.log("x", "p")]

    play(script, story)


def test_a_large_stream_is_held_back_and_arrives_whole() -> None:
    block = bytes(range(256)) * 4096

    async def script(asked: Asked, reply: Reply) -> None:
        reply.begin()
        for _ in range(20):
            reply.piece(block)
            await reply.sent()
        reply.end()

    async def story(api: Api, _: ScriptedApi) -> None:
        assert b"".join([piece async for piece in api.log("x", "p")]) == block * 20

    play(script, story)


def test_a_watch_takes_lines_apart_however_they_come() -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        lines = [
            {"type": "ADDED", "object": POD},
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}},
            {"type": "DELETED", "object": {"metadata": {"name": "p", "resourceVersion": "9"}}},
        ]
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"type": "ADDED", "obj'
        reply.begin()
        for at in range(0, len(text), 7):
            reply.piece(text[at : at + 7])
            await reply.sent()
        reply.end()

    async def story(api: Api, server: ScriptedApi) -> None:
        events = [event async for event in api.watch(PODS, "x", resource_version="6", timeout_s=9)]
        assert [(event.type, event.resource_version) for event in events] == [
            ("ADDED", "7"),
            ("BOOKMARK", "8"),
            ("DELETED", "9"),
        ]
        assert events[1].object is None
        assert server.asked[0].query == {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "6", "timeoutSeconds": "9",
        }  # fmt: skip

    play(script, story)


def test_a_silent_watch_is_given_up() -> None:
    async def script(_: Asked, reply: Reply) -> None:
        reply.begin()
        await asyncio.Event().wait()

    async def story(api: Api, _: ScriptedApi) -> None:
        with pytest.raises(problems.Unreachable):
            assert not [event async for event in api.watch(PODS, quiet_s=0.05)]

    play(script, story)


def test_a_token_file_is_read_again_every_minute_and_after_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "token"
    now = datetime(2026, 1, 1, tzinfo=UTC)

    async def story() -> None:
        nonlocal now
        credentials = TokenFile(file, lambda: now)
        file.write_text("one\n")
        assert await credentials.header() == "Bearer one"
        file.write_text("two\n")
        assert await credentials.header() == "Bearer one"
        assert await credentials.renew()
        assert await credentials.header() == "Bearer two"
        assert not await credentials.renew()
        file.write_text("three")
        now += timedelta(minutes=1)
        assert await credentials.header() == "Bearer three"
        file.unlink()
        with pytest.raises(UsageError, match="cannot read the token file"):
            await credentials.renew()

    asyncio.run(story())


def test_a_refused_token_is_renewed_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.headers["authorization"] == "Bearer new":
            reply.json(POD)
        else:
            file.write_text("new")
            reply.json(refusal(401, "Unauthorized"), 401)

    async def run() -> None:
        server = ScriptedApi(script)
        async with server.serving() as where:
            where.credentials = TokenFile(file)
            async with Api(where) as api:
                await api.create(PODS, {}, "x")
                await api.create(PODS, {}, "x")
        assert len(server.asked) == 3

    asyncio.run(run())


def plugin(folder: Path, answer: str, code: int = 0) -> dict[str, Any]:
    """A credential plugin that counts how often it is asked."""
    script = folder / "plugin"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as calls: calls.write(os.environ['KUBERNETES_EXEC_INFO'] + '\\n')\n"
        f"print({answer!r}); print('no luck', file=sys.stderr); sys.exit({code})\n"
    )
    script.chmod(stat.S_IRWXU)
    return {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "installHint": "install it"}


def kubeconfig(folder: Path, user: dict[str, Any], name: str = "config", **cluster: Any) -> Path:
    file = folder / name
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


def header_of(found: Access) -> str:
    return asyncio.run(found.credentials.header())


@pytest.mark.parametrize(
    ("expires", "asked"), [("2099-01-01T00:00:00Z", 1), ("2000-01-01T00:00:00Z", 3)], ids=["valid", "expired"]
)
def test_a_credential_plugin_is_asked_when_its_answer_has_expired(tmp_path: Path, expires: str, asked: int) -> None:
    answer = json.dumps({"status": {"token": "t", "expirationTimestamp": expires}})
    found = access.find(path=kubeconfig(tmp_path, {"exec": plugin(tmp_path, answer)}))
    assert isinstance(found.credentials, ExecPlugin)
    assert [header_of(found) for _ in range(3)] == ["Bearer t"] * 3
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == asked
    assert json.loads(calls[0])["kind"] == "ExecCredential"


@pytest.mark.parametrize(
    ("answer", "code", "message"), [("", 3, "ended with 3: no luck"), ("hello", 0, "no ExecCredential")]
)
def test_a_credential_plugin_that_fails_says_how(tmp_path: Path, answer: str, code: int, message: str) -> None:
    found = access.find(path=kubeconfig(tmp_path, {"exec": plugin(tmp_path, answer, code)}))
    with pytest.raises(UsageError, match=message):
        header_of(found)


def test_kubeconfigs_are_merged_and_the_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = kubeconfig(tmp_path, {"token": "first"}, "one")
    two = kubeconfig(tmp_path, {"username": "me", "password": "pw"}, "two", server="http://other")
    content = yaml.safe_load(two.read_text())
    content["contexts"].append({"name": "d", "context": {"cluster": "k", "user": "v"}})
    content["users"].append({"name": "v", "user": {"username": "me", "password": "pw"}})
    two.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", f"{one}:{tmp_path / 'absent'}:{two}")
    found = access.find()
    assert (found.server, found.namespace, header_of(found)) == ("http://127.0.0.1:9", "team", "Bearer first")
    other = access.find("d")
    assert (other.server, other.namespace) == ("http://127.0.0.1:9", "default")
    assert header_of(other) == "Basic " + base64.b64encode(b"me:pw").decode()
    with pytest.raises(UsageError, match="no context 'e'"):
        access.find("e")


def test_a_pod_finds_its_own_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_ca: str) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    for name, content in (("token", "t\n"), ("namespace", "mine\n"), ("ca.crt", control_ca)):
        (tmp_path / name).write_text(content)
    assert access.in_a_pod(tmp_path)
    found = access.from_service_account(tmp_path)
    assert (found.server, found.namespace, header_of(found)) == ("https://[fd00::1]:6443", "mine", "Bearer t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no current context"),
        ("{", "cannot read the kubeconfig"),
        ("contexts: 3", "cannot read the kubeconfig"),
        ("current-context: c\ncontexts: [{name: c, context: {cluster: k}}]", "no cluster 'k'"),
        (
            "current-context: c\ncontexts: [{name: c, context: {cluster: k}}]\nclusters: [{name: k, cluster: {}}]",
            "no http",
        ),
    ],
)
def test_a_broken_kubeconfig_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        access.find(path=file)


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no Kubernetes cluster"):
        access.find()
    with pytest.raises(UsageError, match="no kubeconfig at"):
        access.find(path=tmp_path / "absent")


def test_a_proxy_is_asked_to_connect() -> None:
    """The tunnel ends at the server; a proxy that refuses is named."""

    async def run() -> None:
        server = ScriptedApi(always(POD))
        reached: list[str] = []
        ended = asyncio.Semaphore(0)

        async def proxied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split()
            reached.append(head[1])
            if len(reached) > 1:
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            else:
                host, _, port = head[1].rpartition(":")
                there, onwards = await asyncio.open_connection(host, int(port))
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await asyncio.gather(pump(reader, onwards), pump(there, writer))
            writer.close()
            await writer.wait_closed()
            ended.release()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await reader.read(4096):
                    writer.write(data)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        proxy = await asyncio.start_server(proxied, "127.0.0.1", 0)
        async with proxy, server.serving() as where:
            where.proxy = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            async with Api(where) as api:
                assert (await api.get(PODS, "p", "x")).metadata.name == "p"
            async with Api(where) as api:
                with pytest.raises(problems.Unreachable, match="403 Forbidden"):
                    await api.create(PODS, {}, "x")
            for _ in reached:
                await ended.acquire()
        assert reached[0] == where.server.removeprefix("http://")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"containers": [{"resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}] * 2},
            {"cpu": 200, "memory": 2048},
        ),
        (
            {
                "containers": [{"resources": {"requests": {"cpu": "1"}}}],
                "initContainers": [{"resources": {"requests": {"cpu": "3", "nvidia.com/gpu": "1"}}}],
            },
            {"cpu": 3000, "nvidia.com/gpu": 1},
        ),
        (
            {
                "containers": [{"resources": {"requests": {"cpu": "1"}}}],
                "initContainers": [
                    {"restartPolicy": "Always", "resources": {"requests": {"cpu": "2"}}},
                    {"resources": {"requests": {"cpu": "1500m"}}},
                ],
            },
            {"cpu": 3500},
        ),
        (
            {
                "containers": [{"resources": {"requests": {"cpu": "1", "memory": "1000000"}}}],
                "resources": {"requests": {"cpu": "5"}},
                "overhead": {"cpu": "250m"},
            },
            {"cpu": 5250, "memory": 1},
        ),
        ({"containers": [{}]}, {}),
    ],
)
def test_requests_are_counted_as_kube_scheduler_does(spec: dict[str, Any], expected: dict[str, int]) -> None:
    assert msgspec.convert(spec, PodSpec).requests == expected


@pytest.fixture(scope="session")
def control_ca() -> str:
    """Some certificate: the one Python trusts first."""
    import ssl

    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    return ssl.DER_cert_to_PEM_cert(found[0])


def on_cluster(where: Path, story: Callable[[Api], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), Api(access.find(path=where)) as api:
            await story(api)

    asyncio.run(run())


def a_pod(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app": "t"}},
        "spec": {"schedulerName": "stretto", "containers": [{"name": "c", "image": "x"}], **spec},
    }


@pytest.mark.cluster
def test_the_life_of_a_pod(control_plane: ControlPlane, namespace: str) -> None:
    async def story(api: Api) -> None:
        made = await api.create(PODS, a_pod("p"), namespace)
        assert made.metadata.key == (namespace, "p")
        assert not made.is_bound
        with pytest.raises(problems.AlreadyExists):
            await api.create(PODS, a_pod("p"), namespace)
        await api.bind(namespace, "p", "some-node", made.metadata.uid)
        with pytest.raises(problems.ObjectConflict, match="already assigned"):
            await api.bind(namespace, "p", "other-node")
        status = {
            "status": {"phase": "Running", "podIP": "10.9.8.7", "conditions": [{"type": "Ready", "status": "True"}]}
        }
        running = await api.patch(PODS, "p", status, namespace, how="strategic", sub="status")
        assert (running.spec.node_name, running.status.pod_ip, running.is_running) == ("some-node", "10.9.8.7", True)
        with pytest.raises(problems.ObjectConflict):
            await api.delete(PODS, "p", namespace, uid="another")
        with pytest.raises(problems.ObjectConflict):
            await api.patch(PODS, "p", {"metadata": {"resourceVersion": made.metadata.resource_version}}, namespace)
        await api.delete(PODS, "p", namespace, grace_s=30, uid=made.metadata.uid)
        assert (await api.get(PODS, "p", namespace)).metadata.is_leaving
        await api.delete(PODS, "p", namespace, grace_s=0, uid=made.metadata.uid)
        with pytest.raises(problems.ObjectNotFound):
            await api.get(PODS, "p", namespace)

    on_cluster(control_plane.kubeconfig, story)


@pytest.mark.cluster
def test_what_is_served_and_what_is_refused(control_plane: ControlPlane, namespace: str) -> None:
    async def story(api: Api) -> None:
        with pytest.raises(problems.Invalid) as caught:
            await api.create(PODS, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "No!"}]}}, namespace)
        assert "spec.containers[0].name" in [field for field, _ in caught.value.causes]
        with pytest.raises(problems.Invalid):
            await api.create(PODS, b"{", namespace)
        assert (await api.server_version()).git_version.startswith("v")
        assert await api.serves(PODS)
        assert not await api.serves(Kind("", "v1", "unicorns", Pod))
        assert not await api.serves(Kind("example.com", "v1", "unicorns", Pod))
        assert await api.serves(HPAS) or await api.serves(HPAS_BEFORE_1_23)

    async def stranger(api: Api) -> None:
        with pytest.raises(problems.Refused, match="cannot list resource"):
            await api.list(PODS)

    async def nobody(api: Api) -> None:
        with pytest.raises(problems.Refused, match="does not know us"):
            await api.list(PODS)

    on_cluster(control_plane.kubeconfig, story)
    on_cluster(control_plane.kubeconfig_as("stranger"), stranger)
    on_cluster(control_plane.kubeconfig_for("made-up", "nobody"), nobody)


@pytest.mark.cluster
def test_a_server_with_the_wrong_certificate_is_not_trusted(
    control_plane: ControlPlane, control_ca: str, tmp_path: Path
) -> None:
    content = json.loads(control_plane.kubeconfig.read_text())
    (tmp_path / "ca.crt").write_text(control_ca)
    content["clusters"][0]["cluster"]["certificate-authority"] = "ca.crt"
    config = tmp_path / "config"
    config.write_text(json.dumps(content))

    async def story(api: Api) -> None:
        with pytest.raises(problems.Unreachable, match="is not trusted"):
            await api.list(NODES)

    on_cluster(config, story)


@pytest.mark.cluster
def test_pages_selectors_and_fields(control_plane: ControlPlane, namespace: str) -> None:
    async def story(api: Api) -> None:
        await asyncio.gather(*(api.create(PODS, a_pod(f"p{i}"), namespace) for i in range(7)))
        await api.create(PODS, a_pod("bound", nodeName="n7"), namespace)
        everything = await api.list(PODS, namespace, page=2)
        assert sorted(pod.metadata.name for pod in everything.items) == ["bound", *(f"p{i}" for i in range(7))]
        on_n7 = await api.list(PODS, namespace, fields="spec.nodeName=n7")
        assert [pod.metadata.name for pod in on_n7.items] == ["bound"]
        assert (await api.list(PODS, namespace, labels="app!=t")).items == []
        # No kubelet will end it.
        await api.delete(PODS, "bound", namespace, grace_s=0)

    on_cluster(control_plane.kubeconfig, story)


@pytest.mark.cluster
def test_applying_replacing_and_other_kinds(control_plane: ControlPlane, namespace: str) -> None:
    async def story(api: Api) -> None:
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}}
        await api.patch(CONFIG_MAPS, "c", config, namespace, how="apply", manager="one")
        stolen = {**config, "data": {"a": "2"}}
        with pytest.raises(problems.ObjectConflict):
            await api.patch(CONFIG_MAPS, "c", stolen, namespace, how="apply", manager="two")
        await api.patch(CONFIG_MAPS, "c", stolen, namespace, how="apply", manager="two", force=True)
        read = await api.get(CONFIG_MAPS, "c", namespace)
        assert read["data"] == {"a": "2"}
        await api.replace(CONFIG_MAPS, "c", {**read, "data": {"b": "3"}}, namespace)
        with pytest.raises(problems.ObjectConflict):
            await api.replace(CONFIG_MAPS, "c", {**read, "data": {"b": "4"}}, namespace)
        secret = await api.create(SECRETS, {"metadata": {"name": "s"}, "stringData": {"k": "v"}}, namespace)
        assert base64.b64decode(secret["data"]["k"]) == b"v"
        await api.create(LEASES, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "me"}}, namespace)
        assert (await api.get(LEASES, "l", namespace)).spec.holder_identity == "me"
        assert (await api.get(NAMESPACES, namespace))["status"]["phase"] == "Active"
        with pytest.raises(problems.ObjectNotFound):
            await api.get(NODES, "nowhere")

    on_cluster(control_plane.kubeconfig, story)


@pytest.mark.cluster
def test_a_watch_tells_what_happens(control_plane: ControlPlane, namespace: str) -> None:
    async def story(api: Api) -> None:
        start = (await api.list(PODS, namespace)).resource_version
        stream = api.watch(PODS, namespace, resource_version=start)
        await api.create(PODS, a_pod("p"), namespace)
        await api.bind(namespace, "p", "n")
        await api.delete(PODS, "p", namespace, grace_s=0)
        seen: list[tuple[str, str]] = []
        async for event in stream:
            assert isinstance(event.object, Pod)
            seen.append((event.type, event.object.spec.node_name))
            if event.type == "DELETED":
                break
        await stream.aclose()
        assert (seen[0], seen[1], seen[-1]) == (("ADDED", ""), ("MODIFIED", "n"), ("DELETED", "n"))

    on_cluster(control_plane.kubeconfig, story)
