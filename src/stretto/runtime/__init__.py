"""What a worker imports, next to any framework: the standard library, numpy and one small WebSocket client."""
