"""A real Kubernetes for tests and benchmarks, with real nodes and with nodes that are only played."""
