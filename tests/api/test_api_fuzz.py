"""Job files and questions that nobody means: whatever comes in, the answer is the sender's fault, and comes at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from typing import Any

import pytest
import yaml
from api_client import PATIENCE_S, Api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.spec import JobFile, load
from stretto.spec.document import MOST_CHARACTERS

N = MOST_CHARACTERS - 100
FIELDS = sorted([*JobFile.model_fields, "command", "none"])
SHORT = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip

ODD = {
    "hexadecimal": "priority: 0xffffffffffffffffffffffffffffffff",
    "a vast hexadecimal": "priority: 0x" + "f" * N,
    "a vast binary": "priority: 0b" + "1" * N,
    "sexagesimal": "priority: 59:59:59",
    "a vast sexagesimal": "priority: " + "59:" * (N // 3) + "59",
    "digits": "priority: " + "9" * N,
    "a float of digits": "deadline: " + "9" * N + ".0",
    "beyond 64 bits": "run: x\nhyperparameters: {a: 18446744073709551616}",
    "beyond 64 bits below 0": "run: x\nhyperparameters: {a: -9223372036854775809}",
    "nan": "run: x\ndeadline: .nan\nresources: {cpu: .inf, gpu: -.inf}\nhyperparameters: {a: .nan}",
    "tags": "priority: !!int ''\nretries: !!float ''\nname: !!timestamp x\nlevel: !!bool x\nrun: !!binary ü",
    "python": "run: !!python/object/apply:os.system ['true']",
    "dates": "run: x\nlabels: {a: 2001-01-01}\nhyperparameters: {a: 2001-02-30}\nname: 2001-01-01 00:00:00",
    "deep lists": "a: " + "[" * N,
    "deep mappings": "a: " + "{a: " * (N // 4),
    "deep blocks": "- " * (N // 2),
    "deep keys": "? " * (N // 2),
    "many values": "a: [" + "1," * (N // 2) + "]",
    "many quoted": "a: [" + '"a",' * (N // 4) + "]",
    "many aliases": "a: [&a b, " + "*a," * (N // 3) + "]",
    "aliases of aliases": "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)),
    "an alias of itself": "run: x\nhyperparameters: &a {b: *a}",
    "many fields": "".join(f"k{i}:\n" for i in range(9000)),
    "a field twice": "run: x\nrun: y",
    "many lines": "\n" * N + "ran: x",
    "a surrogate": 'run: "\\ud800"',
    "NUL": 'run: "a\\0b"\nname: "a\\0b"\nlabels: {a: "\\0"}',
    "a long key": "run: x\nlabels: {" + "k" * 60_000 + ": v}",
    "a long name": "run: x\nname: " + "n" * N,
    "many labels": "run: x\nlabels:\n" + "".join(f" k{i}: v\n" for i in range(9000)),
    "many variables": "run: x\nenv:\n" + "".join(f" K{i}: v\n" for i in range(8000)),
    "a long variable": "run: x\nenv: {A: " + "v" * 120_000 + "}",
    "a long command": "run: " + "x" * 120_000,
    "many dependencies": "run: x\nafter: [" + "a," * 9000 + "]",
    "many addresses": "run: x\nnotify: [" + "http://x/," * 9000 + "]",
    "many roles": "run: x\nroles:\n" + "".join(f" k{i}: {{}}\n" for i in range(5000)),
    "not YAML": ": : {[",
    "nothing": "",
    "a list": "- run: x",
}


def send(api: Api, text: str | bytes, kind: str = "application/yaml", path: str = "/v1/jobs?dry_run=true") -> Any:
    body = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return api.ask("POST", path, body, {"Content-Type": kind})


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_files_are_the_senders_fault(api: Api, text: str) -> None:
    for path in ("/v1/jobs?dry_run=true", "/v1/jobs"):
        answer = send(api, text, path=path)
        assert 400 <= answer.status < 500, answer.text
        assert answer.json["detail"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**30, 1e400, "1h", "4Gi", "0x10", "59:59", "\0", "\u2028"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
fields = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
snippets = st.lists(
    st.sampled_from(
        [
            *("run: x\n", "a: ", "- ", "? ", "[", "]", "{", "}", "&a ", "*a ", "!!int ", "!!float ", "!!timestamp "),
            *("!!set ", "| \n", "> \n", "'", '"', "<<: ", "\n", "  ", "\t", "0x", "59:", ".nan", "~", "\\ud800"),
            *("\\0", "--- ", "...", "%YAML 1.2\n", "labels: ", "env:\n", "elastic: {min: ", "deadline: ", "\x85"),
            *("\u2028", "\ufeff", "ü", "=", "hyperparameters: "),
        ]
    ),
    max_size=30,
).map("".join)  # fmt: skip


@SHORT
@given(st.data())
def test_no_body_is_a_mistake_of_ours(api: Api, data: st.DataObject) -> None:
    """Texts, and what a program might send, as YAML and as JSON."""
    given_fields = data.draw(fields)
    env = data.draw(st.dictionaries(st.text(), st.text()))
    bodies = [
        (yaml.safe_dump(given_fields).encode(), "application/yaml"),
        (json.dumps(given_fields).encode(), "application/json"),
        (json.dumps({"job": given_fields, "env": env}).encode(), "application/json"),
        (data.draw(snippets).encode(errors="replace"), "application/yaml"),
        (data.draw(st.binary(max_size=60)), data.draw(st.sampled_from(["application/yaml", "application/json"]))),
    ]
    with contextlib.closing(http.client.HTTPConnection(api.address, timeout=PATIENCE_S)) as connection:
        for body, kind in bodies:
            headers = {"Authorization": f"Bearer {api.token}", "Content-Type": kind}
            connection.request("POST", "/v1/jobs?dry_run=true", body, headers)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status in (200, 400, 409, 422), (body, said)
            assert json.loads(said)


@SHORT
@given(snippets | fields.map(yaml.safe_dump) | st.text(max_size=100))
def test_a_file_is_read_or_its_problems_are_told(text: str) -> None:
    with contextlib.suppress(SpecError):
        load(text + "\n")


@pytest.mark.parametrize(
    "query",
    [
        {"label": [f"k{i}=v" for i in range(70)]}, {"label": [f"k{i}=v" for i in range(1500)]}, {"name": "*a" * 20_000},
        {"name": "x" * 60_000}, {"user": "\0"}, {"cursor": "9" * 30}, {"cursor": "-1"}, {"limit": "1" * 30},
        {"phase": ["active"] * 500},
    ],
    ids=lambda query: f"{next(iter(query))} {str(next(iter(query.values())))[:12]}",
)  # fmt: skip
def test_what_no_database_takes_is_asked_of_none(api: Api, query: dict[str, Any]) -> None:
    assert api.get("/v1/jobs", **query).status in (200, 400, 422, 431)
    most = {"label": [f"k{i}=v" for i in range(16)], "phase": ["queued", "running", "failed", "cancelled", "succeeded"]}
    assert api.get("/v1/jobs", **most).status == 200


@pytest.mark.parametrize("name", ["x" * 5000 + ".py", "../" * 2000 + "x.py:y", "a\nb", "\u202e", "/dev/zero.py", "\0"])
def test_no_name_of_a_policy_is_a_mistake_of_ours(api: Api, name: str) -> None:
    assert api.send("PUT", "/v1/policy", {"name": name}).status in (400, 422)


def test_others_are_answered_while_a_file_is_read(api: Api) -> None:
    """The event loop does not read it: others come by as often as they ask, not once for each file."""
    read = 0

    def count() -> None:
        nonlocal read
        for _ in range(3):
            assert send(api, ODD["many quoted"]).status == 422
            read += 1

    reading = threading.Thread(target=count)
    reading.start()
    answered = 0
    while reading.is_alive():
        assert api.get("/healthz").status == 200
        answered += 1
    reading.join()
    assert read == 3
    assert answered > 30, answered
