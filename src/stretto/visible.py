"""Texts of others on the way to a person: what a terminal would obey, or hide, is shown instead.

A job's name, label, message or log is written by whoever submitted it, and read at somebody else's terminal. Control
characters (C0, DEL, C1) move its cursor, change its title or answer in its name; marks of direction, and characters of
no width, let a text look like another one; separators of lines make two of one. Each is replaced by how Python writes
it, `\\x1b` or `\\u202e`, in one place: `Guarded` stands before standard output and standard error. What we draw
ourselves is written to the stream behind it (`behind`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
"""All but the end of a line and the tabulator."""
_ENDS = str.maketrans({"\n": "\\n", "\t": "\\t"})
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")
_PLAIN = "\x1b[0m"


def visible(text: str) -> str:
    """With nothing in it but what is seen, and lines."""
    return _UNSEEN.sub(_written, text)


def in_line(text: str) -> str:
    """The same on one line: a part of a sentence, a cell of a table."""
    return visible(text).translate(_ENDS)


def in_all(value: Any) -> Any:
    """The same for every text of a document."""
    if isinstance(value, str):
        return in_line(value)
    if isinstance(value, dict):
        return {in_all(key): in_all(each) for key, each in value.items()}
    return [in_all(each) for each in value] if isinstance(value, (list, tuple)) else value


def as_json(document: str) -> str:
    """JSON that says the same without those characters."""
    return _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], document)


class Coloured:
    """A log, piece by piece: colours (SGR) and the return that progress bars begin a line with stay, all else is shown.
    What may be the beginning of a colour waits for its end."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_colours = False

    def add(self, text: str) -> str:
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished else ""
        return self._shown(text.removesuffix(self._rest))

    def rest(self) -> str:
        """At the end; what comes next has its usual colours."""
        left, self._rest = visible(self._rest), ""
        return left + (_PLAIN if self._has_colours else "")

    def _shown(self, text: str) -> str:
        colours = _COLOUR.findall(text)
        self._has_colours = self._has_colours or bool(colours)
        parts = ["\r".join(map(visible, part.split("\r"))) for part in _COLOUR.split(text)]
        return parts[0] + "".join(colour + part for colour, part in zip(colours, parts[1:], strict=True))


class Guarded:
    """A stream of text that lets nothing through but what is seen."""

    def __init__(self, stream: TextIO) -> None:
        self.behind = stream
        self.rich_proxied_file = stream
        """What rich draws is its own; texts that it draws are made visible before."""

    def write(self, text: str) -> int:
        self.behind.write(visible(text))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def behind(stream: TextIO) -> TextIO:
    """For what we draw ourselves."""
    return stream.behind if isinstance(stream, Guarded) else stream


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
