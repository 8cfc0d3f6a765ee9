"""Real processes: every test must leave none behind, nor a descriptor of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from living import ours, wait_until

from stretto.backends.local.forkserver import ForkServer


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def bare(cache: Path) -> Iterator[ForkServer]:
    """A fork server that has imported nothing but the standard library and numpy."""
    with ForkServer(sys.executable, preload=("numpy", "numpy.random"), cache=cache) as server:
        assert server.wait_ready(), server.failure
        yield server


@pytest.fixture(scope="session")
def torch_server(cache: Path) -> Iterator[ForkServer]:
    # Not imported here: some libraries change our variables when they are, and then nothing can be forked.
    with ForkServer(sys.executable, preload=("torch", "sklearn.datasets"), cache=cache) as server:
        assert server.wait_ready(), server.failure
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    for server in {"bare", "torch_server"} & set(request.fixturenames):
        request.getfixturevalue(server)
    processes, descriptors = ours(), os.listdir("/proc/self/fd")
    yield
    wait_until(lambda: ours() <= processes, 20.0)
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
