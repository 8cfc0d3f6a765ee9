"""The experiments: published ones re-run, and ours, each with its table."""
