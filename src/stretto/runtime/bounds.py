"""How long a message may be that a WebSocket takes in: changed while it is open."""

from __future__ import annotations

from websockets.protocol import Protocol


def widen(protocol: Protocol, most_bytes: int) -> None:
    """From now on."""
    # The name has changed between versions of the library.
    for name in ("max_message_size", "max_size"):
        if hasattr(protocol, name):
            setattr(protocol, name, most_bytes)
