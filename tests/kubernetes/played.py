"""What tests ask of played nodes: whose pods run there, and that they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controllers import until

from stretto.testing.kubernetes.background_nodes import BackgroundNodes
from stretto.testing.kubernetes.fake_objects import FakeNode, FakePod


class Played:
    def __init__(self, nodes: BackgroundNodes) -> None:
        self.nodes = nodes

    def running(self, namespace: str, job: str) -> list[FakePod]:
        """Pods of the workers of a job that run and are to stay."""
        mine = self.nodes.ask(lambda agent: [pod for pod in agent.pods.values() if pod.namespace == namespace])
        return [
            pod for pod in mine if pod.name.startswith(f"{job}-w") and pod.state == "running" and not pod.stopping
        ]  # fmt: skip

    def finish(self, namespace: str, job: str, code: int = 0) -> None:
        """The script of every worker ends."""
        for pod in self.running(namespace, job):
            self.nodes.do(lambda agent, pod=pod: agent.finish(pod, code))  # type: ignore[misc]

    def has(self, namespace: str, job: str, count: int) -> list[FakePod]:
        return until(
            lambda: pods if len(pods := self.running(namespace, job)) == count else [], f"{count} pods of {job}"
        )


@contextmanager
def played(kubeconfig: Path, nodes: Sequence[FakeNode], **options: Any) -> Iterator[Played]:
    with BackgroundNodes(kubeconfig, nodes, **options) as running:
        yield Played(running)
