"""Write the tables of policies in README.md and docs/policies.md anew: `make docs`.

A page keeps its table between two marks, `<!-- policies: long -->` (or `short`, or `options`) and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from stretto.cli.policy import markdown, options_markdown

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "policies.md")
_TABLE = re.compile(r"(<!-- policies: (long|short|options) -->\n).*?(<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """The page with today's table."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", text)


def _table(kind: str) -> str:
    return options_markdown() if kind == "options" else markdown(short=kind == "short")


def main() -> None:
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
