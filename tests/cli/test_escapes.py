"""One user's texts at another's terminal: no command of a terminal, no hidden character arrives there."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import Server, running

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202elive\u200b\u2028\x7f\r"
SCRIPT = f"import sys\nprint({EVIL!r} + '\\x1b[32mgreen\\x1b[0m')\nsys.exit({('no ' + EVIL)!r})\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("escapes")
    (folder / "evil.py").write_text(SCRIPT, encoding="utf-8")
    with running(folder, "--nodes", "1x2") as made, made.client() as client:
        job = {
            "name": "evil", "run": [sys.executable, str(folder / "evil.py")], "labels": {"team": EVIL}, "retries": 0,
            "hyperparameters": {"model": EVIL},
        }  # fmt: skip
        client.run(job)
        client.submit({**job, "run": f"sleep 600 # {EVIL}", "after": ["evil"], "name": "waits"})
        yield made


@pytest.mark.parametrize(
    "words",
    [
        ["ps", "-a"], ["show", "evil"], ["why", "evil"], ["events", "evil"], ["events"], ["logs", "evil"], ["nodes"],
        ["forecast"], ["class", "list"], ["show", "waits"], ["why", "waits"], ["show", EVIL], ["cancel", EVIL, "none"],
        ["ps", "-a", "--json"], ["show", "evil", "--json"], ["events", "--json"], ["logs", "evil", "--json"],
        ["logs", "-f", "evil"], ["logs", "-f", "evil", "--json"], ["top", "--json"], ["submit", EVIL], [EVIL],
    ],
    ids=lambda words: " ".join(words).encode("unicode_escape").decode(),
)  # fmt: skip
def test_no_command_of_a_terminal_reaches_it(server: Server, words: list[str]) -> None:
    done = server.stretto(*words)
    text = done.stdout + done.stderr
    if words[0] == "logs" and "--json" not in words:
        # Colours stay; that they end is seen to.
        assert "\x1b[32mgreen\x1b[0m" in text
        text = text.replace("\x1b[32m", "").replace("\x1b[0m", "").replace("\r", "")
    hidden = {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")}
    assert hidden <= {"\n", "\t"}, ascii(text)


def test_json_says_the_same_nevertheless(server: Server) -> None:
    assert json.loads(server.stretto("show", "evil", "--json").stdout)["labels"] == {"team": EVIL}
    assert EVIL in json.loads(server.stretto("logs", "evil", "--json").stdout)["text"]


def test_a_log_can_be_had_as_it_was_written(server: Server, tmp_path: Path) -> None:
    for follow in ([], ["-f"]):
        with (tmp_path / "log").open("wb") as log:
            with server.begin("logs", "evil", "--raw", *follow, stdout=log) as process:
                process.wait(60)
            assert process.returncode == 0
        assert EVIL.encode() in (tmp_path / "log").read_bytes()
