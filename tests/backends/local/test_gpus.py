"""Which GPUs are ours: NVML, CUDA_VISIBLE_DEVICES, and what is said when NVML fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made_up_nvml import loaded, put
from stretto.backends.local.gpus import entries_of, find_gpus
from stretto.backends.local.machine import discover
from stretto.errors import Unavailable, UsageError

UUIDS = ("GPU-11aa", "GPU-11ab", "GPU-22cc", "GPU-33dd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with nothing of NVIDIA's."""
    for folder in ("dev", "proc", "sys/bus/pci/devices"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    return tmp_path / "root"


def nvml(
    patch: pytest.MonkeyPatch, tmp_path: Path, *uuids: str, broken: dict[int, str] | None = None, fails: str = ""
) -> None:
    patch.setitem(sys.modules, "pynvml", loaded(put(tmp_path / "nvml", *uuids, broken=broken, fails=fails)))


def device_file(root: Path, name: str = "nvidiactl") -> None:
    (root / "dev" / name).touch()


def card(root: Path, kind: str = "0x030200", vendor: str = "0x10de") -> None:
    folder = root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir()
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,2,-1,1", [0, 2]),
        ("1,9,0", [1]),
        ("1gpu,2", [1, 2]),
        ("0,x,1", [0]),
        ("0,,1", [0]),
        ("GPU-22cc,GPU-11aa", [2, 0]),
        ("GPU-2,GPU-3", [2, 3]),
        ("GPU-3,GPU-11,GPU-2", [3]),
        ("GPU-3,GPU-ff,GPU-2", [3]),
        ("1,1", []),
        ("GPU-22CC,GPU-3", [2, 3]),
        ("GPU-2,0", [2]),
        ("0,GPU-2", [0]),
        ("+2,1", [2, 1]),
        ("GPU-2,GPU-22", []),
        ("GPU-", []),
        (" GPU-2", []),
        (",0", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("9", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    visible: str | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, tmp_path, *UUIDS)
    assert [gpu.uuid for gpu in find_gpus(visible)] == [UUIDS[index] for index in expected]


@pytest.mark.parametrize("visible", ["MIG-GPU-11aa/1/0", "0,MIG-4c5f"])
def test_parts_of_gpus_are_refused(visible: str) -> None:
    with pytest.raises(UsageError, match="a part of a GPU") as refused:
        entries_of(visible)
    assert "--cpu" in refused.value.hint


def test_the_servers_own_variable_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, tmp_path, *UUIDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    machine = discover()
    assert str(machine) == "2 h200"
    assert machine.visible_devices("local", (0, 1)) == "GPU-33dd,GPU-11ab"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert str(discover("3")) == "3 CPU slots (CUDA_VISIBLE_DEVICES=-1 shows no GPUs)"


def test_slots_of_the_processor_beside_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml(monkeypatch, tmp_path, *UUIDS)
    assert str(discover()) == "4 h200"
    with pytest.raises(UsageError, match="1 nodes of 6 GPUs cannot be made of 4 h200") as refused:
        discover("1x6")
    assert "--cpu" in refused.value.hint
    machine = discover("1x6", cpu=True)
    assert str(machine) == "6 CPU slots (--cpu)"
    assert machine.visible_devices("local", (0,)) == ""
    assert str(discover("2x2", cpu=True)) == "node0: 2 CPU slots, node1: 2 CPU slots (--cpu)"


@pytest.mark.parametrize("fails", ["LibraryNotFound", "DriverNotLoaded"])
def test_a_machine_without_anything_of_nvidias_has_none_quietly(
    fails: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, tmp_path, fails=fails)
    card(root, vendor="0x1002")
    assert find_gpus(root=root) == []


def test_the_sound_of_a_card_is_no_card(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, tmp_path, fails="DriverNotLoaded")
    card(root, kind="0x040300")
    assert find_gpus(root=root) == []


def test_a_container_that_was_given_no_gpus_has_none_quietly(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, tmp_path, fails="DriverNotLoaded")
    card(root)
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").touch()
    assert find_gpus(root=root) == []


@pytest.mark.parametrize("fails", ["LibRmVersionMismatch", "Unknown", "NoPermission", "GpuIsLost"])
def test_a_failure_is_said(fails: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, tmp_path, *UUIDS, fails=fails)
    with pytest.raises(Unavailable, match=f"NVML says made up: {fails} .NVMLError_{fails}.") as said:
        find_gpus(root=root)
    assert "--cpu" in said.value.hint


def test_a_library_that_is_missing_beside_device_files_is_said(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, tmp_path, fails="LibraryNotFound")
    device_file(root, "nvidia0")
    with pytest.raises(Unavailable, match="LibraryNotFound"):
        find_gpus(root=root)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unavailable, match="pynvml"):
        find_gpus(root=root)
    (root / "dev/nvidia0").rename(root / "dev/nvidia-caps")
    assert find_gpus(root=root) == []


def test_a_card_whose_driver_is_not_loaded_is_said(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, tmp_path, fails="DriverNotLoaded")
    card(root)
    with pytest.raises(Unavailable, match="DriverNotLoaded"):
        find_gpus(root=root)


def test_a_lost_gpu_matters_if_it_is_visible(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, tmp_path, *UUIDS, broken={1: "GpuIsLost"})
    for visible in (None, "0,1"):
        with pytest.raises(Unavailable, match="GpuIsLost") as said:
            find_gpus(visible, root)
        assert "CUDA_VISIBLE_DEVICES can leave a broken GPU out" in said.value.hint
    assert [gpu.uuid for gpu in find_gpus("0,2", root)] == ["GPU-11aa", "GPU-22cc"]
    assert [gpu.uuid for gpu in find_gpus("GPU-11", root)] == ["GPU-11aa"]


def test_a_broken_nvml_is_not_asked_where_no_gpu_is_visible(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, tmp_path, *UUIDS, fails="Unknown")
    assert find_gpus("", root) == []
    assert str(discover("2", cpu=True)) == "2 CPU slots (--cpu)"
