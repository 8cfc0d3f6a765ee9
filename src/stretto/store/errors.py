"""What can go wrong with the store.

StoreError                exit code
├── StoreLocked           20   another process writes to it
├── StoreCorrupted        21   its contents cannot be read, or are not ours
├── StoreTooNew           22   a newer Stretto has written it
├── StoreFull             23   no room to write
├── StoreUnreachable      24   no connection, no permission, or the disk fails
├── StoreClosed           25   it was closed
└── Refused               26   what was to be written does not fit to what is there; nothing of that call was written
    ├── Stale                  the job has changed meanwhile, or an earlier write about it failed
    └── Taken                  a job's number, an idempotency key or a token is there already
"""

from __future__ import annotations

from stretto.errors import StrettoError


class StoreError(StrettoError):
    code = "store"
    exit_code = 24


class StoreLocked(StoreError):
    code = "store-locked"
    exit_code = 20


class StoreCorrupted(StoreError):
    code = "store-corrupted"
    exit_code = 21


class StoreTooNew(StoreError):
    code = "store-too-new"
    exit_code = 22


class StoreFull(StoreError):
    code = "store-full"
    exit_code = 23


class StoreUnreachable(StoreError):
    code = "store-unreachable"
    exit_code = 24


class StoreClosed(StoreError):
    code = "store-closed"
    exit_code = 25


class Refused(StoreError):
    code = "store-refused"
    exit_code = 26


class Stale(Refused):
    code = "store-stale"


class Taken(Refused):
    code = "store-taken"
