"""Which ElasticJob is which job of the book: numbers inside, objects outside, and what pods are made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stretto.kubernetes.keeping import Card
from stretto.kubernetes.model import ElasticJob, PodSpec
from stretto.spec.model import JobFile

Key = tuple[str, str]


class Entry(msgspec.Struct, kw_only=True):
    """One job that has not ended."""

    number: int
    object: ElasticJob
    file: JobFile
    template: dict[str, Any]
    """Metadata and spec of its worker pods."""
    shape: PodSpec
    """The same as the cluster reads it."""
    requests: dict[str, int]
    """What one takes of its node."""
    card: Card
    mistake: str = ""
    """What is wrong with what its object says by now; it goes on as it was."""

    @property
    def key(self) -> Key:
        return self.object.metadata.key

    @property
    def namespace(self) -> str:
        return self.object.metadata.namespace

    @property
    def name(self) -> str:
        return self.object.metadata.name


class Register:
    def __init__(self) -> None:
        self._by_number: dict[int, Entry] = {}
        self._by_key: dict[Key, Entry] = {}
        self.aside: dict[Key, int | None] = {}
        """Jobs with pods that could not be adopted: these are left alone. With the generation of the object that cannot
        be understood; None: something else was wrong, which may pass."""

    def add(self, entry: Entry) -> None:
        self._by_number[entry.number] = self._by_key[entry.key] = entry

    def remove(self, number: int) -> Entry | None:
        entry = self._by_number.pop(number, None)
        if entry is not None and self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        return entry

    def of(self, key: Key) -> Entry | None:
        return self._by_key.get(key)

    def __getitem__(self, number: int) -> Entry:
        return self._by_number[number]

    def get(self, number: int) -> Entry | None:
        return self._by_number.get(number)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)
