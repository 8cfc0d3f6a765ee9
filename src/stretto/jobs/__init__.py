"""What a job is, what happens to it, and what follows from that: pure values, no clock, no I/O."""
