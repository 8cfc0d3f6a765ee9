"""What users saw go wrong, tried again through `stretto up` with its defaults, each beside the simplest alternative.

    python benchmarks/live_rows.py [gpt] [digits] [eighteen] [paced] [--jobs 18] [--rounds 3]

*gpt* (one GPU): a small GPT, 300 steps, `elastic: 1..4` at `gpu: 0.25`, alone, beside 1, 2 and 4 fixed workers: at
most 1.35 times the best of these, the start of workers included. *digits* (16 cores): a small MLP, `elastic: 1..16`,
beside 1, 2, 4 and 8 fixed workers: at most 1.15 times the best. *eighteen* (16 cores): 18 short training jobs of
three kinds, none of which is faster on more workers, come within 50 s under several policies: `stretto` at most 1.15
times one worker each, and the best of the policies. *paced* (two cores suffice): the same with jobs whose steps sleep a
known time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import machine
from _server import serving, until
from _verdict import report
from stretto.client import Client

SCRIPTS = Path(__file__).parent / "scripts"
WAIT_S = 300.0
POLICIES = ("fifo", "elastic-fifo", "afs-l", "stretto")
ONE_EACH = "one each"


BUSY = (("small", 1500), ("small", 3000), ("convolution", 40))
PACED = (
    ("40,60,80,100,120,140,160,180", 120),
    ("25,27,31,40,50,60,70,80", 240),
    ("150,155,160,170,180,190,200,210", 50),
)
"""Kinds of the eighteen: a model, or the milliseconds of a step on 1, 2, 3 … workers; and steps for some seconds on one
worker."""


def command(model: str, steps: int) -> list[str]:
    script, option = ("paced_curve.py", "--step-ms") if model[0].isdigit() else ("busy.py", "--model")
    return [sys.executable, str(SCRIPTS / script), option, model, "--steps", str(steps)]


def submit(client: Client, model: str, steps: int, sizes: tuple[int, int], **more: Any) -> int:
    low, high = sizes
    file = {"run": command(model, steps), "workers": high, "elastic": {"min": low, "max": high}, **more}
    return client.submit(file).number


def ended(client: Client, number: int) -> Any:
    job = client.wait(number, timeout_s=WAIT_S)
    if job.phase != "succeeded":
        sys.exit(f"{job.name} has {job.phase}: {job.message}")
    return job


def alone(name: str, model: str, steps: int, most: int, fixed: tuple[int, ...], goal: float, *options: str) -> bool:
    """One elastic job, nothing learned, beside the same at fixed sizes: from submission to the end."""
    resources = {"resources": {"gpu": 0.25}} if model == "gpt" else {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *options) as server:
        client = server.client()
        # What is done once per machine is nobody's.
        ended(client, submit(client, model, 3, (1, 1), name="warm-up", **resources))
        took = {}
        for size in fixed:
            job = ended(client, submit(client, model, steps, (size, size), name=f"fixed-{size}", **resources))
            took[size] = job.ended_s - job.submitted_s
        job = ended(client, submit(client, model, steps, (1, most), name="elastic", **resources))
        ours = job.ended_s - job.submitted_s
    best = min(took.values())
    report(
        f"live_rows: {name}", ours=ours, peer=best, ratio=ours / best, unit="s", goal=f"<= {goal}",
        ok=ours <= goal * best, fixed=took, resizes=job["resizes"], machine=machine(),
    )  # fmt: skip
    return ours <= goal * best


def eighteen(name: str, kinds: tuple[tuple[str, int], ...], count: int, rounds: int) -> bool:
    """Medians of the rounds. What two rounds of one policy differ by, at the median of the policies, is noise: a policy
    that is better by less is not known to be better."""
    found: dict[str, list[float]] = {policy: [] for policy in (*POLICIES, ONE_EACH)}
    resizes: dict[str, list[int]] = {policy: [] for policy in found}
    for round_number in range(rounds):
        for policy, tried in found.items():
            mean_s, resized = played(kinds, count, policy)
            tried.append(mean_s)
            resizes[policy].append(resized)
            print(
                json.dumps({"round": round_number, "policy": policy, "mean_s": mean_s, "resizes": resized}), flush=True
            )
    means = {policy: statistics.median(tried) for policy, tried in found.items()}
    noise = statistics.median(max(tried) / min(tried) - 1 for tried in found.values())
    ours, peer, best = means["stretto"], means[ONE_EACH], min(means[policy] for policy in POLICIES)
    ok = rounds > 1 and ours <= 1.15 * peer and ours <= best * (1 + noise)
    report(
        f"live_rows: {name}", ours=ours, peer=peer, ratio=ours / peer, unit="s mean completion",
        goal="<= 1.15, and the best of the policies but for noise", ok=ok, means=means, noise=noise,
        beside_best=ours / best, resizes=resizes, machine=machine(),
    )  # fmt: skip
    return ok


def played(kinds: tuple[tuple[str, int], ...], count: int, policy: str) -> tuple[float, int]:
    """Mean completion and resizes of so many jobs that come within 50 s."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--cpu", "--slots", "16") as server:
        client = server.client()
        ended(client, submit(client, kinds[0][0], 3, (1, 1), name="warm-up"))
        client.set_policy("stretto" if policy == ONE_EACH else policy, {})
        began_s, numbers = time.monotonic(), []
        for i in range(count):
            model, steps = kinds[i % 3]
            until(lambda at_s=50.0 * i / count, began_s=began_s: time.monotonic() >= began_s + at_s, "its time")
            sizes = (1, 1) if policy == ONE_EACH else (1, 8)
            file = {"run": command(model, steps), "workers": 1 if sizes == (1, 1) else 4}
            numbers.append(client.submit({**file, "elastic": {"min": sizes[0], "max": sizes[1]}}).number)
        jobs = [ended(client, number) for number in numbers]
    return statistics.mean(job.ended_s - job.submitted_s for job in jobs), sum(job["resizes"] for job in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["paced"])
    parser.add_argument("--jobs", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    met = True
    for part in arguments.parts:
        if part == "gpt":
            met &= alone("gpt at quarter shares", "gpt", 300, 4, (1, 2, 4), 1.35)
        elif part == "digits":
            met &= alone("digits on 16 cores", "small", 10_000, 16, (1, 2, 4, 8), 1.15, "--cpu")
        elif part == "eighteen":
            met &= eighteen("eighteen on 16 cores", BUSY, arguments.jobs, arguments.rounds)
        elif part == "paced":
            met &= eighteen("eighteen, paced, on 16 slots", PACED, arguments.jobs, arguments.rounds)
        else:
            parser.error(f"{part!r} is no part of this benchmark")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
