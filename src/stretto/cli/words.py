"""How things are said to people: times, sizes, progress, events. Pure; the time is passed in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from stretto.errors import UsageError

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_SIZES = re.compile(r"(\d+)(?:\s*(?:\.\.|-)\s*(\d+))?")


def span(seconds: float | None) -> str:
    """`3m12s`, `2d4h`: the two largest units, `0.4s` below ten seconds."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    for i, (unit, length) in enumerate(_UNITS[:-1]):
        if whole >= length:
            below, part = _UNITS[i + 1]
            rest = whole % length // part
            return f"{whole // length}{unit}" + (f"{rest}{below}" if rest else "")
    return f"{whole}s"


def ago(at_s: float | None, now_s: float) -> str:
    return "-" if at_s is None else f"{span(now_s - at_s)} ago"


def ahead(at_s: float | None, now_s: float) -> str:
    """A moment that is to come: `in 3m12s`."""
    if at_s is None:
        return "-"
    return "now" if at_s <= now_s + 0.5 else f"in {span(at_s - now_s)}"


def foreseen(entry: Mapping[str, Any], what: str, now_s: float) -> str:
    """Its `start` or `end`: `in 3m12s`, or `~in 3m12s` where that hangs on a length that nobody knows."""
    told = ahead(entry[f"{what}_s"], now_s)
    return f"~{told}" if entry.get(f"{what}_guessed") and told != "-" else told


def limits(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def size(job: Mapping[str, Any]) -> str:
    """`3/1..8`: the workers it has, and those that it may have."""
    return f"{len(job['workers'])}/{limits(job['min_workers'], job['max_workers'])}"


def parse_sizes(text: str) -> tuple[int, int]:
    """`4`, or `1..4`."""
    found = _SIZES.fullmatch(text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"{text!r} is not a number of workers", hint="write 4, or a range such as 1..4")
    return low, high


def pairs(texts: list[str]) -> dict[str, str]:
    """`key=value` as people write it."""
    found: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(f"{text!r} is not a pair", hint="write key=value")
        found[key] = value
    return found


def seconds(text: str) -> float:
    """`90s`, `12h`, `30d`."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        amount = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        amount = 0.0
    if not 0 < amount < 1e10:
        raise UsageError(f"{text!r} is not a length of time", hint="write it with its unit, such as 90m, 12h or 30d")
    return amount


def phase(job: Mapping[str, Any]) -> str:
    """The phase, or where it is on its way to."""
    if job["phase"] in ("queued", "running") and job.get("wish") == "cancel":
        return "cancelling"
    if job["phase"] == "running" and job.get("wish") == "suspend":
        return "suspending"
    return str(job["phase"])


def progress(job: Mapping[str, Any]) -> str:
    """`1200/5000 24%`, as far as it is known."""
    steps, total = job.get("steps") or 0, job.get("total_steps")
    if total:
        return f"{steps}/{total} {min(100, math.floor(100 * steps / total))}%"
    return str(steps) if steps else "-"


def rate(job: Mapping[str, Any]) -> str:
    """Steps per second: `27.8`, or `~27.8` as long as nobody has timed them with these workers."""
    told = job.get("rate")
    if not told:
        return "-"
    return f"{'' if job.get('rate_timed', True) else '~'}{number(float(f'{told:.3g}'))}"


def lost(job: Mapping[str, Any]) -> str:
    """`42s of work: stopped for urgent-job (12s), node-1 lost (30s)`."""
    if not job.get("lost_s"):
        return ""
    told = ", ".join(f"{what} ({span(lost_s)})" for what, lost_s in (job.get("lost") or {}).items())
    return f"{span(job['lost_s'])} of work" + (f": {told}" if told else "")


def bar(share: float, width: int) -> str:
    """A horizontal bar, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width)


def disk_mib(text: str) -> int:
    """An amount of disk as it is given to an option; 0 for none."""
    from stretto.spec import units

    try:
        return 0 if text.rstrip("MiGB") == "0" else units.mib(text)
    except ValueError as error:
        raise UsageError(f"--reserve: {error}", hint="for example 512Mi or 2Gi") from None


def mib(amount: float | None) -> str:
    if not amount:
        return "-"
    return f"{amount:.0f} MiB" if amount < 1024 else f"{amount / 1024:.1f} GiB"


def number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:,.0f}"


def one_line(text: str) -> str:
    """The first line and the last: of a traceback, who failed and why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(lines if len(lines) < 3 else [lines[0], lines[-1]])


def title(job: Mapping[str, Any]) -> str:
    """A job with its name, which on Kubernetes is a part of its id."""
    name = "" if str(job["id"]).endswith(f"/{job['name']}") else f" ({job['name']})"
    return f"job {job['id']}{name}"


def outcome(job: Mapping[str, Any]) -> str:
    """A job's end in a sentence."""
    how = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}[job["phase"]]
    after = f" after {span(job['ran_s'])}" if job.get("started_s") is not None else ""
    code = f" (exit code {job['exit_code']})" if job.get("exit_code") else ""
    message = one_line(job.get("message") or "")
    return f"{title(job)} {how}{after}{code}" + (f": {message}" if message else "")


def event(told: Mapping[str, Any]) -> str:
    """What happened, in a few words. A kind that is not known yet is shown with its fields."""
    say = _EVENTS.get(told["kind"])
    if say is not None:
        return one_line(say(told))
    fields = ", ".join(f"{name} {value}" for name, value in told.items() if name != "kind" and value not in ("", None))
    return one_line(f"{told['kind']}: {fields}" if fields else str(told["kind"]))


def _because(text: str) -> str:
    return f": {text}" if text else ""


def _workers(many: int | str) -> str:
    return f"{many} worker{'' if str(many) == '1' else 's'}"


def _seat(seat: Mapping[str, Any]) -> str:
    devices = ",".join(map(str, seat.get("devices") or ()))
    return f"{seat.get('node', '?')}" + (f" [{devices}]" if devices else "")


def _exited(told: Mapping[str, Any]) -> str:
    status = told.get("status", 0)
    how = {"exited": f"ended with status {status}", "signalled": f"was ended by signal {status}"}.get(
        told["how"], f"was {told['how']}"
    )
    return f"{told['worker']} {how}{_because(told.get('text', ''))}"


def _progressed(told: Mapping[str, Any]) -> str:
    metrics = " ".join(f"{name} {number(value)}" for name, value in (told.get("metrics") or {}).items())
    return f"step {progress(told)}" + (f" ({metrics})" if metrics else "")


def _noted(told: Mapping[str, Any]) -> str:
    data = ", ".join(f"{name} {value}" for name, value in (told.get("data") or {}).items() if value not in ("", {}))
    by = f" by {told['by']}" if told.get("by") else ""
    return f"server: {told['what']}{by}" + (f" ({data})" if data else "")


def _submitted(told: Mapping[str, Any]) -> str:
    job = told.get("job") or {}
    by = f" by {job['user']}" if job.get("user") else ""
    return f"submitted{by}" + (f" as {job['name']}" if job.get("name") else "")


_EVENTS = {
    "submitted": _submitted,
    "wished": lambda told: f"{told['by']} wants it to {told['wish']}",
    "scaled": lambda told: f"{told['by']} wants {_workers(limits(told['min_workers'], told['max_workers']))}",
    "moved": lambda told: f"{told['by']} wants it on {told['node'] or 'any node'}{_because(told.get('why', ''))}",
    "launched": lambda told: f"{told['worker']} starts on {_seat(told['seat'])}",
    "running": lambda told: f"{told['worker']} runs (pid {told['pid']})",
    "leaving": lambda told: f"{told['worker']} leaves{_because(told['why'])}",
    "exited": _exited,
    "resized": lambda told: f"{told['before']} → {_workers(told['workers'])}{_because(told['text'])}",
    "retried": lambda told: f"is tried again{_because(told['text'])}",
    "progressed": _progressed,
    "kept": lambda told: f"{'keeps' if told.get('keeps', True) else 'does not keep'} its progress: {told['how']}",
    "interrupted": lambda told: f"{told['text']}: {span(told['lost_s'])} of its work are lost",
    "stuck": lambda told: told["text"],
    "warned": lambda told: told["text"],
    "migrated": lambda told: f"moved to {told['node']}, paused for {span(told.get('paused_s', 0.0))}",
    "ended": lambda told: f"{told['phase']}{_because(told.get('message', ''))}",
    "noted": _noted,
}
