"""Nodes, devices and shares of a machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stretto.backends.local.gpus import Gpu, kind_of
from stretto.backends.local.machine import discover, memory_mib, parse_shape
from stretto.backends.protocol import Launch
from stretto.errors import UsageError

H200 = [Gpu(f"GPU-{number}", "h200", 143_771) for number in range(8)]


def seat(node: str, *devices: int, **changes: Any) -> Launch:
    words: dict[str, Any] = {"id": "a", "job": 1, "worker": "w", "command": ("true",), "cwd": "/", "env": {}, "log": ""}
    return Launch(**{**words, "node": node, "devices": devices, **changes})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA", "nvidia"),
    ],
)
def test_names_of_device_types(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_gpus_of_one_machine() -> None:
    machine = discover(gpus=H200, cores=range(16))
    (node,) = machine.nodes
    assert (node.name, node.pool, node.devices, node.cpu_milli) == ("local", "h200", 8, 16_000)
    assert (node.gpu_memory_mib, node.memory_mib) == (143_771, memory_mib())
    assert machine.visible_devices("local", (5, 2)) == "GPU-5,GPU-2"
    assert machine.variables(seat("local", 3))["CUDA_VISIBLE_DEVICES"] == "GPU-3"
    assert machine.variables(seat("local"))["CUDA_VISIBLE_DEVICES"] == ""
    assert machine.variables(seat("local", 0, 1))["OMP_NUM_THREADS"] == "4"
    assert machine.affinity(seat("local", 0)) == ()


def test_gpus_in_virtual_nodes() -> None:
    machine = discover("2x3", gpus=H200, cores=range(16))
    assert [(node.name, node.devices) for node in machine.nodes] == [("node0", 3), ("node1", 3)]
    assert machine.visible_devices("node1", (0, 2)) == "GPU-3,GPU-5"
    assert machine.nodes[0].memory_mib == memory_mib() // 2
    with pytest.raises(UsageError, match="3 nodes of 4 GPUs cannot be made of 8 h200"):
        discover("3x4", gpus=H200)


def test_several_kinds_are_several_nodes() -> None:
    mixed = [*H200[:2], Gpu("GPU-x", "a100", 81_920)]
    machine = discover(gpus=mixed, cores=range(6))
    assert [(node.pool, node.devices, node.cpu_milli) for node in machine.nodes] == [
        ("h200", 2, 4000),
        ("a100", 1, 2000),
    ]
    assert machine.visible_devices("node1", (0,)) == "GPU-x"


def test_slots_of_whole_cores_have_their_own() -> None:
    machine = discover("2x2", gpus=(), cores=range(10, 19))
    assert [(node.pool, node.devices, node.cpu_milli) for node in machine.nodes] == [("cpu", 2, 4500)] * 2
    cores = [machine.affinity(seat(node, device)) for node in ("node0", "node1") for device in (0, 1)]
    assert cores == [(10, 11), (12, 13), (14, 15), (16, 17)]
    assert machine.affinity(seat("node1", 0, 1)) == (14, 15, 16, 17)
    assert machine.variables(seat("node1", 0))["OMP_NUM_THREADS"] == "2"
    assert machine.variables(seat("node1", 0))["CUDA_VISIBLE_DEVICES"] == ""


def test_slots_smaller_than_a_core_share() -> None:
    machine = discover("2x4", gpus=(), cores=(0, 1))
    assert [node.cpu_milli for node in machine.nodes] == [1000, 1000]
    assert machine.affinity(seat("node0", 0)) == ()
    assert machine.cpu_milli(seat("node0", 0, 1)) == 500
    assert machine.variables(seat("node0", 0))["OMP_NUM_THREADS"] == "1"


def test_a_job_may_set_its_threads_itself() -> None:
    machine = discover("4", gpus=(), cores=range(8))
    own = machine.variables(seat("local", 0, env={"OMP_NUM_THREADS": "7"}))
    assert "OMP_NUM_THREADS" not in own
    assert own["MKL_NUM_THREADS"] == "7"
    assert machine.variables(seat("local", 0, cpu_milli=3900))["OMP_NUM_THREADS"] == "3"


def test_the_real_machine_has_a_device() -> None:
    machine = discover()
    assert sum(node.devices for node in machine.nodes) >= 1
    if machine.nodes[0].pool == "cpu":
        assert machine.nodes[0].devices == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("shape", ["0", "2x0", "0x4", "x4", "2x", "two", "2x4x2", "-1", "99999"])
def test_shapes_that_are_none(shape: str) -> None:
    with pytest.raises(UsageError):
        parse_shape(shape)


def test_shapes() -> None:
    assert (parse_shape(""), parse_shape("4"), parse_shape("2x4")) == ((1, 0), (1, 4), (2, 4))
