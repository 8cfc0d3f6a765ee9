"""Only under its own names, and nothing is changed for a page of somebody else's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from api_client import Api, api_of, options, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from stretto.api.hosts import Hosts, names
from stretto.api.process import serve
from stretto.errors import StrettoError, UsageError


@pytest.mark.parametrize(
    ("listens", "known", "unknown"),
    [
        (
            "127.0.0.1",
            ["127.0.0.1", "127.0.0.1:8470", "localhost", "LOCALHOST:1", "localhost.", "[::1]:80", "a.localhost"],
            ["", "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost:x", "127.0.0.1@evil", "[::1", "a b"],
        ),
        ("::1", ["[::1]:8470", "localhost"], ["evil.example", "[::2]"]),
        ("10.1.2.3", ["10.1.2.3", "10.1.2.3:80", "localhost", "gpu.lab", "GPU.lab.:80"], ["evil.example", "10.1.2.4"]),
        ("0.0.0.0", ["10.1.2.3", "127.0.0.1", "[fe80::1]", "gpu.lab"], ["evil.example"]),
    ],
)  # fmt: skip
def test_which_names_are_its_own(listens: str, known: list[str], unknown: list[str]) -> None:
    hosts = Hosts(listens, names(["gpu.lab"]))
    assert [host for host in known if not hosts.knows(host)] == []
    assert [host for host in unknown if hosts.knows(host)] == []


@pytest.mark.parametrize("name", ["http://x", "x/y", "", "x:80", "ü"])
def test_what_is_no_name_is_said(name: str) -> None:
    with pytest.raises(UsageError):
        names([name])


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/metrics", "/nothing"])
def test_another_name_is_not_answered(api: Api, path: str) -> None:
    """Not even where no token is needed."""
    for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
        answer = api.ask("GET", path, headers={"Host": host})
        assert (answer.status, answer.json["code"]) == (421, "misdirected")
        assert "--allow-host" in answer.json["hint"]


def test_a_page_of_somebody_elses_changes_nothing(api: Api) -> None:
    own = f"http://{api.address}"
    others = ["http://evil.example", "null", "", "file://", f"{own}.evil.example", "http://127.0.0.1:1", "http://[x"]
    for origin in others:
        assert api.send("POST", "/v1/jobs", {"run": "true"}, {"Origin": origin}).status == 403
        assert api.ask("DELETE", "/v1/tokens/none", headers={"Origin": origin}).status == 403
        assert api.ask("GET", "/v1/jobs", headers={"Origin": origin}).status == 200
    assert api.get("/v1/jobs", phase="active").json["items"] == []
    assert api.send("POST", "/v1/jobs", {"run": "true"}, {"Origin": own}).status == 201


def test_a_page_of_somebody_elses_opens_no_websocket(api: Api) -> None:
    job = api.submit("true")
    token = {"Authorization": f"Bearer {api.token}"}
    for path in (f"/v1/jobs/{job['id']}/logs/follow", f"/v1/jobs/{job['id']}/join"):
        with pytest.raises(InvalidStatus) as refused:
            connect(api.websocket(path), additional_headers=token, origin=Origin("http://evil.example"))
        assert refused.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://evil.example{path}", sock=connected(api), additional_headers=token)
        assert refused.value.response.status_code == 421
    own = Origin(f"http://{api.address}")
    with connect(api.websocket(f"/v1/jobs/{job['id']}/logs/follow"), additional_headers=token, origin=own) as following:
        assert following.recv(timeout=30)


def connected(api: Api) -> socket.socket:
    host, _, port = api.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_beyond_this_machine_only_if_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(StrettoError) as refused:
        serve(options(tmp_path, host="0.0.0.0"), detach=True)
    assert refused.value.code == "usage"
    assert "--insecure" in refused.value.hint
    with serving(tmp_path, host="0.0.0.0", insecure=True, hosts=("gpu.lab",)) as api:
        assert api.ask("GET", "/v1/jobs", headers={"Host": "gpu.lab:80"}).status == 200
        assert api.ask("GET", "/v1/jobs", headers={"Host": "evil.example"}).status == 421
        assert api_of(tmp_path).get("/readyz").status == 200
