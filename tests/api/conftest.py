"""One server for the tests that leave it as they found it; a folder for those that need one of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from api_client import Api, serving


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def api(data: Path) -> Iterator[Api]:
    """As the local admin."""
    with serving(data) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test has submitted to the common server ends with it."""
    yield
    if "api" not in request.fixturenames:
        return
    api: Api = request.getfixturevalue("api")
    while jobs := api.get("/v1/jobs", phase="active", limit=1000).json["items"]:
        for job in jobs:
            api.post(f"/v1/jobs/{job['id']}/cancel")
            api.until(job["id"], "cancelled", "succeeded", "failed")


@pytest.fixture(scope="session")
def tokens(api: Api) -> dict[str, str]:
    """Somebody of every role."""
    people = {"viewer": "vera", "user": "uma", "other": "otto"}
    made = {}
    for who, name in people.items():
        role = "user" if who == "other" else who
        made[who] = api.post("/v1/tokens", {"user": name, "role": role}).json["secret"]
    assert api.token is not None
    return {**made, "admin": api.token}
