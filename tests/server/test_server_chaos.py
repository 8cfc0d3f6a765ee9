"""The server and its workers are killed while jobs come in: nothing is lost. `benchmarks/server_chaos.py` is the long
version."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.testing import server_faults
from stretto.testing.server_faults import Server, play


def test_nothing_is_lost(tmp_path: Path) -> None:
    tally = play(3, 5, tmp_path, say=lambda text: None)
    assert tally.accepted
    assert sum(tally.faults.values()) == 5


def test_a_job_that_is_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself: a result that somebody takes away, and a process that stays, are found."""
    taken = server_faults._check_jobs

    def take_one(server: Server, folder: Path, tally: server_faults.Tally) -> None:
        number = min(tally.accepted)
        with server.client() as client:
            name = client.wait(number, timeout_s=60).name
        (folder / f"{name}.result").unlink()
        taken(server, folder, tally)

    monkeypatch.setattr(server_faults, "_check_jobs", take_one)
    with pytest.raises(AssertionError, match="has no result"):
        play(4, 1, tmp_path, train=False, say=lambda text: None)
