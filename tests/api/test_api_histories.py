"""Histories of requests, made of the API's own description and of earlier answers: `benchmarks/fuzz.py` plays more."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_client import serving

from stretto.testing.api_fuzzing import LONGEST_S, Tally, play


@pytest.mark.parametrize("seed", [1, 2])
def test_no_history_of_requests_is_a_mistake_of_ours(tmp_path: Path, seed: int) -> None:
    tally = Tally()
    with serving(tmp_path / "data") as api:
        assert api.token is not None
        play(api.url, api.token, tally, histories=15, steps=10, seed=seed)
        assert api.get("/readyz").status == 200
    assert tally.requests > 100
    assert tally.linked > 5
    assert not tally.failures
    assert not [answer for answer in tally.answers if answer[1] >= 500]
    assert tally.slowest_s < LONGEST_S
    assert "Traceback" not in (tmp_path / "data" / "server.log").read_text()
