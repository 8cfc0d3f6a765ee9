"""The simulated world: traces in, decisions by the real policies, metrics out. Virtual time only."""
