"""YAML with line numbers: a text becomes plain values, and every value knows its line.

Only what a job file needs is accepted: one document of plain mappings, lists and scalars, no key twice, no tags, no
merge keys, and no more values than a person would write (an alias inside an alias inside an alias … is refused).
They are counted while it is read, so that reading ends at the first value too many.
Texts of environment variables are kept as they were written: `LR: 1e-3` is "1e-3", `DEBUG: yes` is "yes".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import yaml

from stretto.errors import Problem

Path: TypeAlias = tuple[str | int, ...]

MOST_CHARACTERS = 2**17
_MOST_VALUES = 10_000
_DEEPEST = 50
_LONGEST_NUMBER = 1000
"""Characters. A number of more digits is nobody's, costs the square of its length, and cannot even be shown."""
_LARGEST = 2**4096
"""Beyond it a whole number cannot even be shown."""
_PLAIN = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
_TOO_MUCH = "has too many values, or they are nested too deep"
_TOO_LARGE = "is a number too large for anything here; put it in quotes if it is a text"


class Document(NamedTuple):
    """The values, the line of every field, and what is wrong with it as YAML."""

    values: Any
    lines: dict[Path, int]
    problems: tuple[Problem, ...] = ()


class Unreadable(Exception):
    """The text is not a job file at all."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def read(text: str) -> Document:
    """Values and lines, or `Unreadable`."""
    if len(text) > MOST_CHARACTERS:
        raise Unreadable(Problem(0, "", f"is longer than {MOST_CHARACTERS} characters; a job file is a page at most"))
    try:
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax(error) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(
            Problem(line, "", f"has a character that YAML does not allow: {_code(error.character)}")
        ) from None
    except RecursionError:
        raise Unreadable(Problem(0, "", "is nested too deep")) from None
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(Problem(0, "", f"is not YAML: {error}")) from None
    if root is None:
        raise Unreadable(Problem(0, "", "is empty; write at least `run: COMMAND`"))
    if not isinstance(root, yaml.MappingNode):
        raise Unreadable(Problem(_line(root), "", "is not a list of fields; write `field: value`, one to a line"))
    return _Reader().document(root)


def check_size(values: Any) -> None:
    """The same bounds for what was no YAML: raises `Unreadable`."""
    waiting: list[tuple[Any, Path]] = [(values, ())]
    count = 0
    while waiting:
        value, path = waiting.pop()
        count += 1
        if count > _MOST_VALUES or len(path) > _DEEPEST:
            raise Unreadable(Problem(0, "", _TOO_MUCH))
        if isinstance(value, Mapping):
            waiting += [(child, (*path, str(key))) for key, child in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(child, (*path, i)) for i, child in enumerate(value)]
        elif isinstance(value, int) and abs(value) > _LARGEST:
            raise Unreadable(Problem(0, dotted(path), _TOO_LARGE))


class _Composer(yaml.SafeLoader):
    """Stops at the first value too many, and before it is nested deeper than anybody means."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._count += 1
        # A field is a key and a value.
        if self._count > 2 * _MOST_VALUES or self._depth > _DEEPEST:
            raise Unreadable(Problem(int(self.get_mark().line) + 1, "", _TOO_MUCH))
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Reader:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.count = 0
        self.loader = yaml.SafeLoader("")

    def document(self, root: yaml.Node) -> Document:
        self.lines[()] = _line(root)
        values = self.value(root, ())
        return Document(values, self.lines, tuple(self.problems))

    def wrong(self, node: yaml.Node, path: Path, text: str) -> None:
        self.problems.append(Problem(_line(node), dotted(path), text))

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > _MOST_VALUES or len(path) > _DEEPEST:
            raise Unreadable(Problem(_line(node), "", _TOO_MUCH))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in _PLAIN:
            self.wrong(node, path, f"has the tag {node.tag!r}; write a plain value")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.item(child, (*path, i)) for i, child in enumerate(node.value)]
        return self.mapping(node, path)

    def item(self, node: yaml.Node, path: Path) -> Any:
        self.lines[path] = _line(node)
        return self.value(node, path)

    def mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, child in node.value:
            name = self.key(key, path)
            if name is None:
                continue
            here = (*path, name)
            if name in values:
                self.wrong(key, here, f"is given twice, first in line {self.lines[here]}; keep one")
                continue
            self.lines[here] = _line(key)
            values[name] = self.value(child, here)
        return values

    def key(self, node: yaml.Node, path: Path) -> str | None:
        if node.tag == _MERGE:
            self.wrong(node, path, "uses a merge key (<<); write the fields out")
        elif not isinstance(node, yaml.ScalarNode):
            self.wrong(node, path, "has a field whose name is not a word")
        else:
            return str(node.value)
        return None

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if len(path) == 2 and path[0] == "env":
            return str(node.value)
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            self.wrong(node, path, _TOO_LARGE)
            return None
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
            # What a tag promises is taken on trust there: `!!int ""` has no first character.
            self.wrong(node, path, "has a value that YAML cannot read; put it in quotes")
            return None


def _syntax(error: yaml.MarkedYAMLError) -> Unreadable:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "it is not YAML"
    if "'\\t'" in what:
        what = "a tab; indent with spaces"
    elif "but found another document" in what:
        what = "a second document; give every job a file of its own"
    return Unreadable(Problem(mark.line + 1 if mark else 0, "", f"is not YAML: {what}"))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _code(character: Any) -> str:
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


def dotted(path: Path) -> str:
    """A field as people write it: `resources.gpu`."""
    return ".".join(str(part) for part in path)
