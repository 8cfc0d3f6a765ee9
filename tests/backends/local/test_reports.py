"""What comes through the pipe of a supervisor is a report, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.backends.local.backend import _line

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pid", "refused", "x"]), inner),
    max_leaves=10,
)


def heard(said: bytes) -> dict[str, object]:
    out, into = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(out, False)

    def say() -> None:
        rest = memoryview(said)
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(into, rest) :]
        os.close(into)

    async def hear() -> dict[str, object]:
        async with asyncio.timeout(20.0):
            return await _line(out)

    speaking = threading.Thread(target=say)
    speaking.start()
    try:
        return asyncio.run(hear())
    finally:
        speaking.join()


@settings(max_examples=60)
@given(st.binary(max_size=100) | JUNK.map(lambda junk: json.dumps(junk).encode()), st.booleans())
def test_whatever_it_says(said: bytes, ends: bool) -> None:
    words = heard(said + b"\n" * ends)
    assert type(words.get("pid", 0)) is int
    assert isinstance(words.get("refused", ""), str)


def test_a_report_is_one() -> None:
    assert heard(b'{"pid": 12}\n') == {"pid": 12}
    assert heard(b'{"refused": "no such program"}\n') == {"refused": "no such program"}


@pytest.mark.parametrize("said", [b"", b"[" * 60_000 + b"\n", b"x" * (1 << 22), b'{"pid": "1"}\n', b'{"refused": 3}\n'])
def test_what_is_none_is_nothing(said: bytes) -> None:
    assert heard(said) == {}
