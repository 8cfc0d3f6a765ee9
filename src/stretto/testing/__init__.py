"""A coordinator and real worker processes, without a control plane: for tests and benchmarks."""

from stretto.testing.harness import Harness, Worker

__all__ = ["Harness", "Worker"]
