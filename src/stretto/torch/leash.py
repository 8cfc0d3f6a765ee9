"""Keeps the host at most one step ahead of its GPU.

With others the reduction does that: its flags are read in every step. Alone nothing would, and the host could ask for
dozens of steps before the GPU has done the first: the times that it takes between them would say nothing. One step
ahead is enough to keep the GPU busy.
"""

from __future__ import annotations

import torch


class Leash:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: torch.cuda.Event | None = None

    def pull(self) -> None:
        """At a boundary: wait until the GPU has done the step before the one that was just asked for."""
        if self._device.type != "cuda":
            return
        if self._before is not None:
            self._before.synchronize()
        # Blocking: the wait must not burn a core that other workers could use.
        self._before = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._before.record(torch.cuda.current_stream(self._device))
