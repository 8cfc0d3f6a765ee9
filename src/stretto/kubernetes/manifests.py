"""The generated part of `deploy/kubernetes`: the definition of ElasticJob, and its rules as a patch.

`python -m stretto.kubernetes.manifests --write deploy/kubernetes` writes it anew; a test compares the two.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from stretto.kubernetes.schema import cel_patch, crd

_HEADER = "# Generated from the job file's model: python -m stretto.kubernetes.manifests --write deploy/kubernetes\n"


class _Plain(yaml.SafeDumper):
    """Without anchors, which kubectl understands but people do not like to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated() -> dict[str, str]:
    """The text of every generated file, by its path in the folder."""
    return {"base/crd.yaml": _text(crd(cel=False)), "cel/rules.yaml": _text(cel_patch())}


def write(folder: Path) -> None:
    for path, text in generated().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m stretto.kubernetes.manifests", description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path, required=True, help="where the manifests are")
    write(parser.parse_args(arguments).write)


def _text(value: Any) -> str:
    return _HEADER + yaml.dump(value, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    main()
