"""Whether anything is lost: a server and its workers are killed (`kill -9`) in rounds, while jobs are submitted.

python benchmarks/server_chaos.py [--rounds 100] [--seed 0] [--keep FOLDER]

Every job that was accepted must end once, well and with the right result, none may run twice at the same time, and no
process may be left. There is no peer: the goal is that nothing is lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from _measure import machine
from stretto.testing.server_faults import play


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="the server's folder stays here")
    options = parser.parse_args()
    print(machine())
    folder = options.keep or Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    began_s = time.monotonic()
    failed, tally = "", None
    try:
        tally = play(options.seed, options.rounds, folder, say=lambda text: print(text, flush=True))
    except AssertionError as error:
        failed = str(error)
        print(f"FAILED: {failed}\nthe server's folder: {folder}")
    if tally is not None:
        print(f"faults: {', '.join(f'{kind} {count}' for kind, count in sorted(tally.faults.items()))}")
        print(f"{len(tally.accepted)} jobs accepted, {tally.refused} given up, {tally.adopted} workers adopted")
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    last = {
        "name": "server_chaos", "ours": len(tally.accepted) if tally else None, "peer": None, "ratio": None,
        "unit": "jobs that ended once with the right result", "goal": f"all, in {options.rounds} rounds of kill -9",
        "ok": not failed, "failed": failed, "seed": options.seed, "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip
    print(json.dumps(last))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
