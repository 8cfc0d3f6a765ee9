"""What a job takes along from where it is submitted: the folder, and a short list of variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

CAPTURED = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "USER", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH",
)  # fmt: skip
"""Enough to find the same programs and packages; nothing that could be a secret."""


def captured(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: environment[name] for name in CAPTURED if name in environment}
