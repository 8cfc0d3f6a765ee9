"""A made-up `pynvml` for machines without GPUs: it lists GPUs or fails as it is told, in this and in other processes.

`put` leaves a copy of this file, under the name of the module it stands for, in a folder for PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

_TOLD = Path(__file__).with_name("made_up_nvml.json")


def put(folder: Path, *uuids: str, broken: dict[int, str] | None = None, fails: str = "") -> Path:
    """GPUs with these UUIDs; `broken` numbers raise the error of that name when asked for, `fails` is raised by all."""
    folder.mkdir(exist_ok=True)
    shutil.copy(__file__, folder / "pynvml.py")
    told = {"uuids": uuids, "broken": {str(index): name for index, name in (broken or {}).items()}, "fails": fails}
    (folder / _TOLD.name).write_text(json.dumps(told))
    return folder


def loaded(folder: Path) -> Any:
    """The module that `put` left there, for `sys.modules`."""
    spec = importlib.util.spec_from_file_location("pynvml", folder / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the code under test calls, and the names that nvidia-ml-py gives its errors.


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError): ...


class NVMLError_DriverNotLoaded(NVMLError): ...


class NVMLError_LibRmVersionMismatch(NVMLError): ...


class NVMLError_GpuIsLost(NVMLError): ...


class NVMLError_NoPermission(NVMLError): ...


class NVMLError_Unknown(NVMLError): ...


class _Memory(NamedTuple):
    total: int


def _told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_TOLD.read_text())
    return found


def _error(name: str) -> NVMLError:
    made: NVMLError = globals()[f"NVMLError_{name}"](f"made up: {name}")
    return made


def nvmlInit() -> None:
    if _told()["fails"]:
        raise _error(_told()["fails"])


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_told()["uuids"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if str(index) in _told()["broken"]:
        raise _error(_told()["broken"][str(index)])
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_told()["uuids"][handle])


def nvmlDeviceGetName(handle: int) -> bytes:
    return b"NVIDIA H200"


def nvmlDeviceGetMemoryInfo(handle: int) -> _Memory:
    return _Memory(143_771 << 20)
