"""Options that several commands share, so that they are called and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

TracePath: TypeAlias = Annotated[Path, Parameter(help="The trace file.")]
Format: TypeAlias = Annotated[
    str, Parameter(name="--format", help="tiresias, philly, itp, pollux, elasticflow, gavel or csv (the plain format).")
]
Cluster: TypeAlias = Annotated[str, Parameter(help="NODESxGPUS, for example 16x8, or a CSV file: nodes,gpus,type.")]
PolicyName: TypeAlias = Annotated[
    str, Parameter(name="--policy", help="A policy's name, or file.py[:name] for one of your own.")
]
PolicyNames: TypeAlias = Annotated[str, Parameter(name="--policies", help="Names (or files), separated by commas.")]
Set: TypeAlias = Annotated[
    list[str],
    Parameter(
        name="--set",
        negative=(),
        help="key=value for the policy, the reader or the world; may be repeated. An unknown key lists all.",
    ),
]
Json: TypeAlias = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of a table.")]
