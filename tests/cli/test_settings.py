"""Every option of every policy, and every setting of the simulated world, with values that make no sense: a run comes
to a sensible end, or is refused in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from stretto.cli import main
from stretto.core.policies import BUILTIN
from stretto.core.policy import entry
from stretto.sim.runner import world_names

VALUES = ("0", "-1", "nan", "inf", "1e308", "1e-300", "x", "")


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    rows = [f"j{i},{3 * i},{20 + 7 * i},{1 + i % 3},1,4,0.7,{10 * (i % 2)},{200 if i % 2 else ''}" for i in range(9)]
    file = tmp_path / "jobs.csv"
    file.write_text("\n".join(["job_id,submit_s,duration_s,gpus,min,max,speedup,priority,deadline_s", *rows]))
    return str(file)


def run(capsys: pytest.CaptureFixture[str], jobs: str, policy: str, *settings: str) -> None:
    """It ends, or says what to change."""
    words = [word for setting in settings for word in ("--set", setting)]
    code = main(["sim", "run", jobs, "--cluster", "2x4", "--policy", policy, "--json", *words])
    out, err = capsys.readouterr()
    if code:
        assert (code, out, err.startswith("error: ")) == (2, "", True), (settings, err)
        assert settings[0].partition("=")[0] in err.splitlines()[0]
        assert len(err.splitlines()) == 2, "one sentence and a hint"
    else:
        figures = json.loads(out)
        assert not any(isinstance(value, float) and math.isnan(value) for value in figures.values())
        assert figures["finished"] == figures["jobs"], settings


@pytest.mark.parametrize("policy", [name for name in BUILTIN if entry(name).options.__struct_fields__])
def test_options_of_policies(capsys: pytest.CaptureFixture[str], jobs: str, policy: str) -> None:
    for field in msgspec.structs.fields(entry(policy).options):
        for value in VALUES:
            run(capsys, jobs, policy, f"{field.name}={value}")


@pytest.mark.parametrize("name", world_names())
@pytest.mark.parametrize("policy", ["stretto", "tiresias"])
def test_settings_of_the_world(capsys: pytest.CaptureFixture[str], jobs: str, policy: str, name: str) -> None:
    more = ["curves=learned"] if name.startswith("observe") else []
    for value in VALUES:
        run(capsys, jobs, policy, f"{name}={value}", *more)
