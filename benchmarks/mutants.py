#!/usr/bin/env python3
"""Put the mistakes of a hostile tester's report back, one after the other, and see that tests fail with it.

    benchmarks/mutants.py                 # all of them, as a table; exit 1 if one survives
    benchmarks/mutants.py 4 9             # those of two of the mistakes
    benchmarks/mutants.py --list

A mutant is one text of one file and what stands there instead. Nothing of this tree is touched: it is copied, with an
environment that finds the copy first. All the tests must pass there as it is; a text that is not there any more, or is
there twice, is an error, so that whoever changes the code changes the mutant. A test that hangs counts as one that
fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 300.0

TITLES = {
    1: "what a job puts in the place of its files holds up the server",
    2: "one job's damage is everybody's",
    3: "what is the server's is in everybody's reach",
    4: "a fork server remembers its first job, and none is ever given up",
    5: "who is not proved takes part, and newcomers fail without end",
    6: "others' texts command a terminal",
    7: "logs are open to all, and larger than they may be",
    8: "a launch that fails is believed to run",
    9: "what ends while the disk is full has never ended",
    10: "a step of the clock stops the scheduling",
    11: "clients hold up the server, and /readyz knows nothing",
    12: "a start that the server's death interrupted is begun anew",
    13: "one job takes the disk, the threads, or the workers of another server",
}
"""The numbers of the report; the last one is what was found with them."""


class Mutant(NamedTuple):
    mistake: int
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Of which at least one must fail."""


BACKEND = "tests/backends/local/test_backend.py"
TROUBLES = "tests/server/test_troubles.py"
BAD_MACHINE = "tests/server/test_bad_machine.py"

MUTANTS = (
    Mutant(
        1, "FIFOs and links are opened like files", "src/stretto/jobfiles.py",
        "_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC", "_ALWAYS = os.O_NOCTTY | os.O_CLOEXEC",
        ("tests/test_jobfiles.py",),
    ),
    Mutant(
        1, "devices are read like files", "src/stretto/jobfiles.py",
        "    if kind != stat.S_IFREG:\n", "    if False:\n", ("tests/test_jobfiles.py",),
    ),
    Mutant(
        2, "a damaged journal is nobody's trouble in particular", "src/stretto/server/loop.py",
        "        except Exception as error:\n            self._in_trouble(active, error)\n        finally:\n",
        "        except TimeoutError as error:\n            self._in_trouble(active, error)\n        finally:\n",
        (f"{TROUBLES}::test_one_damaged_journal",),
    ),
    Mutant(
        2, "a damaged row keeps the server from starting", "src/stretto/store/reading.py",
        "            damaged.append(damage.found(connection, number, str(error)))\n", "            raise error\n",
        (f"{TROUBLES}::test_one_whose_row_is_damaged",),
    ),
    Mutant(
        2, "a row that is damaged later stops all writing", "src/stretto/store/writing.py",
        "now[number] = line.job if is_believed else _follow(before, line, number)",
        "now[number] = _follow(before, line, number)",
        (f"{TROUBLES}::test_a_row_that_is_damaged_while_the_server_runs",),
    ),
    Mutant(
        3, "a data directory that is open to others stays so", "src/stretto/api/tightening.py",
        "    os.chmod(data, 0o700)\n", "    pass\n",
        ("tests/api/test_api_process.py::test_a_data_directory_that_is_open_to_others_is_closed_once",),
    ),
    Mutant(
        4, "a fork server has its first job's environment", "src/stretto/backends/local/forkserver.py",
        "    return {**own, **shaping, ", "    return {**env, **own, **shaping, ",
        ("tests/backends/test_forkserver.py::test_nothing_of_one_job_is_left_for_the_next",),
    ),
    Mutant(
        4, "fork servers are not bounded in number", "src/stretto/backends/local/forkserver.py",
        "        while len(self._alive()) >= self._most or self._held_mib()", "        while self._held_mib()",
        ("tests/backends/test_forkserver.py::test_the_one_that_was_not_asked_for_the_longest_time_makes_room",),
    ),
    Mutant(
        5, "the coordinator believes everybody", "src/stretto/runtime/introduction.py",
        "        return Proof(proof=_proof(\"host\", hello, challenge, secret).hex()) if known else None\n",
        "        return Proof(proof=_proof(\"host\", hello, challenge, secret).hex())\n",
        ("tests/control/test_wire.py::test_who_does_not_is_told_so_and_nothing_else",),
    ),
    Mutant(
        5, "so do the rendezvous and whoever sends state", "src/stretto/runtime/handshake.py",
        "        return hmac.compare_digest(given, self.proof(side, guest, host, *about))\n", "        return True\n",
        ("tests/runtime/test_door.py::test_another_job_role_or_generation_is_turned_away",),
    ),
    Mutant(
        5, "newcomers that fail are tried every second", "src/stretto/server/loop.py",
        "tries, driver.newcomers_failed = max(failures, driver.newcomers_failed),",
        "tries, driver.newcomers_failed = failures,", ("tests/server/test_newcomers.py",),
    ),
    Mutant(
        6, "escapes reach the terminal", "src/stretto/visible.py",
        "    return _UNSEEN.sub(_written, text)\n\n\ndef in_line", "    return text\n\n\ndef in_line",
        ("tests/test_visible.py", "tests/cli/test_escapes.py"),
    ),
    Mutant(
        7, "logs are open to all", "src/stretto/backends/local/backend.py",
        "            os.fchmod(fd, 0o600)\n", "            os.fchmod(fd, 0o644)\n",
        (f"{BACKEND}::test_the_last_words_are_in_the_log_when_the_end_is_told",),
    ),
    Mutant(
        7, "logs have no bound", "src/stretto/backends/local/supervisor.py",
        "    if about.st_blocks * 512 <= most_bytes:\n", "    if True:\n",
        (f"{BACKEND}::test_a_log_takes_no_more_room_than_it_may",),
    ),
    Mutant(
        8, "nobody compares what is believed with what is there", "src/stretto/server/loop.py",
        "        for launch in alone & self._unattended:\n", "        for launch in set[str]():\n",
        (f"{BAD_MACHINE}::test_who_is_believed_to_run_and_is_not_there_is_given_up",),
    ),
    Mutant(
        8, "a launch that cannot be written down is no end", "src/stretto/server/loop.py",
        "            self._tell(Exit(launch=event.launch, how=how, text=_why_not(error), at_s=self.clock()))\n",
        "            return\n", (f"{BAD_MACHINE}::test_a_file_in_the_way_of_a_launch_is_its_end",),
    ),
    Mutant(
        9, "the supervisor dies of an exit that it cannot write", "src/stretto/backends/local/supervisor.py",
        "            except OSError as error:\n                complain(f\"{EXIT}: {error.strerror}\")\n"
        "                signal.sigtimedwait((WAKE,), TICK_S)\n",
        "            except OSError:\n                break\n", (f"{BACKEND}::test_an_exit_waits_for_room",),
    ),
    Mutant(
        9, "a journal that cannot be written ends its coordinator", "src/stretto/control/journal.py",
        "            self._write_later(data, written)\n            return written\n", "            raise\n",
        ("tests/control/test_coordination.py", "tests/test_refused_writes.py"),
    ),
    Mutant(
        9, "last words are not waited for", "src/stretto/backends/local/supervisor.py",
        "                self.pump.finish()\n", "                pass\n",
        (f"{BACKEND}::test_the_last_words_of_a_worker_are_in_its_log_when_its_end_is_told",),
    ),
    Mutant(
        10, "everything is counted by the machine's clock", "src/stretto/clock.py",
        "    def __call__(self) -> float:\n        return self._began_s + self._steady()\n",
        "    def __call__(self) -> float:\n        return self.wall()\n", ("tests/test_clock.py",),
    ),
    Mutant(
        11, "half-open requests are never closed", "src/stretto/api/bounds.py",
        "        self._head_timer = self.loop.call_later(self.all.limits.header_s, self._too_slow)\n",
        "        self._head_timer = None\n", ("tests/api/test_api_bounds.py::test_who_takes_too_long_is_hung_up_on",),
    ),
    Mutant(
        11, "job files are read in the event loop", "src/stretto/api/bodies.py",
        "return await asyncio.to_thread(_submission, request, body)", "return _submission(request, body)",
        ("tests/api/test_api_fuzz.py::test_others_are_answered_while_a_file_is_read",),
    ),
    Mutant(
        11, "/readyz does not try what a submission does", "src/stretto/server/readiness.py",
        "                return await asyncio.shield(self._writing) or self._known()\n",
        "                return self._known()\n", ("tests/api/test_api_readiness.py",),
    ),
    Mutant(
        12, "a start that was interrupted is begun anew", "src/stretto/server/loop.py",
        "            if active is None or not self._is_completed(active, name, exit):\n", "            if True:\n",
        (f"{BAD_MACHINE}::test_the_start_of_a_group_that_the_server_died_over_is_completed",),
    ),
    Mutant(
        13, "launches of one name are one", "src/stretto/backends/local/containment.py",
        "    return f\"{launch}@{owner}\"\n", "    return f\"{launch}@\"\n",
        (f"{BACKEND}::test_launches_of_one_name_in_two_data_directories_are_two",),
    ),
    Mutant(
        13, "all wait for a file system that hangs", "src/stretto/backends/local/backend.py",
        "            return await aside(worked)\n", "            return await self._in_thread(worked)\n",
        (f"{BACKEND}::test_who_waits_for_a_file_system_that_hangs_holds_up_nobody_else",),
    ),
    Mutant(
        13, "a job's folder has no bound", "src/stretto/server/disk.py",
        "    if count.bytes <= most_mib << 20:\n", "    if True:\n", ("tests/server/test_disk.py",),
    ),
    Mutant(
        13, "there is no reserve", "src/stretto/server/disk.py",
        "    if there.free < reserve:\n", "    if False:\n",
        ("tests/server/test_disk.py::test_nothing_is_accepted_below_the_reserve",),
    ),
    Mutant(
        13, "what is no order is an order to end", "src/stretto/backends/local/supervisor.py",
        "        return [order for order in text.decode(errors=\"replace\").split() if order in ORDERED]\n",
        "        return text.decode(errors=\"replace\").split()\n", ("tests/backends/local/test_supervisor_fuzz.py",),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mistakes", nargs="*", type=int, help="their numbers; all, if none is given")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.mistakes or mutant.mistake in options.mistakes]
    for mutant in MUTANTS:
        mutated(mutant, ROOT)
    if options.list:
        print("\n".join(f"{mutant.mistake:>2}  {mutant.name}" for mutant in chosen))
        return
    with tempfile.TemporaryDirectory(prefix="stretto-mutants-") as folder:
        tree = Path(folder, "tree")
        copy(tree)
        whole = failing(tree, sorted({test for mutant in chosen for test in mutant.tests}), longest_s=20 * LONGEST_S)
        if whole:
            sys.exit(f"these fail without any mutant: {whole}")
        print(f"{'':>2}  {'mutant':<58}  {'':<8}  {'s':>4}  killed by", flush=True)
        survivors = sum(not try_out(mutant, tree) for mutant in chosen)
    print(f"{len(chosen)} mutants of {len({mutant.mistake for mutant in chosen})} mistakes, {survivors} survive")
    sys.exit(survivors > 0)


def mutated(mutant: Mutant, tree: Path) -> str:
    """The file with the mistake; ends the run where it cannot be put there."""
    text = (tree / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: {text.count(mutant.old)} times in {mutant.file}, not once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def copy(tree: Path) -> None:
    """What git knows, and what it does not know yet; with an environment in which the copy hides this tree."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    ours = Path(sys.prefix)
    here = tree / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here.mkdir(parents=True)
    (tree / ".venv" / "bin").mkdir()
    shutil.copy2(ours / "pyvenv.cfg", tree / ".venv" / "pyvenv.cfg")
    for name in ("python", "python3"):
        (tree / ".venv" / "bin" / name).symlink_to(os.path.realpath(sys.executable))
    packages = ours / here.relative_to(tree / ".venv")
    (here / "a-copy.pth").write_text(f"{tree / 'src'}\nimport site; site.addsitedir({str(packages)!r})\n")


def try_out(mutant: Mutant, tree: Path) -> bool:
    """Whether it is killed."""
    whole, began_s = (tree / mutant.file).read_text(), time.monotonic()
    (tree / mutant.file).write_text(mutated(mutant, tree))
    try:
        failed = failing(tree, mutant.tests, longest_s=LONGEST_S)
    finally:
        (tree / mutant.file).write_text(whole)
    verdict = "killed" if failed else "SURVIVES"
    took_s = time.monotonic() - began_s
    print(f"{mutant.mistake:>2}  {mutant.name:<58}  {verdict:<8}  {took_s:>4.0f}  {failed}", flush=True)
    return bool(failed)


def failing(tree: Path, tests: Iterable[str], *, longest_s: float) -> str:
    """The first of them that fails; empty if they all pass."""
    words: Sequence[str] = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
    python = str(tree / ".venv" / "bin" / "python")
    with subprocess.Popen(
        [python, *words], cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return f"hangs for more than {longest_s:.0f} s"
    if process.returncode == 0:
        return ""
    found = [
        line.split(" ", 1)[1].split(" - ")[0] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    if process.returncode != 1 or not found:
        sys.exit(f"the tests cannot be run:\n{said[-3000:]}")
    return found[0].rpartition("::")[2]


if __name__ == "__main__":
    main()
