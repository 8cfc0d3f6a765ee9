"""Lists of jobs: filters against the obvious way, pages that nothing shifts, and an index for each question."""

from __future__ import annotations

import re
from typing import Any

import pytest
from histories import after, job, life
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import File, Opener, Place, Schema
from sqlalchemy import text

from stretto.jobs.model import Job
from stretto.store import Query, Store, reading

# Text that means something to SQL, to patterns, or sorts oddly.
NAMES = (
    "train",
    "train-1",
    "train_1",
    "Train",
    "tr%in",
    "tr[a]in",
    "a\\b",
    "é",
    "\ud7ffx",
    "\U0010ffff",
    "x\U0010ffff",
)
PATTERNS = (
    *NAMES,
    "*",
    "tr*",
    "train?1",
    "*1",
    "tr[*",
    "tr%*",
    "train_*",
    "?",
    "\ud7ff*",
    "\U0010ffff*",
    "x\U0010ffff*",
    "A\\*",
)
USERS, QUEUES, LEVELS = ("ada", "bob", "o'hara"), ("default", "night"), ("elastic", "rigid")
LABELS = ({}, {"team": "a"}, {"team": "b"}, {"team": "a", "exp": "1"}, {"team": "b", "exp": "1"})
PHASES = ("queued", "running", "suspended", "succeeded", "failed", "cancelled")

queries = st.fixed_dictionaries(
    {},
    optional={
        "phases": st.lists(st.sampled_from(PHASES), max_size=4).map(tuple),
        "name": st.sampled_from(PATTERNS),
        "user": st.sampled_from(USERS),
        "queue": st.sampled_from(QUEUES),
        "level": st.sampled_from(LEVELS),
        "labels": st.sampled_from(LABELS),
        "oldest_first": st.booleans(),
    },
)


def some_job(number: int) -> Job:
    return job(
        number,
        name=NAMES[number % len(NAMES)],
        user=USERS[number // 2 % 3],
        queue=QUEUES[number // 3 % 2],
        level=LEVELS[number // 5 % 2],
        labels=LABELS[number // 7 % len(LABELS)],
    )


def add(store: Store, numbers: range) -> list[Job]:
    lives = [life(some_job(number), seed=number, ends=number % 3 == 0) for number in numbers]
    for future in [store.append(entries) for entries in lives]:
        future.result(60)
    return [after(entries) for entries in lives]


def matches(found: Job, query: Query) -> bool:
    pattern = None if query.name is None else re.escape(query.name).replace(r"\*", ".*").replace(r"\?", ".")
    return (
        (not query.phases or found.phase in query.phases)
        and (pattern is None or re.fullmatch(pattern, found.name, re.DOTALL) is not None)
        and query.user in (None, found.user)
        and query.queue in (None, found.spec["queue"])
        and query.level in (None, found.level)
        and query.labels.items() <= found.spec["labels"].items()
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=queries, spare=st.integers(-20, 2) | st.integers(-1, 1))
def check_against_the_obvious_way(store: Store, known: list[Job], asked: dict[str, Any], spare: int) -> None:
    """`spare`: so much more room than there are matches, for it is where a page is just full that it goes wrong."""
    wanted = [each for each in known if matches(each, Query(**asked))]
    limit = max(1, len(wanted) + spare)
    query = Query(**asked, limit=limit)
    wanted = wanted if query.oldest_first else wanted[::-1]
    page = store.jobs(query)
    assert page.items == wanted[:limit]
    assert page.next == (wanted[limit - 1].number if len(wanted) > limit else None)


def test_filters(store: Store) -> None:
    known = add(store, range(1, 121))
    check_against_the_obvious_way(store, known)


@pytest.mark.parametrize("oldest_first", [False, True])
def test_nothing_shifts_while_jobs_are_added(store: Store, oldest_first: bool) -> None:
    known = add(store, range(1, 31))
    added = 30

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(asked=queries, limit=st.integers(1, 7), growth=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def check(asked: dict[str, Any], limit: int, growth: list[int]) -> None:
        nonlocal added
        given_up_front = Query(**{**asked, "oldest_first": oldest_first}, limit=limit)
        there = [each.number for each in known if matches(each, given_up_front)]
        seen: list[int] = []
        page, turn = store.jobs(given_up_front), 0
        while True:
            seen += [each.number for each in page.items]
            if page.next is None:
                break
            more = growth[turn % len(growth)] if turn < 6 else 0
            known.extend(add(store, range(added + 1, added + 1 + more)))
            added, turn = added + more, turn + 1
            page = store.jobs(Query(**{**asked, "oldest_first": oldest_first}, limit=limit, after=page.next))
        assert seen == sorted(set(seen), reverse=not oldest_first)
        if oldest_first:
            # Those that came meanwhile are at the end, so they are met.
            assert seen == [each.number for each in known if matches(each, given_up_front)][: len(seen)]
            assert set(there) <= set(seen)
        else:
            assert seen == there[::-1]

    check()


QUESTIONS: list[dict[str, Any]] = [
    {"phases": ("queued",)},
    {"phases": ("queued", "failed")},
    {"name": "train"},
    {"name": "tra*"},
    {"user": "ada"},
    {"queue": "night"},
    {"level": "rigid"},
    {"labels": {"team": "a"}},
    {"labels": {"team": "a", "exp": "1"}},
    {"phases": ("queued",), "user": "ada", "labels": {"team": "a"}},
]


@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
@pytest.mark.parametrize("after_number", [None, 50])
def test_sqlite_answers_from_an_index(
    file: File, opened: Opener, asked: dict[str, Any], after_number: int | None
) -> None:
    plan = _plan(file, opened, "EXPLAIN QUERY PLAN", Query(**asked, after=after_number))
    steps = [step for step in plan if re.search(r"\b(jobs|label\d)\b", step)]
    assert steps
    assert not [step for step in steps if step.startswith("SCAN")]
    assert any(re.search(r"USING (COVERING )?INDEX jobs_by_|label\d USING PRIMARY KEY", step) for step in steps)


@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
def test_postgresql_answers_from_an_index(schema: Schema, opened: Opener, asked: dict[str, Any]) -> None:
    plan = _plan(schema, opened, "EXPLAIN", Query(**asked))
    assert not [step for step in plan if "Seq Scan" in step]
    assert [step for step in plan if "jobs_by_" in step or "labels_" in step]


def _plan(place: Place, opened: Opener, explain: str, query: Query) -> list[str]:
    store = opened(place)
    add(store, range(1, 101))
    with store._database.reader.connect() as connection:
        if explain == "EXPLAIN":
            # A small table is read as a whole otherwise, and rightly so.
            connection.execute(text("SET enable_seqscan = off"))
        compiled = reading.listing(query, 101, connection.dialect.name).compile(
            dialect=connection.dialect, compile_kwargs={"literal_binds": True}
        )
        return [str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {compiled}")]
