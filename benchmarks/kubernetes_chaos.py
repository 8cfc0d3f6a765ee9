"""Whether anything is lost on a cluster: rounds of faults under a stream of real training jobs on Kubernetes.

    python benchmarks/kubernetes_chaos.py [--rounds 50] [--seed 0] [--only KIND …] [--keep FOLDER]

The API server, the schedulers and our controller are real, as are the processes of all pods; only the nodes are played.
Controllers are killed, doubled and cut off, the API server is restarted, pods are killed, deleted and removed by force,
nodes lose power, freeze, are replaced and drained, guests want room, jobs are scaled and suspended. Every job must end
once and well, with every sample fed exactly once per epoch and the result of an undisturbed run; nothing may be left.
There is no peer: the goal is that nothing is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from _measure import machine
from _verdict import report
from stretto.testing.kubernetes.chaos import Tally, play
from stretto.testing.kubernetes.control_plane import ControlPlane

MANIFESTS = Path(__file__).parents[1] / "deploy" / "kubernetes" / "base"
_NAMESPACE = "chaos"


def main() -> int:
    options = arguments()
    print(machine())
    folder = options.keep or Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    began_s = time.monotonic()
    failed, tally = "", None
    try:
        tally = run(options, folder)
    except AssertionError as error:
        failed = str(error).partition("\n")[0]
        print(f"FAILED, seed {options.seed}: {error}\neverything is in {folder}")
    if tally is not None:
        tell(tally)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report(
        "kubernetes_chaos",
        ours=len(tally.jobs) if tally else None,
        peer=None,
        ratio=None,
        unit="jobs that ended once with the exact ledger and result",
        goal=f"all, in {options.rounds} rounds of faults, and nothing left behind",
        ok=not failed,
        failed=failed,
        seed=options.seed,
        faults=tally.faults.total() if tally else None,
        seconds=round(time.monotonic() - began_s, 1),
    )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a kind of fault, as it is printed")
    parser.add_argument("--keep", type=Path, help="logs, ledgers and results stay in this folder")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: Path) -> Tally:
    with ControlPlane(folder / "control-plane") as control_plane:
        control_plane.create_namespace(_NAMESPACE)
        work = play(
            options.seed, options.rounds, control_plane, MANIFESTS, folder, namespace=_NAMESPACE,
            kinds=tuple(options.only), say=lambda text: print(text, flush=True),
        )  # fmt: skip
        return asyncio.run(work)


def tell(tally: Tally) -> None:
    for title, counts in (("struck", tally.faults), ("came to nothing", tally.missed)):
        print(f"{title}: {', '.join(f'{kind} {count}' for kind, count in sorted(counts.items())) or 'nothing'}")
    print(f"controllers that ended by themselves: {tally.controllers_ended}")
    print(f"tracebacks of libraries in their logs: {tally.foreign_tracebacks}")
    for name, told in tally.jobs.items():
        print(f"{name}: {', '.join(f'{what} {count}' for what, count in told.items())}")


if __name__ == "__main__":
    sys.exit(main())
