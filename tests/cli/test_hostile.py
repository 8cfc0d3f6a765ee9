"""The command line in surroundings that are not what it would like: output that nobody reads, closed streams, other
encodings, addresses and tokens with mistakes in them, folders that have gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import DEADLINE_S, Server, running, until
from stretto.cli import main
from stretto.cli.options import policy_for_server
from stretto.cli.run import sizes
from stretto.client import calls
from stretto.client.finding import find
from stretto.errors import UsageError

ROOT = Path(__file__).parents[2]
STRETTO = f"{sys.executable} -m stretto.cli"
LATIN = os.fsdecode(b"caf\xe9")


def shell(server: Server, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which `stretto` is the command line. No error of ours is a traceback."""
    done = subprocess.run(
        ["bash", "-c", f"stretto() {{ {STRETTO} \"$@\"; }}\n{line}"], env=server.environment | environment,
        cwd=server.data.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("all_of_it", ["", "--json", "2>&1"])
def test_a_reader_that_leaves_does_not_hide_the_exit_code(server: Server, tmp_path: Path, all_of_it: str) -> None:
    """The job ends only when the reader has gone."""
    go = tmp_path / "go"
    job = f"echo 1; while [ ! -e {go} ]; do sleep 0.05; done; for i in 2 3 4; do echo $i; sleep 0.1; done; exit 7"
    redirected, option = (all_of_it, "") if ">" in all_of_it else ("", all_of_it)
    line = f"stretto run {option} -- sh -c '{job}' {redirected} | {{ head -1; touch {go}; }}; echo ${{PIPESTATUS[0]}}"
    first, code = shell(server, line).stdout.splitlines()
    assert first.startswith(("1", "{", "job "))
    assert code == "7"


def test_a_reader_that_leaves_a_list_is_no_error(server: Server) -> None:
    assert shell(server, "stretto policy list | true; echo ${PIPESTATUS[0]}").stdout == "0\n"


def test_a_long_log_is_printed_whole(server: Server) -> None:
    text = "€ and more of it\n" * 120_000
    script = "import sys; sys.stdout.write('€ and more of it\\n' * 120_000)"
    server.stretto("run", "--name", "long", "--", sys.executable, "-X", "utf8", "-c", script)
    assert server.stretto("logs", "long").stdout == text
    assert server.stretto("logs", "long", "--tail", "90000").stdout == text[: 90_000 * 17]
    assert json.loads(server.stretto("logs", "long", "--json", "-w", "w0").stdout)["text"] == text


def test_the_logs_of_several_workers_are_printed_one_after_the_other(server: Server) -> None:
    server.stretto("run", "--name", "several", "--workers", "2", "--", "sh", "-c", "echo 1 of $RANK; echo 2 of $RANK")
    whole = "==> w0 <==\n1 of 0\n2 of 0\n\n==> w1 <==\n1 of 1\n2 of 1\n"
    assert server.stretto("logs", "several").stdout == whole
    assert server.stretto("logs", "several", "-n", "1").stdout == "==> w0 <==\n2 of 0\n\n==> w1 <==\n2 of 1\n"
    assert "'w7'" in server.stretto("logs", "several", "-w", "w7").stderr
    with server.client() as client:
        # However small the pages are, together they are the same.
        texts, cursor = [], None
        while cursor is not None or not texts:
            call = calls.log_page("several", None, None, cursor)
            page = client._do(calls.Call(call.method, call.path, call.read, query=(*call.query, ("limit", "5"))))
            texts.append(page.text)
            cursor = page.next
        assert "".join(texts) == whole
        assert len(texts) > 4
        for wrong in ("w9:0:9", "w0:x:9", "w0:0", "w0"):
            with pytest.raises(UsageError, match="cursor"):
                client._do(calls.log_page("several", None, None, wrong))
        assert client._do(calls.log_page("several", None, None, f"w1:{2**63 - 1}:9")).text == ""


def test_a_log_that_grows_faster_than_it_is_read_has_an_end(server: Server) -> None:
    server.stretto("run", "-d", "--name", "endless", "--", "yes")
    with server.client() as client:
        until(lambda: client.logs("endless", limit=4))
        for _ in client.log_pages("endless"):
            pass
        client.cancel("endless")
        client.wait("endless", timeout_s=DEADLINE_S)


def test_streams_that_are_closed(server: Server) -> None:
    assert shell(server, "stretto ps -a >&-").returncode == 0
    assert shell(server, "stretto run -d -- true >&- 2>&- <&-").returncode == 0
    assert shell(server, "stretto show nothing-of-that-name >&- 2>&-").returncode == 5


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_other_encodings(server: Server) -> None:
    done = shell(server, "stretto run -- echo 'ünï €'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "\\xfcn\\xef \\u20ac\n")
    # Its arguments are UTF-8, although its locale is not.
    assert shell(server, "stretto run --name accents -- echo 'ünï'", **ASCII).stdout == "\\xfcn\\xef\n"
    assert "echo \\xfcn\\xef\n" in shell(server, "stretto show accents", **ASCII).stdout
    assert server.stretto("logs", "accents").stdout == "ünï\n"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1", "http://a b", "http://a..b", "http://a/ü",
     "http://a\x07"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        find(environment={"STRETTO_SERVER": url})


def test_tokens_with_something_around_them() -> None:
    where = {"STRETTO_SERVER": " http://[::1]:80/\n"}
    assert find(environment=where | {"STRETTO_TOKEN": "abc\r"}) == ("http://[::1]:80", "abc")
    for wrong in ("a\nb", "a\x00", "ü"):
        with pytest.raises(UsageError, match="the token has characters") as caught:
            find(environment=where | {"STRETTO_TOKEN": wrong})
        assert wrong not in str(caught.value), "it is nobody's business"


def test_after_takes_numbers(server: Server) -> None:
    number = server.stretto("run", "-d", "--json", "--name", "before", "--", "sleep", "600")
    number = str(json.loads(number.stdout)["id"])
    waiting = json.loads(server.stretto("run", "-d", "--json", "--after", number, "--", "echo", "over").stdout)
    with server.client() as client:
        assert client.job(waiting["id"]).spec["after"] == ["before"]
        client.cancel(number)
        client.wait(number, timeout_s=DEADLINE_S)
        client.submit({"name": "before", "run": ["sleep", "600"]})
        done = server.stretto("run", "--after", number, "--", "echo", "over")
        assert (done.returncode, done.stdout) == (0, "over\n"), "the new one of that name is not waited for"
        client.cancel("before")
    assert "no job called '987654'" in server.stretto("run", "--after", "987654", "--", "true").stderr


def test_a_policy_is_found_where_the_command_is_given(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fifo").touch()
    (tmp_path / "mine.py").write_text((ROOT / "examples" / "widest_first.py").read_text())
    assert policy_for_server("./mine.py:a") == f"{tmp_path}/mine.py:a"
    assert [policy_for_server(name) for name in ("fifo", "none.py")] == ["fifo", "none.py"]
    assert main(["policy", "set", "./mine.py", "--data", str(server.data)]) == 0
    with server.client() as client:
        assert client.policy().name == "widest-first"
        client.set_policy("stretto")


def test_what_is_not_utf_8_is_named(server: Server, tmp_path: Path) -> None:
    for words, named in (
        (["run", "--", "echo", LATIN], "run: 'caf\\xe9'"),
        (["run", "--env", f"X={LATIN}", "--", "true"], "env.X: 'caf\\xe9'"),
        (["show", LATIN], "the name: 'caf\\xe9'"),
        (["ps", "--name", LATIN], "name: 'caf\\xe9'"),
    ):
        done = server.stretto(*words)
        assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {named} is not UTF-8")
    folder = tmp_path / LATIN
    folder.mkdir()
    with pytest.raises(UsageError, match=r"the current folder: '.*/caf\\xe9' is not UTF-8"):
        calls.submit({"run": "true"}, cwd=folder)


def test_folders_that_are_not_there(server: Server) -> None:
    done = shell(server, 'mkdir gone; cd gone; rmdir "$PWD"; stretto run -- true', PYTHONPATH=str(ROOT / "src"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the current folder does not exist any more")
    for verb in ("up", "down", "ps"):
        done = server.stretto(verb, "--data", "")
        assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: --data: no folder is given")


def test_a_range_is_elastic_however_narrow() -> None:
    assert sizes("2..2") == {"elastic": {"min": 2, "max": 2}}
    assert sizes(" 2 ") == {"workers": 2}


def test_down_returns_when_the_process_has_gone(tmp_path: Path) -> None:
    with running(tmp_path, "--slots", "1") as server:
        process = server._process
        assert process is not None
        assert server.stretto("down").returncode == 0
        assert process.poll() == 0
        server._reap()


def test_a_file_that_is_no_text_is_named_once(server: Server) -> None:
    (server.data.parent / "binary.yaml").write_bytes(b"run: \xff\n")
    assert server.stretto("submit", "binary.yaml").stderr.startswith("error: binary.yaml: is not a text file")
