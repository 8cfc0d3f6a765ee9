"""Options that several commands share, so that they are called and explained alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

if TYPE_CHECKING:
    from stretto.client import Client

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
JobRef: TypeAlias = Annotated[str, Parameter(help="Its number, or its name (the latest of that name).")]
JobRefs: TypeAlias = Annotated[str, Parameter(help="Their numbers or names.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Connection:
    """Which server is asked. The token comes from STRETTO_TOKEN or the data directory: arguments are there for all to
    see."""

    server: Annotated[
        str | None, Parameter(name="--server", help="http://HOST:PORT; default: STRETTO_SERVER, or the one of --data.")
    ] = None
    data: Annotated[
        Path | None,
        Parameter(name="--data", help="The server's data directory; default: STRETTO_HOME, or ~/.local/share/stretto."),
    ] = None

    def client(self) -> Client:
        from stretto.client import Client

        return Client(self.server, data=self.data)


HERE = Connection()
