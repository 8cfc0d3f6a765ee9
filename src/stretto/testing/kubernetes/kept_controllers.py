"""Controllers as processes, kept running as a Deployment would: one that ends is started again.

Workers reach them through a `Wire` that stands for their Service, they reach the API server through another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stretto.testing.kubernetes.controller_process import command_line
from stretto.testing.kubernetes.guard import Guard
from stretto.testing.kubernetes.processes import Program, free_port
from stretto.testing.kubernetes.wire import Wire

_LOOK_S = 0.2


def through(wire: Wire, kubeconfig: Path) -> Path:
    """The same access, by way of that wire."""
    content: dict[str, Any] = json.loads(kubeconfig.read_text())
    for cluster in content["clusters"]:
        cluster["cluster"] |= {"server": f"https://127.0.0.1:{wire.port}", "tls-server-name": "kubernetes"}
    file = kubeconfig.with_suffix(f".wire-{wire.port}")
    file.write_text(json.dumps(content, indent=1))
    file.chmod(0o600)
    return file


class Controllers:
    """By number; each has a port and a log of its own."""

    def __init__(self, kubeconfig: Path, folder: Path, lease_s: float = 5.0) -> None:
        self._kubeconfig, self._folder, self._lease_s = kubeconfig, folder, lease_s
        self._ports: dict[int, int] = {}
        self._running: dict[int, Program] = {}
        self.service = Wire(lambda: [self._ports[number] for number in self._running])
        self.ended = 0
        """So many ended by themselves, for instance because they had lost their lease."""

    async def __aenter__(self) -> Self:
        self._guard = Guard()
        await self.service.__aenter__()
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeping.cancel()
        for number in list(self._running):
            await self.stop(number)
        await self.service.__aexit__(kind, error, trace)
        self._guard.close()

    def start(self, number: int = 0) -> None:
        port = self._ports.setdefault(number, free_port())
        command = command_line(self._kubeconfig, "127.0.0.1", port, self._lease_s)
        command += ["--url", f"ws://127.0.0.1:{self.service.port}"]
        self._running[number] = Program(f"controller-{number}", command, self.log(number), self._guard, {})

    def kill(self, number: int = 0) -> None:
        self._running.pop(number).kill()

    async def stop(self, number: int = 0) -> None:
        await asyncio.to_thread(self._running.pop(number).stop)

    def log(self, number: int) -> Path:
        return self._folder / f"controller-{number}.log"

    def logs(self) -> Mapping[str, str]:
        return {self.log(number).name: self.log(number).read_text(errors="replace") for number in self._ports}

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, program in list(self._running.items()):
                if not program.running:
                    self.ended += 1
                    self.start(number)
