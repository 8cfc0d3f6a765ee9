"""What carries a plan out: backends launch and stop workers, and report nodes and exits."""
