"""What a terminal would obey or hide is seen instead; nothing else changes."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from stretto.api.process import LogFormatter
from stretto.visible import Coloured, Guarded, as_json, in_all, in_line, visible

HOSTILE = "\x1b]0;title\x07 \x9b31m \x7f \u202eevil\u2066 a\u200bb \u2028 \ufeff \x08 \r \x0b \x0c \x85 \U000e0041"
KEPT = {"\n", "\t"}


SEEN = ("ARABIC", "SYRIAC", "KAITHI", "EGYPTIAN", "SHORTHAND", "MUSICAL")
"""Scripts with signs that Unicode calls format characters, and that are drawn or only draw what is around them."""


def hides(character: str) -> bool:
    """Control and format characters, separators of lines and paragraphs."""
    if unicodedata.category(character) == "Cf" and unicodedata.name(character, "").startswith(SEEN):
        return character == "\u061c"
    return unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp")


@given(st.text(st.characters(codec="utf-8") | st.sampled_from(HOSTILE)))
def test_nothing_is_left_that_is_not_seen(text: str) -> None:
    shown = visible(text)
    assert not {one for one in shown if hides(one)} - KEPT
    assert "\n" not in in_line(text)
    assert visible(shown) == shown
    assert json.loads(as_json(json.dumps([text], ensure_ascii=False))) == [text]


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\u115f\u1160\u3164\uffa0")))
def test_what_is_seen_stays_as_it_is(text: str) -> None:
    assert visible(text) == in_line(text) == text
    assert in_all({text: [text, 1, None]}) == {text: [text, 1, None]}


def test_it_is_written_as_python_writes_it() -> None:
    assert visible("\x1b[2J\u202e\r\x9b") == "\\x1b[2J\\u202e\\r\\x9b"
    assert in_line("a\nb\tc") == "a\\nb\\tc"


@given(st.text(st.sampled_from("\x1b[0;31mK\r\x07ab\n")), st.integers(1, 5))
def test_a_log_keeps_its_colours_wherever_it_is_cut(text: str, size: int) -> None:
    def shown(pieces: list[str]) -> str:
        log = Coloured()
        return "".join([*(log.add(piece) for piece in pieces), log.rest()])

    whole = shown([text])
    assert shown([text[at : at + size] for at in range(0, len(text), size)]) == whole
    assert "\x07" not in whole
    assert all(part[:1] == "[" and part.lstrip("[0123456789;").startswith("m") for part in whole.split("\x1b")[1:])


def test_colours_end_with_the_log() -> None:
    log = Coloured()
    assert log.add("\x1b[31mred\x1b[2J") + log.rest() == "\x1b[31mred\\x1b[2J\x1b[0m"


def test_a_stream_lets_nothing_through() -> None:
    stream = io.StringIO()
    print(HOSTILE, file=cast(io.StringIO, Guarded(stream)))
    assert stream.getvalue() == visible(HOSTILE) + "\n"


def test_nobodys_text_begins_a_line_of_our_log() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 1, "job %s", ("x\n2026 ERROR forged\x1b[2J",), None)
    assert LogFormatter("%(message)s").format(record) == "job x\n    2026 ERROR forged\\x1b[2J"
