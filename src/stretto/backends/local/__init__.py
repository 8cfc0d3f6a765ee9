"""One machine: worker processes, started warm from a fork server where their environment allows it."""
