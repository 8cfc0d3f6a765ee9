"""Shared by all tests: puts this folder on the path (`strategies`) and fixes how Hypothesis runs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Drawing a whole snapshot takes a while and machines differ: no test may depend on the clock.
settings.register_profile(
    "stretto", deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stretto")
