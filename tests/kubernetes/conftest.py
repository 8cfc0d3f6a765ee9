"""A real Kubernetes for the tests that ask for one (marked `cluster`), brought up once per run.

`control_plane` has no nodes: a test brings the played ones that it needs, and takes them away. Real nodes belong to a
cluster of their own (`real_node`), so that nobody counts them by mistake.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from stretto.errors import StrettoError
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.images import worker
from stretto.testing.kubernetes.node import RealNode
from stretto.testing.kubernetes.pod_network import PodNetwork, need_root


@pytest.fixture(scope="session")
def can_run_kubernetes() -> None:
    """These tests are asked for by name: where they cannot run they fail, and say what is missing."""
    try:
        need_root("a real Kubernetes")
    except StrettoError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def control_plane(can_run_kubernetes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh one; it is gone when the test is over."""
    yield from _namespace(control_plane)


@pytest.fixture(scope="session")
def pod_network(can_run_kubernetes: None) -> Iterator[PodNetwork]:
    with PodNetwork() as network:
        yield network


@pytest.fixture(scope="session")
def real_control_plane(pod_network: PodNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The one that real nodes belong to; pods reach its API server as in any cluster."""
    with ControlPlane(tmp_path_factory.mktemp("real"), network=pod_network) as running:
        yield running


@pytest.fixture(scope="session")
def real_node(real_control_plane: ControlPlane, pod_network: PodNetwork) -> Iterator[RealNode]:
    """With the worker's image."""
    with RealNode(real_control_plane, "real-a", pod_network, images=[worker()]) as node:
        yield node


@pytest.fixture(scope="session")
def second_node(real_node: RealNode) -> Iterator[RealNode]:
    """Another one in the same cluster, on the same network, with the same image."""
    with RealNode(real_node.control_plane, "real-b", real_node.network, images=[worker()]) as node:
        yield node


@pytest.fixture
def real_namespace(real_control_plane: ControlPlane) -> Iterator[str]:
    yield from _namespace(real_control_plane)


def _namespace(control_plane: ControlPlane) -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    control_plane.create_namespace(name)
    yield name
    control_plane.delete_namespace(name)
