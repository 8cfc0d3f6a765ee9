"""Fork servers of accounts: whose they are, whom they serve, and what is believed of what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from people import NAMES, account, interpreter, need_root, open_folder, processes_of
from stretto import accounts
from stretto.backends.local import supervisor
from stretto.backends.local.forkserver import ForkServers
from stretto.jobs.model import Account


@pytest.fixture(scope="module")
def people() -> Iterator[tuple[Account, Account]]:
    need_root()
    with account(NAMES[0]) as ana, account(NAMES[1]) as bob:
        yield ana, bob


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


ASKS = """
import array, os, socket, sys
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect("\\0" + sys.argv[1])
try:
    socket.send_fds(asking, [b"fork"], [os.memfd_create("x"), 0, 1, 2])
    print(asking.recv(4096).decode())
except OSError as error:
    print("error", error)
"""


def test_each_account_has_fork_servers_of_its_own_that_answer_nobody_else(
    people: tuple[Account, Account], place: Path
) -> None:
    """Though all their variables are alike."""
    python, env = interpreter(place, people[0])
    env = {**env, "PATH": os.environ["PATH"], "HOME": "/"}
    whose = [accounts.identity(each) for each in people]
    with ForkServers(preload=()) as forks:
        servers = [forks.get(python, env, who) for who in whose]
        assert servers[0] is not servers[1]
        assert [forks.get(python, env, who) for who in whose] == servers
        for server, who in zip(servers, whose, strict=True):
            assert server.wait_ready(), server.failure
            status = Path(f"/proc/{server.pid}/status").read_text()
            ids = {line.split(":")[0]: line.split()[1:] for line in status.splitlines() if line}
            assert (ids["Uid"], ids["Gid"]) == (4 * [str(who.uid)], 4 * [str(who.gid)])
            assert sorted(map(int, ids["Groups"])) == sorted(who.groups)
            shown = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
            assert f"USER={who.name}".encode() in shown
        for who in whose:
            done = subprocess.run(
                [python, "-c", ASKS, servers[0].address[1:]], env=env, user=who.uid, group=who.gid, extra_groups=[],
                capture_output=True, text=True,
            )  # fmt: skip
            assert "error" in done.stdout, done
    assert [processes_of(each.uid) for each in people] == [[], []]


def test_what_a_fork_server_says_of_others_processes_is_not_believed(people: tuple[Account, Account]) -> None:
    """Nor is nonsense: whoever is root would signal whom it names."""
    uid = people[0].uid
    child = subprocess.Popen(["sleep", "60"], user=uid, group=uid, extra_groups=[])
    try:
        theirs, ours, gone = os.pidfd_open(child.pid), os.pidfd_open(os.getpid()), child.pid
        assert supervisor._is_of(theirs, child.pid, uid)
        for said, fds in (
            ({"parent": os.getpid(), "worker": os.getpid()}, [ours, ours]),
            ({"parent": child.pid, "worker": os.getpid()}, [theirs, ours]),
            ({"parent": child.pid, "worker": child.pid}, [theirs, ours]),
            ({"parent": child.pid, "worker": child.pid}, [theirs]),
            ({"parent": child.pid}, [theirs, theirs]),
            ({"parent": "x", "worker": None}, [theirs, theirs]),
            ({"error": "no"}, []),
        ):
            with pytest.raises((ValueError, LookupError)):
                _asked(json.dumps(said).encode(), fds, uid)
        with pytest.raises(ValueError, match="Expecting value"):
            _asked(b"nonsense", [theirs, theirs], uid)
        held: list[socket.socket] = []
        family = _asked(json.dumps({"parent": gone, "worker": gone}).encode(), [theirs, theirs], uid, held)
        assert not family.over
    finally:
        child.kill()
        child.wait()
    # Others may hold its connection open: that it has ended is seen all the same, and its number is nobody's now.
    assert family.heard() == 9
    assert family.over
    assert family.members() == []
    held[0].close()
    for fd in (theirs, ours, family.parent_fd, family.worker_fd):
        os.close(fd)


def _asked(answer: bytes, fds: list[int], uid: int, held: list[socket.socket] | None = None) -> supervisor.Family:
    """`held`: gets the other end of its connection, which is closed otherwise."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def answers() -> None:
        _, got, _, _ = socket.recv_fds(far, 64, 8)
        for fd in got:
            os.close(fd)
        socket.send_fds(far, [answer], fds)

    thread = threading.Thread(target=answers)
    thread.start()
    request, says = os.memfd_create("request"), os.memfd_create("says")
    try:
        return supervisor.Family.asked_for(near.detach(), request, says, uid)
    finally:
        thread.join()
        os.close(request)
        os.close(says)
        if held is None:
            far.close()
        else:
            held.append(far)


def test_acting_is_of_one_thread_and_over_when_it_is(people: tuple[Account, Account], place: Path) -> None:
    ana = accounts.identity(people[0])
    secret = place / "roots"
    secret.write_text("x")
    secret.chmod(0o600)
    mine = place / "anas"
    mine.mkdir()
    os.chown(mine, ana.uid, ana.gid)
    elsewhere: list[str] = []
    goes, went = threading.Event(), threading.Event()

    def look() -> None:
        goes.wait(60)
        elsewhere.append(secret.read_text())
        went.set()

    thread = threading.Thread(target=look)
    thread.start()
    with accounts.acting(ana):
        with pytest.raises(PermissionError):
            secret.read_text()
        (mine / "made").write_text("x")
        goes.set()
        assert went.wait(60)
    thread.join()
    assert elsewhere == ["x"]
    assert secret.read_text() == "x"
    about = (mine / "made").stat()
    assert (about.st_uid, about.st_gid) == (ana.uid, ana.gid)


def test_a_folder_of_another_account_is_not_given_away(people: tuple[Account, Account], place: Path) -> None:
    ana, bob = (accounts.identity(each) for each in people)
    folder = place / "jobs" / "7"
    accounts.own_folder(folder, root=place, who=ana)
    accounts.own_folder(folder, root=place, who=ana)
    assert folder.stat().st_uid == ana.uid
    with pytest.raises(PermissionError):
        accounts.own_folder(folder, root=place, who=bob)
    old = place / "jobs" / "8"
    (old / "checkpoints").mkdir(parents=True)
    with pytest.raises(PermissionError):
        accounts.own_folder(old, root=place, who=bob)
    assert accounts.unreachable(folder, ana)
    folder.parent.chmod(0o711)
    assert not accounts.unreachable(folder, ana)
    assert accounts.unreachable(folder, bob)
    (folder / "inner").mkdir(mode=0o700)
    assert accounts.unreachable(folder / "inner", ana)


def test_the_first_number_of_people(tmp_path: Path) -> None:
    defs = tmp_path / "login.defs"
    defs.write_text("# UID_MIN 7\nUID_MAX 60000\nUID_MIN\t\t 500\n")
    assert accounts.first_uid(str(defs)) == 500
    assert accounts.first_uid(str(tmp_path / "none")) == 1000
