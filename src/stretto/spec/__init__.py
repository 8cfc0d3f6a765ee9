"""The job file: what a user submits, in YAML or Python, checked once at the edge.

    name: mnist
    elastic: {min: 1, max: 8}
    resources: {gpu: 1, cpu: 2, memory: 4Gi}
    run: python train.py

`load` reads one from a path, a text or a mapping and gives a `JobFile`, or raises one `SpecError` that names every
problem with its line, its field and what to change. `JobFile.request()` turns it into the core's units. `schema` is
the JSON Schema for editors and other clients.
"""

from stretto.spec.loading import load, schema
from stretto.spec.model import JobFile

__all__ = ["JobFile", "load", "schema"]
