"""`stretto up` on a machine whose disk fails and whose clock is set, as a file of two numbers says.

    LD_PRELOAD=…/failing.so TROUBLES=FILE python troubled_server.py --data …

The file holds how many of a hundred writes to files fail with EIO (read by the library), and by how many seconds the
clock is wrong.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time

LAYOUT = struct.Struct("<qd")


def main() -> None:
    # What it starts has a whole disk.
    os.environ.pop("LD_PRELOAD", None)
    with open(os.environ.pop("TROUBLES"), "rb") as file:
        troubles = mmap.mmap(file.fileno(), LAYOUT.size, prot=mmap.PROT_READ)
    from stretto import clock
    from stretto.cli import main as command

    def wall() -> float:
        return time.time() + float(LAYOUT.unpack(troubles[:])[1])  # noqa: TID251

    clock.Clock.__init__.__defaults__ = (wall, *(clock.Clock.__init__.__defaults__ or ())[1:])
    sys.argv = ["stretto", "up", *sys.argv[1:]]
    command()


if __name__ == "__main__":
    main()
