"""Shared by all tests: puts this folder on the path (`strategies`) and fixes how Hypothesis runs."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell without job control lets what it starts in the background ignore Ctrl-C, and all that is started from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Drawing a whole snapshot takes a while and machines differ: no test may depend on the clock.
settings.register_profile(
    "stretto", deadline=None, max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stretto")
