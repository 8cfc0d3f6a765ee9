"""The decision core: snapshot in, decision out. No I/O, no clock, no randomness.

The same code decides in the simulator, on one machine and on Kubernetes. A caller's duties:
build a `Snapshot`, call `Policy.decide(view, memory)`, check it with `invariants.check`, keep
`Decision.memory` for the next call, and ask again when something happens or at `Decision.wake_s`.
"""
