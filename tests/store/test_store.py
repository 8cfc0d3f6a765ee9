"""What every store promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from histories import after, entry, follow, job, life, submission
from places import Clock, Opener, Place

from stretto.jobs import events as e
from stretto.jobs.lifecycle import apply
from stretto.store import Entry, Query, Refused, Stale, Store, StoreClosed, StoreError, StoreLocked, Taken, Token

DONE_S = 60.0


def done(future: Future[Any]) -> Any:
    return future.result(DONE_S)


def test_a_new_store_is_empty(store: Store) -> None:
    known = store.load()
    assert (known.jobs, known.settings, known.learned, known.next_number, known.last_seq) == ([], {}, {}, 1, 0)
    assert store.jobs(Query()).items == []
    assert (store.job(1), store.latest("x"), store.submitted_with("ada", "k")) == (None, None, None)
    assert store.verify() == []


def test_what_is_durable_is_found_by_the_next_server(place: Place, opened: Opener) -> None:
    store = opened(place)
    lives = [life(job(number), seed=number, ends=number % 2 == 0) for number in range(1, 41)]
    futures = [store.append(entries) for entries in lives]
    done(store.put_setting("policy", {"name": "srtf", "options": [1, 2.5, None]}))
    done(store.put_learned("resnet", b"\x00\xff curve"))
    done(store.put_learned("bert / large", b"1"))
    done(store.forget_learned("bert / large"))
    done(store.forget_learned("never heard of"))
    seqs = [seq for future in futures for seq in done(future)]
    assert seqs == list(range(1, len(seqs) + 1))
    store.close()

    store = opened(place)
    known = store.load()
    assert known.jobs == [after(entries) for entries in lives if not after(entries).ended]
    assert known.settings == {"policy": {"name": "srtf", "options": [1, 2.5, None]}}
    assert known.learned == {"resnet": b"\x00\xff curve"}
    assert (known.next_number, known.last_seq) == (41, len(seqs))
    assert [store.job(number) for number in range(1, 41)] == [after(entries) for entries in lives]
    told = store.events(limit=10_000)
    assert [(each.at_s, each.event) for each in told] == [(x.at_s, x.event) for entries in lives for x in entries]
    assert store.verify() == []


def test_a_setting_is_replaced(store: Store) -> None:
    for value in (1, [2], "three"):
        done(store.put_setting("k", value))
    assert store.load().settings == {"k": "three"}
    with pytest.raises(Refused):
        done(store.put_setting("k", object()))


def test_events_of_one_job_and_in_both_directions(store: Store) -> None:
    first, second = job(1), job(2)
    wish = e.Wished(wish="suspend", by="ada")
    done(store.append([submission(first), submission(second), *follow(first, wish), *follow(second, wish)]))
    done(store.append([Entry(5000.0, e.Noted(what="policy", by="root", data={"to": "fifo"}), None)]))
    assert [each.seq for each in store.events()] == [1, 2, 3, 4, 5]
    assert [each.seq for each in store.events(after=1, limit=2)] == [2, 3]
    assert [each.seq for each in store.events(newest_first=True, limit=2)] == [5, 4]
    assert [each.seq for each in store.events(newest_first=True, limit=2, before=4)] == [3, 2]
    assert [each.seq for each in store.events(job=2)] == [2, 4]
    assert [each.seq for each in store.events(job=2, after=2)] == [4]
    assert store.events(after=4)[0] == e.Recorded(
        seq=5, at_s=5000.0, job=None, event=e.Noted(what="policy", by="root", data={"to": "fifo"})
    )


def test_the_latest_of_a_name(store: Store) -> None:
    done(store.append([submission(job(number, name=name)) for number, name in ((1, "a"), (2, "b"), (3, "a"))]))
    found = store.latest("a")
    assert found is not None
    assert found.number == 3


def test_an_idempotency_key_belongs_to_its_user_and_job(store: Store) -> None:
    first = job(1)
    done(store.append([submission(first, "key", "digest")]))
    done(store.append([submission(job(2, user="bob"), "key", "other")]))
    assert store.submitted_with("ada", "key") == (first, "digest")
    assert store.submitted_with("ada", "another") is None
    with pytest.raises(Taken):
        done(store.append([submission(job(3), "key", "digest")]))
    assert store.job(3) is None
    assert store.load().last_seq == 2


def test_a_number_is_given_once(store: Store) -> None:
    done(store.append([submission(job(1))]))
    for entries in ([submission(job(1, name="x"))], [submission(job(2)), submission(job(2))]):
        with pytest.raises(Taken):
            done(store.append(entries))
    assert store.job(1) == job(1)
    assert store.job(2) is None


FIRST = job(1)
SUSPENDED = entry(FIRST, e.Wished(wish="suspend", by="ada"), 1000.0)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Entry(1000.0, SUSPENDED.event, FIRST), Stale),
        (Entry(1001.0, SUSPENDED.event, SUSPENDED.job), Stale),
        (entry(job(9), e.Scaled(min_workers=1, max_workers=2, by="ada"), 1000.0), Stale),
        (Entry(1000.0, e.Ended(phase="failed"), None), Refused),
        (Entry(float("nan"), SUSPENDED.event, SUSPENDED.job), Refused),
        (entry(FIRST, e.Progressed(steps=1, metrics={"loss": float("nan")}), 1000.0), Refused),
        (entry(FIRST, e.Progressed(steps=1, metrics={"loss": float("inf")}), 1000.0), Refused),
        (submission(job(2, name="\ud800")), Refused),
        (submission(job(2, name="a\x00b")), Refused),
        (submission(job(2, labels={"k": "\x00"})), Refused),
        (submission(job(2, spec={"run": object()})), Refused),
        (submission(job(2**64)), Refused),
    ],
)
def test_what_does_not_fit_is_refused_with_all_that_came_with_it(
    store: Store, bad: Entry, error: type[Refused]
) -> None:
    done(store.append([submission(FIRST)]))
    good = submission(job(5))
    for entries in ([good, bad], [bad, good]):
        with pytest.raises(Refused) as caught:
            done(store.append(entries))
        assert type(caught.value) is error
    assert store.job(5) is None
    assert store.load().last_seq == 1
    done(store.append([good]))
    assert store.verify() == []


def test_numbers_that_only_look_different_are_no_difference(store: Store) -> None:
    """A whole number where a fraction is meant, tuples in a job file: JSON has one form for them."""
    first = job(1, spec={"run": ("python", "train.py"), "labels": {"a": "b"}})
    done(store.append([submission(first)]))
    told = follow(first, e.Progressed(steps=1, metrics={"loss": 2}), e.Progressed(steps=2, metrics={"loss": 1}))
    done(store.append(told[:1]))
    done(store.append([msgspec.structs.replace(told[1], at_s=int(told[1].at_s))]))
    assert store.verify() == []


def test_those_who_wait_share_a_transaction_and_a_bad_one_fails_alone(place: Place, store: Store) -> None:
    done(store.append([submission(job(1), "key")]))
    before = store.transactions
    with place.hold():
        good = [store.append([submission(job(number))]) for number in range(10, 60)]
        # The database finds the first two, we the third; what builds on a job that is not there fails too.
        bad = [
            store.append([submission(job(2), "key")]),
            store.append([submission(job(1))]),
            store.append([Entry(1.0, e.Scaled(min_workers=1, max_workers=2, by="ada"), job(1))]),
            store.append(follow(job(2), e.Wished(wish="suspend", by="ada"))),
        ]
        good += [store.append([submission(job(number))]) for number in range(60, 110)]
        built = store.append(follow(job(10), e.Wished(wish="suspend", by="ada")))
    assert [done(future) for future in good] == [[seq] for seq in range(2, 102)]
    assert done(built) == [102]
    assert [type(future.exception(DONE_S)) for future in bad] == [Taken, Taken, Stale, Stale]
    assert store.transactions - before <= 3
    assert store.load().last_seq == 102
    assert store.verify() == []


def test_a_database_that_cannot_write_fails_all_who_wait_and_later_works_again(place: Place, opened: Opener) -> None:
    store = opened(place, busy_s=0.2)
    first = job(1)
    done(store.append([submission(first)]))
    one, two = follow(first, e.Wished(wish="suspend", by="ada"), e.Wished(wish="run", by="ada"))
    with place.hold():
        failed = [store.append([submission(job(2))]), store.append([one])]
        for future in failed:
            with pytest.raises(StoreLocked):
                done(future)
    with pytest.raises(Stale):
        done(store.append([two]))
    assert store.job(1) == first
    done(store.append([one]))
    done(store.append([two]))
    assert [each.seq for each in store.events()] == [1, 2, 3]
    assert store.verify() == []


def test_many_threads_write_and_read(store: Store) -> None:
    """Each hands in its job's whole life without waiting for anything; the order of its calls is kept."""
    lives = {number: life(job(number), seed=number, ends=False) for number in range(1, 33)}
    failures: list[BaseException] = []

    def submit(numbers: range) -> None:
        try:
            futures = [store.append([each]) for number in numbers for each in lives[number]]
            store.jobs(Query(phases=("queued", "running")))
            seqs = [done(future)[0] for future in futures]
            assert seqs == sorted(seqs)
            assert [store.job(number) for number in numbers] == [after(lives[number]) for number in numbers]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=submit, args=(range(start, start + 4),)) for start in range(1, 33, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    total = sum(map(len, lives.values()))
    assert [each.seq for each in store.events(limit=10_000)] == list(range(1, total + 1))
    assert store.transactions < total
    assert store.verify() == []


def test_reads_see_only_what_is_durable(place: Place, store: Store) -> None:
    done(store.append([submission(job(1))]))
    with place.hold():
        waiting = store.append([submission(job(2))])
        assert store.job(2) is None
        assert store.load().next_number == 2
        assert not waiting.done()
    done(waiting)
    assert store.job(2) == job(2)


def test_a_future_is_done_when_others_can_see_the_write_and_not_before(place: Place, store: Store) -> None:
    """Killing the writer hardly ever hits the moment between an answer and its commit; this looks right into it."""
    seen: list[Any] = []

    def look(number: int) -> None:
        # Runs in the writer's thread, before it does anything else.
        seen.append(place.execute(f"SELECT count(*) FROM events WHERE job = {number}"))

    with place.hold():
        waiting = [store.append([submission(job(number))]) for number in range(1, 6)]
        for number, future in enumerate(waiting, 1):
            future.add_done_callback(lambda _, number=number: look(number))  # type: ignore[misc]
    for future in waiting:
        done(future)
    store.close()
    assert seen == [[(1,)]] * 5


def test_a_write_that_was_asked_for_cannot_be_called_off(place: Place, store: Store) -> None:
    with place.hold():
        waiting = store.append([submission(job(1))])
        assert not waiting.cancel()
    done(waiting)


def test_closing_writes_what_waits(place: Place, opened: Opener) -> None:
    store = opened(place)
    futures = [store.append([submission(job(number))]) for number in range(1, 101)]
    store.close()
    store.close()
    assert all(future.done() for future in futures)
    with pytest.raises(StoreClosed):
        done(store.append([submission(job(101))]))
    with pytest.raises(StoreClosed):
        store.job(1)
    assert len(opened(place).load().jobs) == 100


def test_a_second_writer_is_refused_until_the_first_is_gone(place: Place, opened: Opener) -> None:
    first = opened(place)
    with pytest.raises(StoreLocked, match="in use by another server") as caught:
        opened(place, busy_s=0.2)
    assert "stretto down" in caught.value.hint
    done(first.append([submission(job(1))]))
    first.close()
    assert opened(place).job(1) == job(1)


def test_a_schema_of_the_future_is_left_alone(place: Place, opened: Opener) -> None:
    opened(place).close()
    place.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="newer Stretto") as caught:
        opened(place)
    assert caught.value.code == "store-too-new"
    assert place.execute("SELECT version_num FROM alembic_version") == [("9999",)]


def test_tables_of_others_are_left_alone(place: Place, opened: Opener) -> None:
    place.execute("CREATE TABLE jobs (mine INTEGER)")
    with pytest.raises(StoreError, match="other programs"):
        opened(place)
    assert place.execute("SELECT count(*) FROM jobs") == [(0,)]


def ended(number: int, at_s: float) -> list[Entry]:
    first = job(number, labels={"k": "v"})
    return [submission(first, f"key{number}"), entry(first, e.Ended(phase="succeeded"), at_s)]


def test_retention_removes_the_oldest_with_all_that_is_theirs(place: Place, opened: Opener) -> None:
    store = opened(place)
    for number, at_s in ((1, 4000.0), (2, 2000.0), (3, 3000.0), (4, 9000.0)):
        done(store.append(ended(number, at_s)))
    done(store.append([submission(job(5, submitted_s=1.0))]))
    done(store.append([Entry(at_s, e.Noted(what="started"), None) for at_s in (2500.0, 9500.0)]))
    assert done(store.prune(5000.0, most=2)) == 2
    assert [found.number for found in store.jobs(Query(oldest_first=True)).items] == [1, 4, 5]
    assert store.submitted_with("ada", "key2") is None
    assert store.submitted_with("ada", "key1") is not None
    assert done(store.prune(5000.0, most=10)) == 2
    assert done(store.prune(5000.0, most=10)) == 0
    assert [found.number for found in store.jobs(Query(oldest_first=True)).items] == [4, 5]
    assert [each.job for each in store.events()] == [4, 4, 5, None]
    for table, column in (("labels", "job"), ("submissions", "job")):
        assert place.execute(f"SELECT {column} FROM {table}") == [(4,)]
    done(store.append(ended(1, 9000.0)))
    assert store.verify() == []


def test_numbers_of_removed_jobs_are_not_given_again(place: Place, opened: Opener) -> None:
    store = opened(place)
    done(store.append(ended(7, 2000.0)))
    assert done(store.prune(1e9, most=10)) == 1
    store.close()
    store = opened(place)
    assert (store.load().next_number, store.load().last_seq) == (8, 2)
    assert done(store.append([submission(job(8))])) == [3]


def test_tokens(store: Store, clock: Clock) -> None:
    old = Token(id="t1", user="ada", role="admin", hash="a" * 64, created_s=1.0, expires_s=clock.now_s + 100)
    new = Token(id="t2", user="bob", role="viewer", hash="b" * 64, created_s=2.0)
    done(store.add_token(old))
    done(store.add_token(new))
    assert store.tokens() == [old, new]
    for twin in (
        Token(id="t3", user="eve", role="admin", hash="a" * 64, created_s=3.0),
        Token(id="t1", user="eve", role="admin", hash="c" * 64, created_s=3.0),
    ):
        with pytest.raises(Taken):
            done(store.add_token(twin))
    assert store.token_by_hash("a" * 64) == old
    assert store.token_by_hash("c" * 64) is None
    clock.now_s += 100
    assert store.token_by_hash("a" * 64) is None
    assert done(store.revoke_token("t2"))
    assert not done(store.revoke_token("t2"))
    assert store.token_by_hash("b" * 64) is None
    assert [token.id for token in store.tokens()] == ["t1"]


def test_that_a_token_was_used_is_noted_once_a_minute(store: Store, clock: Clock) -> None:
    done(store.add_token(Token(id="t", user="ada", role="user", hash="a" * 64, created_s=1.0)))
    began_s, noted = clock.now_s, []
    for later_s in (0, 10, 59, 60, 100):
        clock.now_s = began_s + later_s
        store.token_by_hash("a" * 64)
        done(store.put_setting("after", "the note"))
        noted.append(store.tokens()[0].last_used_s)
    assert noted == [began_s, began_s, began_s, began_s + 60, began_s + 60]


@pytest.mark.parametrize(
    ("tampering", "text"),
    [
        ('UPDATE jobs SET job = replace(job, \'"user":"ada"\', \'"user":"eve"\') WHERE number = 2', "user is 'ada'"),
        ("UPDATE jobs SET phase = 'running' WHERE number = 2", "wrong phase"),
        ("UPDATE jobs SET ended_s = 5 WHERE number = 2", "wrong ended_s"),
        ("UPDATE jobs SET job = '{' WHERE number = 2", "cannot be read"),
        ("DELETE FROM events WHERE job = 2 AND seq = (SELECT max(seq) FROM events WHERE job = 2)", "max_workers is 3"),
        ("UPDATE events SET at_s = at_s + 1 WHERE seq = (SELECT max(seq) FROM events WHERE job = 2)", "changed_s"),
        ("DELETE FROM events WHERE job = 2", "no events"),
        ("DELETE FROM labels WHERE job = 2", "wrong labels"),
        ("UPDATE submissions SET digest = 'x' WHERE job = 2", "wrong idempotency key"),
    ],
)
def test_verifying_finds_what_was_tampered_with(place: Place, store: Store, tampering: str, text: str) -> None:
    for number in (1, 2, 3):
        first = job(number, labels={"k": "v"})
        scaled = [e.Scaled(min_workers=1, max_workers=high, by="ada") for high in (3, 4)]
        told = [submission(first, f"key{number}", "digest"), *follow(first, *scaled)]
        told.append(entry(after(told), e.Wished(wish="suspend", by="ada"), 2000.0))
        if "max_workers" in text:
            told = told[:-1]
        done(store.append(told))
    assert store.verify() == []
    place.execute(tampering)
    found = store.verify()
    assert len(found) == 1
    assert found[0].startswith("job 2: ")
    assert text in found[0]


def test_what_is_stored_is_what_the_lifecycle_says(store: Store) -> None:
    first = job(1)
    done(store.append([submission(first)]))
    event = e.Scaled(min_workers=2, max_workers=3, by="ada")
    done(store.append([entry(first, event, 1000.0)]))
    assert store.job(1) == apply(first, event, 1000.0)
    assert store.count() == {"queued": 1}
