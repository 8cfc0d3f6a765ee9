"""The GPUs of this machine: those that NVML lists and CUDA_VISIBLE_DEVICES shows.

Three answers are told apart. NVML lists GPUs: the visible ones are ours. Nothing of NVIDIA's is here: there are none,
and nobody need hear of it. There is a card or a device file, and NVML fails: that is an error which names NVML's own,
since a server that took slots of the processor for GPUs would go unnoticed until somebody wonders why training is slow.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import StrettoError, Unavailable, UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
INSTEAD = "`--cpu` uses the processor instead"

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""Class of PCI devices that are display or 3D controllers; the audio output of a card has NVIDIA's number too."""


class Gpu(NamedTuple):
    uuid: str
    kind: str
    memory_mib: int


Found = Gpu | Exception
"""A GPU, or what NVML said instead."""


def find_gpus(visible: str | None = None, root: Path = Path("/")) -> list[Gpu]:
    """The GPUs in the order that CUDA would count them. `visible` is CUDA_VISIBLE_DEVICES, None if it is not set;
    where it shows none NVML is not asked. `root` is where device files and the like are looked for."""
    wanted = None if visible is None else entries_of(visible)
    if wanted == []:
        return []
    found = _listed(root)
    chosen = found if wanted is None else [found[index] for index in indices_of(wanted, found)]
    return [_whole(gpu) for gpu in chosen]


def entries_of(visible: str) -> list[int | str]:
    """Numbers or UUIDs of CUDA_VISIBLE_DEVICES, whichever it begins with, up to the first entry that is something else:
    that hides all that follow."""
    entries: list[int | str] = []
    for word in visible.split(","):
        entry = _entry(word)
        if entry is None or (entries and type(entry) is not type(entries[0])):
            break
        entries.append(entry)
    return entries


def _entry(word: str) -> int | str | None:
    if word.startswith("MIG-"):
        raise UsageError(
            f"{VISIBLE} names {word}, a part of a GPU: slots are whole GPUs", hint=f"name whole GPUs, or {INSTEAD}"
        )
    if re.match(r"GPU-.", word):
        return word.lower()
    number = re.match(r"\s*\+?(\d+)", word)  # CUDA reads as far as there are digits.
    return int(number[1]) if number else None


def indices_of(entries: Sequence[int | str], found: Sequence[Found]) -> list[int]:
    """Which GPUs these are, by CUDA's rules: one that is not there hides all that follow, one named twice hides all."""
    indices: list[int] = []
    for entry in entries:
        index = _index(entry, found)
        if index is None:
            break
        if index in indices:
            return []
        indices.append(index)
    return indices


def _index(entry: int | str, found: Sequence[Found]) -> int | None:
    """A UUID may be cut short as long as it fits one GPU only."""
    if isinstance(entry, int):
        return entry if entry < len(found) else None
    fitting = [index for index, gpu in enumerate(found) if isinstance(gpu, Gpu) and gpu.uuid.lower().startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


# NVML.


def _listed(root: Path) -> list[Found]:
    """All GPUs; none where there is nothing of NVIDIA's."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        return _none_or_failure(error, _has_device_files(root))
    try:
        nvml.nvmlInit()
    except Exception as error:
        return _none_or_failure(error, _is_here(nvml, error, root))
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception as error:
        raise _failure(error) from None
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Found:
    """One that cannot be read matters only if it is visible."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        return Gpu(_text(uuid), kind_of(_text(name)), int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20)
    except Exception as error:
        return error


def _whole(gpu: Found) -> Gpu:
    if isinstance(gpu, Gpu):
        return gpu
    raise _failure(gpu, f"{VISIBLE} can leave a broken GPU out; ")


def _none_or_failure(error: Exception, is_here: bool) -> list[Found]:
    if is_here:
        raise _failure(error) from None
    return []


def _failure(error: Exception, hint: str = "") -> StrettoError:
    return Unavailable(
        f"the GPUs of this machine cannot be counted: NVML says {error} ({type(error).__name__})",
        hint=f"does `nvidia-smi` work? {hint}{INSTEAD}",
    )


def _is_here(nvml: Any, error: Exception, root: Path) -> bool:
    """Whether an NVML that does not even begin has something to begin with."""
    no_gpus = getattr(nvml, "NVMLError_GpuNotFound", ())  # Older modules have no such error.
    if isinstance(error, (nvml.NVMLError_LibraryNotFound, no_gpus)):
        return _has_device_files(root)
    if isinstance(error, nvml.NVMLError_DriverNotLoaded):
        return _has_device_files(root) or _has_card_without_driver(root)
    return True


def _has_device_files(root: Path) -> bool:
    """In a container they are there if its owner was given the GPUs, whatever the machine has."""
    return any(re.fullmatch(r"nvidia(ctl|\d+)", path.name) for path in root.glob("dev/nvidia*"))


def _has_card_without_driver(root: Path) -> bool:
    """A card on the bus that nobody drives. Where its driver is loaded and has left no device files for us, we are in a
    container that was given no GPUs."""
    if (root / "proc/driver/nvidia/version").exists():
        return False
    return any(_is_card(device) for device in root.glob("sys/bus/pci/devices/*"))


def _is_card(device: Path) -> bool:
    try:
        kinds = (device / "vendor").read_text().strip(), (device / "class").read_text()[: len(_DISPLAY)]
    except OSError:
        return False
    return kinds == (_NVIDIA, _DISPLAY)


def kind_of(name: str) -> str:
    """`NVIDIA H200` → `h200`, `Tesla V100-SXM2-16GB` → `v100-sxm2-16gb`."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").split("-")
    while words[1:] and words[0] in ("nvidia", "tesla"):
        del words[0]
    return "-".join(words)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
