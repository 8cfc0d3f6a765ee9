"""Whatever a disk refuses writes for is borne as a full one is: kept, written when it can be, and fatal to nobody."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import jobfiles

ERRORS = ["ENOSPC", "EIO", "EDQUOT", "EROFS", "EFBIG"]

LEDGER = """
from stretto.runtime.ledger import PatientLedger
ledger = PatientLedger(path, "w")
ledger.applied(0, 0, 1)
refuse(ledger._file, error)
for step in range(1, 9):
    ledger.applied(0, step, 1)
assert open(path).read().count("applied") == 1
ledger._file = os.dup(ledger._file)
ledger.applied(0, 9, 1)
ledger.close()
assert [line.split()[2] for line in open(path).read().splitlines()[1:]] == [str(step) for step in range(10)]
"""

JOURNAL = """
import asyncio, json
from pathlib import Path
from stretto.control import journal
journal._AGAIN_S = 0.01

async def story():
    kept = journal.FileJournal(Path(path))
    assert kept.write([{"kind": "loops", "done": 1}]) is None
    refuse(kept._file.fileno(), error)
    written = kept.write([{"kind": "loops", "done": 2}])
    for _ in range(3):
        before = kept._again
        while kept._again is before:
            await asyncio.sleep(0)
    assert not written.done()
    kept._file = os.fdopen(os.dup(kept._file.fileno()), "ab", buffering=0)
    await written
    assert kept.write([{"kind": "loops", "done": 3}]) is None
    kept.close()

asyncio.run(story())
assert [json.loads(line)["done"] for line in open(path)] == [1, 2, 3]
"""

PUMP = """
import time
from stretto.backends.local import supervisor
output, says = os.pipe()
log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
refuse(log, error)
pump = supervisor.Pump(output, log, 1 << 20)
os.write(says, b"x" * 1000)
while pump._lost != 1000:
    time.sleep(0.001)
pump._log = os.dup(log)
os.write(says, b"more")
os.close(says)
pump.finish()
said = open(path).read()
assert said.startswith("\\n[1000 bytes were lost") and said.endswith("more"), said
"""


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("script", [LEDGER, JOURNAL, PUMP], ids=["ledger", "journal", "log"])
def test_what_is_refused_is_kept_or_said(tmp_path: Path, script: str, error: str) -> None:
    begin = f"import errno, os, sys\nfrom refusing import refuse\npath, error = sys.argv[1], errno.{error}\n"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", begin + script, str(tmp_path / "file")], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", ERRORS)
def test_what_passes(error: str) -> None:
    assert jobfiles.passes(OSError(getattr(errno, error), "refused"))
