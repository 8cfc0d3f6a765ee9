"""What goes over the wire comes out as it was, or is refused with a reason."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.messages import (
    KINDS,
    LARGEST,
    Heartbeat,
    Message,
    MessageError,
    Peer,
    Switch,
    Window,
    decode,
    encode,
)

messages = st.sampled_from(sorted(KINDS.values(), key=lambda kind: kind.__name__)).flatmap(st.from_type)


def finite(message: Message) -> bool:
    """What is neither nan nor larger than anything that is counted."""
    fields = dataclasses.asdict(message)
    columns = (fields, fields.get("metrics", {}), *fields.get("windows", ()))
    values = [value for given in columns for value in given.values() if isinstance(value, int | float)]
    values += [value for epoch in fields.get("epochs", ()) for value in epoch]
    return all(value == value and (isinstance(value, float) or abs(value) <= LARGEST) for value in values)


@given(message=messages.filter(finite))
def test_there_and_back(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_newer_peer_may_say_more() -> None:
    text = json.dumps(
        {"kind": "switch", "generation": 3, "members": [{"worker": "a", "address": "x:1", "gpu": 2}], "more": 1}
    )
    assert decode(text) == Switch(generation=3, members=(Peer(worker="a", address="x:1"),))


def test_whole_numbers_are_numbers() -> None:
    beat = decode('{"kind": "heartbeat", "generation": 1, "loop": 0, "step": 2, "applied": 2, "metrics": {"loss": 1}}')
    assert isinstance(beat, Heartbeat)
    assert beat.metrics == {"loss": 1.0}


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63])
def test_nobody_counts_further_than_can_be_reckoned_with(number: int) -> None:
    given_fields = {"kind": "heartbeat", "generation": 1, "loop": 0, "step": number, "applied": 2, "total": number}
    window = {"number": 1, "generation": 1, "members": 2, "count": number, "median_s": number, "spread_s": 0}
    told = {**given_fields, "metrics": {"loss": number}, "paused_s": number, "windows": [{**window, "lasted_s": 9}]}
    beat = decode(json.dumps(told))
    assert isinstance(beat, Heartbeat)
    most = LARGEST if number > 0 else -LARGEST
    assert (beat.step, beat.total, beat.paused_s, beat.metrics) == (most, most, most, {"loss": most})
    assert (beat.windows[0].count, beat.windows[0].median_s) == (most, most)


def test_a_worker_of_an_older_version_tells_no_windows_and_an_older_server_passes_over_them() -> None:
    old = decode('{"kind": "heartbeat", "generation": 1, "loop": 0, "step": 2, "applied": 2}')
    assert isinstance(old, Heartbeat)
    assert old.windows == ()
    window = {"number": 1, "generation": 1, "members": 2, "count": 8, "median_s": 1, "spread_s": 0, "lasted_s": 9}
    new = decode(json.dumps({**json.loads(encode(old)), "windows": [{**window, "loss": 0.5}]}))
    assert isinstance(new, Heartbeat)
    assert new.windows == (
        Window(
            number=1, generation=1, members=2, count=8, median_s=1.0, spread_s=0.0, lasted_s=9.0, age_s=0.0,
            mean_s=0.0, slow=0, slow_s=0.0,
        ),
    )  # fmt: skip
    assert dataclasses.replace(new, windows=()) == old


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"kind": "dance"}', "unknown kind 'dance'"),
        ('{"generation": 1}', "unknown kind None"),
        ('{"kind": "formed", "generation": 1}', "Formed.applied is missing"),
        ('{"kind": "formed", "generation": "1", "applied": 2}', "Formed.generation: expected int, got str"),
        ('{"kind": "formed", "generation": true, "applied": 2}', "expected int, got bool"),
        ('{"kind": "switch", "generation": 1, "members": [{"worker": "a"}]}', "Peer.address is missing"),
        ('{"kind": "switch", "generation": 1, "members": 7}', "Switch.members"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode(text)


@given(message=messages.filter(finite), data=st.data())
def test_no_field_can_be_left_out_or_changed_in_kind(message: Message, data: st.DataObject) -> None:
    given_fields = json.loads(encode(message))
    required = [
        column.name
        for column in dataclasses.fields(message)
        if column.default is dataclasses.MISSING and column.default_factory is dataclasses.MISSING
    ]
    if not required:
        return
    name = data.draw(st.sampled_from(required))
    for wrong in ({k: v for k, v in given_fields.items() if k != name}, {**given_fields, name: {"no": [None]}}):
        with pytest.raises(MessageError, match=name):
            decode(json.dumps(wrong))
