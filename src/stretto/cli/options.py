"""Options that several commands share, so that they are called and explained alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, cast

from cyclopts import Parameter, Token

from stretto.errors import UsageError

if TYPE_CHECKING:
    from stretto.client import Client
    from stretto.kubernetes.sdk import KubernetesClient

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
JobRef: TypeAlias = Annotated[
    str, Parameter(help="Its number, or its name (the latest of that name); on Kubernetes NAME or NAMESPACE/NAME.")
]
JobRefs: TypeAlias = Annotated[str, Parameter(help="Their numbers or names.")]


def _folder(_: type, tokens: Sequence[Token]) -> Path:
    """An empty text would be the current folder, and is some variable that was not set."""
    if not tokens[0].value:
        raise UsageError(f"{tokens[0].keyword}: no folder is given", hint="give one, or leave out the option")
    return Path(tokens[0].value)


DATA: Final = Parameter(
    name="--data",
    converter=_folder,
    help="The server's data directory; default: STRETTO_HOME, or ~/.local/share/stretto.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Connection:
    """Which server is asked. The token comes from STRETTO_TOKEN or the data directory: arguments are there for all to
    see."""

    server: Annotated[
        str | None,
        Parameter(
            name="--server", help="http(s)://HOST:PORT or unix:/PATH; default: STRETTO_SERVER, or the one of --data."
        ),
    ] = None
    data: Annotated[Path | None, DATA] = None

    def client(self) -> Client:
        from stretto.client import Client

        return Client(self.server, data=self.data)


HERE = Connection()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Place(Connection):
    """Where jobs are: on a server, or on Kubernetes. What only Kubernetes needs is imported when it is asked for, so
    that looking at a server costs what it always did."""

    on: Annotated[
        str | None,
        Parameter(
            name="--on",
            help="kubernetes, or kubernetes:CONTEXT of the kubeconfig; server; default: STRETTO_ON, or a server.",
        ),
    ] = None
    namespace: Annotated[
        str | None, Parameter(name="--namespace", help="On Kubernetes; default: the one of the context.")
    ] = None

    def client(self) -> Client:
        """A server's client, or one for Kubernetes, which has the methods that these verbs call."""
        return super().client() if self.cluster is None else cast("Client", self.kubernetes())

    def kubernetes(self) -> KubernetesClient:
        from stretto.kubernetes.sdk import KubernetesClient

        return KubernetesClient(self.cluster or "", namespace=self.namespace or "")

    def everywhere(self) -> Place:
        return replace(self, namespace="*")

    @property
    def cluster(self) -> str | None:
        """The context of the kubeconfig, empty for the current one; None: it is a server that is asked."""
        asked = self.on or self._usual()
        where, colon, context = asked.partition(":")
        if where == "kubernetes" and (context or not colon):
            if self.server is not None or self.data is not None:
                raise UsageError("both a server and Kubernetes are named", hint="give --server or --data, or --on")
            return context
        if asked not in ("", "server"):
            raise UsageError(
                f"there is nothing called {asked!r} to run jobs on", hint="kubernetes, kubernetes:CONTEXT or server"
            )
        self.only_on_kubernetes(**{"--namespace": self.namespace})
        return None

    def only_on_kubernetes(self, **given: object) -> None:
        """Options that mean nothing to a server."""
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} means nothing to a server", hint="did you mean --on kubernetes?")

    def _usual(self) -> str:
        """A server that is named is more than what the environment says in general."""
        return "" if self.server is not None or self.data is not None else os.environ.get("STRETTO_ON", "")


SOMEWHERE = Place()


def policy_for_server(name: str) -> str:
    """It is the server that loads a policy's file, and its folder is another one."""
    path, colon, wanted = name.partition(".py:")
    file = Path(path + ".py" if colon else name)
    if file.suffix != ".py" or not file.is_file():
        return name
    return str(file.absolute()) + (f":{wanted}" if colon else "")
