"""Histories of requests that the API's own description allows, and many that it does not: answers of one request (a
job's number, a token's id) are put into the next ones.

No answer may be a 5xx or other than described, and none may take long. What was asked and how it was answered is
counted.
It needs `schemathesis`, which is for those who develop Stretto.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LONGEST_S = 30.0
_ENDLESS = "/v1/events/stream"
_LONGEST_FAILURE = 1500


@dataclass
class Tally:
    """What was asked, how it was answered."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By operation and status."""
    linked: int = 0
    """Requests that were made of the answers to others."""
    slowest_s: float = 0.0
    slowest: str = ""
    failures: list[str] = field(default_factory=list)
    cut_short: int = 0
    """Times that the histories ended early: a server has a memory, and does not answer a second time as the first."""

    @property
    def requests(self) -> int:
        return sum(self.answers.values())


def play(url: str, token: str, tally: Tally, *, histories: int, steps: int, seed: int) -> None:
    """What schemathesis finds is in the tally."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Flaky
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json").exclude(path=_ENDLESS)

    class Requests(schema.as_state_machine()):  # type: ignore[misc]
        def step(self, input: Any) -> Any:
            tally.linked += input.transition is not None
            return super().step(input)

        def before_call(self, case: Any) -> None:
            case.headers["Authorization"] = f"Bearer {token}"
            _make_harmless(case)

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"timeout": LONGEST_S}

        def call(self, case: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            response = super().call(case, **kwargs)
            took_s, name = time.monotonic() - began_s, f"{case.method} {case.operation.path}"
            tally.answers[name, response.status_code] += 1
            if took_s > tally.slowest_s:
                tally.slowest_s, tally.slowest = took_s, name
            return response

        def validate_response(self, response: Any, case: Any, **kwargs: Any) -> None:
            try:
                case.validate_response(response, checks=checks)
            except Exception as error:
                # Told here: played again, it need not come about again.
                parts = getattr(error, "exceptions", [error])
                tally.failures.append("\n".join(str(part) for part in parts)[:_LONGEST_FAILURE])
                raise

    how = settings(
        max_examples=histories,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    before = len(tally.failures)
    try:
        seeded(seed)(Requests).run(settings=how)
    except Flaky:
        tally.cut_short += 1
    except Exception:
        if len(tally.failures) == before:
            raise


def _make_harmless(case: Any) -> None:
    """What would be run is not what chance has written."""
    body = case.body
    if case.operation.path != "/v1/jobs" or not isinstance(body, dict):
        return
    file = body["job"] if isinstance(body.get("job"), dict) else body
    for field_name in {"run", "command", "setup"} & file.keys():
        if isinstance(file[field_name], str | list):
            file[field_name] = "sleep 1"
