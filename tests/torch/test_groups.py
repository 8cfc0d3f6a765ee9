"""Groups of real processes: what a dead, a frozen and an absent peer do to the others, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_crew import Crew

from stretto.torch.groups import Group, GroupBroken, Store, connect


def host(kept: SimpleNamespace, _rank: int) -> str:
    kept.store = Store()
    return str(kept.store.address)


def join(kept: SimpleNamespace, rank: int, generation: int, addresses: list[str], timeout_s: float = 20.0) -> None:
    old = getattr(kept, "group", None)
    kept.group = None
    if old is not None:
        old.close()
    kept.group = connect(generation, rank, addresses, timeout_s=timeout_s)


def add(kept: SimpleNamespace, _rank: int, elements: int = 1) -> float:
    tensor = torch.full((elements,), float(kept.group.rank + 1))
    kept.group.all_reduce(tensor).wait()
    return float(tensor[-1])


def add_and_tell(kept: SimpleNamespace, rank: int) -> str:
    try:
        add(kept, rank, 1 << 20)
    except GroupBroken as error:
        return error.cause
    return "fine"


def add_until_aborted(kept: SimpleNamespace, rank: int) -> tuple[str, float]:
    """Begin a collective that hangs, abort it from another thread once it does: what came out and how soon."""
    aborted: list[float] = []

    def abort() -> None:
        time.sleep(0.2)
        aborted.append(time.monotonic())
        kept.group.abort("the coordinator said so")

    thread = threading.Thread(target=abort)
    thread.start()
    cause = add_and_tell(kept, rank)
    late_s = time.monotonic() - aborted[0]
    thread.join()
    return cause, late_s


def open_beside_when_aborted(kept: SimpleNamespace, _rank: int) -> str:
    """The news of another generation may come before there is anything to let go of."""
    kept.group.abort("the coordinator said so")
    try:
        kept.group.open_beside(20.0)
    except GroupBroken as error:
        return error.cause
    return "fine"


def exchange(kept: SimpleNamespace, rank: int) -> tuple[list[bytes], float, list[float]]:
    group: Group = kept.group
    found = group.all_gather_bytes(b"x" * (3 * rank))
    tensor = torch.tensor([float(rank), float(rank)])
    group.broadcast(tensor, 1).wait()
    everyone = group.all_gather_now(torch.tensor([float(rank)]))
    return found, float(tensor[0]), [float(one) for one in everyone]


def held(_kept: SimpleNamespace) -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def reform_many(kept: SimpleNamespace, rank: int, addresses: list[str], first: int, times: int) -> None:
    for generation in range(first, first + times):
        join(kept, rank, generation, addresses)
        assert add(kept, rank) == len(addresses) * (len(addresses) + 1) / 2


def addresses_of(crew: Crew) -> list[str]:
    return list(crew.call(host))


def reform(crew: Crew, addresses: list[str], generation: int, ranks: list[int]) -> None:
    """A new generation of these workers works."""
    crew.call(join, generation, [addresses[rank] for rank in ranks], ranks=ranks)
    size = len(ranks)
    assert crew.call(add, ranks=ranks) == [size * (size + 1) / 2] * size


def test_collectives_of_three() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        crew.call(join, 1, addresses)
        assert crew.call(add) == [6.0] * 3
        assert crew.call(exchange) == [([b"", b"xxx", b"xxxxxx"], 1.0, [0.0, 1.0, 2.0])] * 3


def test_a_killed_peer_breaks_the_collective_and_the_rest_goes_on() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        crew.call(join, 1, addresses)
        started = crew.start(add_and_tell, ranks=[0, 1])
        crew[2].kill()
        for worker in started:
            assert worker.result() not in ("fine", "")
        reform(crew, addresses, 2, [0, 1])


def test_a_killed_leader_too() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        crew.call(join, 1, addresses)
        started = crew.start(add_and_tell, ranks=[1, 2])
        crew[0].kill()
        for worker in started:
            assert worker.result() != "fine"
        reform(crew, addresses, 2, [2, 1])


def test_abort_lets_go_of_a_frozen_peer() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        crew.call(join, 1, addresses)
        crew[0].signal(signal.SIGSTOP)
        for worker in crew.start(add_until_aborted, ranks=[1, 2]):
            cause, late_s = worker.result()
            assert cause == "the coordinator said so" or "losed" in cause or "reset" in cause
            # Hanging, it would take until the time-out of the test; only the order of magnitude is of interest.
            assert late_s < 5
        reform(crew, addresses, 2, [1, 2])
        crew[0].signal(signal.SIGCONT)
        assert crew.workers[0].call(add_and_tell, 0) != "fine"


def connect_and_tell(kept: SimpleNamespace, rank: int, addresses: list[str], timeout_s: float) -> tuple[str, Any]:
    try:
        join(kept, rank, 7, addresses, timeout_s)
    except GroupBroken as error:
        return error.cause, error.missing
    return "fine", ()


def test_nobody_waits_beside_a_group_that_was_aborted_before() -> None:
    with Crew(2) as crew:
        crew.call(join, 1, addresses_of(crew))
        assert crew[1].call(open_beside_when_aborted, 1) == "the coordinator said so"


def test_a_peer_that_never_comes_is_named() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        for worker in crew.start(connect_and_tell, addresses, 1.0, ranks=[0, 1]):
            cause, missing = worker.result()
            assert f"no word from rank 2 ({addresses[2]})" in cause
            assert missing == (2,)
        reform(crew, addresses, 8, [0, 1])


def test_a_frozen_store_does_not_hold_anybody_up() -> None:
    with Crew(2) as crew:
        addresses = addresses_of(crew)
        crew[0].signal(signal.SIGSTOP)
        cause, _ = crew[1].call(connect_and_tell, 1, addresses, 1.0)
        assert "generation 7 could not be formed" in cause
        reform(crew, addresses, 8, [1])


def abort_connecting(kept: SimpleNamespace, rank: int, addresses: list[str]) -> str:
    group = Group(1, rank, addresses)
    threading.Timer(0.2, group.abort, ["a newer generation"]).start()
    try:
        group.connect(60.0)
    except GroupBroken as error:
        return error.cause
    return "fine"


def test_connecting_can_be_aborted() -> None:
    with Crew(2) as crew:
        addresses = addresses_of(crew)
        assert crew[0].call(abort_connecting, 0, addresses) == "a newer generation"
        crew[0].signal(signal.SIGSTOP)
        assert crew[1].call(abort_connecting, 1, addresses) == "a newer generation"
        crew[0].signal(signal.SIGCONT)
        reform(crew, addresses, 2, [0, 1])


def connect_beside_work(kept: SimpleNamespace, rank: int, addresses: list[str]) -> int:
    """Connect in a background thread to somebody who comes late; how much the main thread did meanwhile."""
    thread = threading.Thread(target=join, args=(kept, rank, 2, addresses))
    thread.start()
    rounds = 0
    while thread.is_alive():
        add_in(kept.training)
        rounds += 1
    thread.join()
    return rounds


def train_in_this(kept: SimpleNamespace, _rank: int) -> None:
    kept.training, kept.group = kept.group, None


def add_in(group: Group) -> None:
    group.all_reduce(torch.ones(1)).wait()


def follow(kept: SimpleNamespace, _rank: int) -> int:
    """Take part in the main group until it ends."""
    done = 0
    try:
        while True:
            add_in(kept.training)
            done += 1
    except GroupBroken:
        return done


def close_training(kept: SimpleNamespace, _rank: int) -> None:
    kept.training.close()


def test_the_main_thread_trains_on_while_the_next_group_connects() -> None:
    with Crew(3) as crew:
        addresses = addresses_of(crew)
        crew.call(join, 1, addresses[:2], ranks=[0, 1])
        crew.call(train_in_this, ranks=[0, 1])
        crew[1].start(follow, 1)
        crew[0].start(connect_beside_work, 0, [addresses[0], addresses[2]])
        # Nothing ends the wait of worker 0 before worker 2 comes; so it has trained until then, or it could not answer.
        crew[2].call(join, 1, 2, [addresses[0], addresses[2]])
        assert crew[0].result() > 0
        crew[0].call(close_training, 0)
        assert crew[1].result() > 0
        assert crew.call(add, ranks=[0, 2]) == [3.0, 3.0]


def test_fifty_generations_leave_nothing_behind() -> None:
    with Crew(2) as crew:
        addresses = addresses_of(crew)
        crew.call(reform_many, addresses, 1, 3)
        before = [worker.call(held) for worker in crew.workers]
        crew.call(reform_many, addresses, 100, 50)
        after = [worker.call(held) for worker in crew.workers]
        # The store's server notices on its own thread that a client has gone: a few connections may still be closing.
        for (fds, threads), (fds_after, threads_after) in zip(before, after, strict=True):
            assert fds_after <= fds + 4
            assert threads_after <= threads + 1


def test_abort_leaves_the_sockets_of_others_alone() -> None:
    store = Store()
    listener = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    group = Group(1, 0, [store.address, "127.0.0.1:1"])
    with pytest.raises(GroupBroken):
        group.connect(0.3)
    group.abort()
    mine.sendall(b"still here")
    assert theirs.recv(100) == b"still here"
    for one in (mine, theirs, listener):
        one.close()
    store.close()


def test_a_group_of_one_needs_nobody() -> None:
    group = connect(1, 0, ["127.0.0.1:1"], timeout_s=1)
    tensor = torch.tensor([2.0])
    group.all_reduce(tensor).wait()
    assert float(tensor) == 2.0
    assert group.all_gather_bytes(b"me") == [b"me"]
    assert [float(one) for one in group.all_gather_now(tensor)] == [2.0]
    group.close()
    with pytest.raises(GroupBroken):
        group.all_reduce(tensor)
