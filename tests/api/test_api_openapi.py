"""The API, fuzzed from its own description: no 5xx, and every answer is what the description says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from api_client import Api, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ENDLESS = "/v1/events/stream"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Of its own: fuzzing drains its nodes, changes its policy, fills it with jobs."""
    with serving(tmp_path_factory.mktemp("fuzzed")) as api:
        api.submit("sleep 600")
        yield api


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_api_keeps_its_word(fuzzed: Api, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/v1/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    tried = [fuzz(operation, fuzzed, mode) for operation in operations if operation.path != ENDLESS]
    assert len(tried) > 20
    assert sum(tried) > 200


def fuzz(operation: Any, api: Api, mode: GenerationMode) -> int:
    """Ask one operation in many ways, right or wrong ones; how many. Some cannot be asked wrongly."""
    count = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        nonlocal count
        count += 1
        response = case.call(headers={"Authorization": f"Bearer {api.token}"}, timeout=30)
        case.validate_response(response, checks=CHECKS)

    with contextlib.suppress(Unsatisfiable):
        check()
    return count


def test_the_description_is_complete(fuzzed: Api) -> None:
    """Every reference leads somewhere, every operation needs a token unless it is for anybody."""
    document = fuzzed.get("/v1/openapi.json").json
    schemas = document["components"]["schemas"]

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, one in value.items():
                yield from [one] if key == "$ref" and isinstance(one, str) else references(one)
        elif isinstance(value, list):
            for one in value:
                yield from references(one)

    assert {ref.rpartition("/")[2] for ref in references(document)} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == path.startswith("/v1/"), path
