"""Write what pages repeat anew, the tables of policies and the examples of the guide: `make docs`.

A page keeps its table between two marks, `<!-- policies: long -->` (or `short`, or `options`) and `<!-- end -->`; a
page of docs/torch its example between `<!-- example: best.py -->`, a file of examples/habits, and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from stretto.cli.policy import markdown, options_markdown

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "policies.md")
GUIDE = sorted((ROOT / "docs" / "torch").glob("*.md"))
EXAMPLES = ROOT / "examples" / "habits"
_TABLE = re.compile(r"(<!-- policies: (long|short|options) -->\n).*?(<!-- end -->)", re.DOTALL)
_EXAMPLE = re.compile(r"(<!-- example: (\w+\.py) -->\n).*?(<!-- end -->)", re.DOTALL)
_DOCSTRING = re.compile(r'\A""".*?"""\n+', re.DOTALL)


def renewed(text: str) -> str:
    """The page with today's table, or example."""
    text = _TABLE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", text)
    return _EXAMPLE.sub(lambda found: f"{found[1]}{_example(found[2])}{found[3]}", text)


def examples(text: str) -> list[str]:
    """The files that a page shows."""
    return [found[2] for found in _EXAMPLE.finditer(text)]


def _example(name: str) -> str:
    code = (EXAMPLES / name).read_text(encoding="utf-8")
    return f"```python\n{_DOCSTRING.sub('', code)}```\n"


def _table(kind: str) -> str:
    return options_markdown() if kind == "options" else markdown(short=kind == "short")


def main() -> None:
    for page in (*PAGES, *GUIDE):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
