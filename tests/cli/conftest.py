from __future__ import annotations

from collections.abc import Iterator

import pytest

from servers import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), "--nodes", "2x4") as made:
        yield made
