"""The kernel refuses writes to one descriptor with any error (seccomp), for the thread that asks for it and those that
it starts. It is for good: so it is done in a process that ends, and who is to write again gets another number."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_WRITE = {"x86_64": 1, "aarch64": 64}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(fd: int, error: int) -> None:
    """From now on every write to this descriptor fails so."""
    steps = [
        (_LOAD, 0, 0, 0),  # The number of the call.
        (_EQUAL, 0, 3, _WRITE[platform.machine()]),
        (_LOAD, 0, 0, 16),  # Its first argument.
        (_EQUAL, 0, 1, fd),
        (_RETURN, 0, 0, _ERRNO | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    for call in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
