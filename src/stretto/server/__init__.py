"""The control plane of one machine: takes jobs, decides, carries out, remembers. See docs/design/control-plane.md."""
