"""The control plane: who is in a job, and what it was told.

`coordinator` decides (pure): `events` go in and effects come out, `roster` holds what it knows, `lists` says who should
be in next, `journal` what must survive. `coordination` talks to the workers.
"""
