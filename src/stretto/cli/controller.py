"""`stretto controller`: the control plane of a Kubernetes cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.cli import show, words
from stretto.cli.options import Json
from stretto.errors import UsageError


def controller(
    *,
    host: Annotated[str, Parameter(help="Where it listens.")] = "0.0.0.0",
    port: Annotated[int, Parameter(help="0: any that is free.")] = 8080,
    url: Annotated[
        str, Parameter(help="Where workers reach it, wss://HOST:PORT; default: the address it listens on.")
    ] = "",
    tls: Annotated[
        bool,
        Parameter(negative=(), help="Speak TLS, with a key that is kept in a secret beside its lease."),
    ] = False,
    tls_cert: Annotated[Path | None, Parameter(help="Speak TLS with this certificate (PEM); with --tls-key.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="Its key.")] = None,
    insecure: Annotated[
        bool, Parameter(negative=(), help="Listen beyond this machine, though nothing is encrypted.")
    ] = False,
    allow_host: Annotated[
        list[str], Parameter(negative=(), help="A name, beside that of --url, that others call it by; may be repeated.")
    ] = [],  # noqa: B006
    namespace: Annotated[str, Parameter(help="Where its lease is.")] = "stretto-system",
    policy: Annotated[str, Parameter(help="The policy that decides.")] = "stretto",
    set_: Annotated[
        list[str],
        Parameter(name="--set", negative=(), help="NAME=VALUE of the policy, or of the cycle around it; repeat."),
    ] = [],  # noqa: B006
    placement: Annotated[str, Parameter(help="Which node each worker gets.")] = "fewest-moves",
    quota: Annotated[
        list[str],
        Parameter(negative=(), help="NAMESPACE=DEVICES at a time; * is every other; may be repeated."),
    ] = [],  # noqa: B006
    gpu_resource: Annotated[str, Parameter(help="What the cluster calls a GPU.")] = "nvidia.com/gpu",
    context: Annotated[
        str, Parameter(help="Of the kubeconfig; default: the cluster it runs in, or the current one.")
    ] = "",
    kubeconfig: Annotated[str, Parameter(help="Default: KUBECONFIG, or ~/.kube/config.")] = "",
    lease: Annotated[float, Parameter(help="So many seconds after a leader has died another one takes over.")] = 15.0,
    record: Annotated[
        str, Parameter(help="Write every decision to this file: `stretto sim replay` plays it again.")
    ] = "",
    json: Json = False,
) -> None:
    """Run jobs on Kubernetes: watch ElasticJobs, decide, make and bind their worker pods."""
    from stretto.api.process import set_up_logging
    from stretto.cli.server import given_files, quotas_of
    from stretto.core import cycle
    from stretto.kubernetes.controller import Options
    from stretto.kubernetes.process import Settings, run, serve
    from stretto.server import cycle_settings
    from stretto.sim import live_record

    if url and not url.startswith(("ws://", "wss://")):
        raise UsageError(f"{url!r} is no address of a WebSocket", hint="write wss://HOST:PORT")
    tls_files = given_files(tls_cert, tls_key)
    if url.startswith("ws://") and (tls or tls_files):
        raise UsageError(f"{url!r} is not where TLS is spoken", hint="write wss://HOST:PORT")
    if record:
        live_record.check(Path(record).absolute())
    own, policy_options = cycle_settings.split(words.pairs(set_))
    cycle_settings.read(own, cycle.Settings())
    settings = Settings(
        options=Options(
            namespace=namespace, url=url.rstrip("/"), policy=policy, policy_options=policy_options, settings=own,
            placement=placement, gpu_resource=gpu_resource, quotas=quotas_of(quota),
            record=record,
        ),
        host=host, port=port, hosts=tuple(allow_host), tls=tls, tls_files=tls_files, insecure=insecure,
        context=context, kubeconfig=kubeconfig, lease_s=lease,
    )  # fmt: skip
    set_up_logging()
    run(serve(settings, lambda address: _ready(address, json)))


def _ready(address: str, json: bool) -> None:
    if json:
        show.as_json({"address": address})
        sys.stdout.flush()
    else:
        show.note(f"the controller listens on {address}")
