"""A fork must be what `python script.py` would have been; what cannot be is refused with the reason."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from living import alive, wait_until

from stretto.backends.local.forkserver import Forked, ForkFailed, ForkServer, ForkServers, at_start, parse
from stretto.backends.local.launch import launch

PYTHON = sys.executable


def forked(server: ForkServer, command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    log = cwd.parent / f"{cwd.name}.forked.log"
    log.unlink(missing_ok=True)
    with launch(command, env=env, cwd=cwd, log=log, warm=server) as process:
        assert (process.how, process.why) == ("forked", "")
        status = process.wait(60.0)
    return log.read_text(), status


def plain(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> tuple[str, int]:
    with open(cwd.parent / f"{cwd.name}.plain.log", "w+") as log:
        given = dict(os.environ if env is None else env)
        done = subprocess.run(command, env=given, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60)
        log.seek(0)
        return log.read(), done.returncode


SAME = {
    "main": """
import __main__, sys, pickle
class Thing: pass
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__), __loader__.path, __builtins__)
print(sorted(vars(__main__)), __main__ is sys.modules["__main__"])
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
print(sys.argv, sys.orig_argv, sys.path, sys.executable, sys.flags, sys.prefix)
""",
    "process": """
import os, resource, signal, sys, threading
print(os.getcwd(), os.umask(0), sorted(os.environ.items()))
print([(n, resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n.startswith("RLIMIT_")])
print([(s, signal.getsignal(s)) for s in signal.Signals], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(signal.set_wakeup_fd(-1), threading.active_count(), threading.main_thread() is threading.current_thread())
print(sorted(os.readlink(f"/proc/self/fd/{f}").replace("plain", "forked") for f in "012"))
print([fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}")])
""",
    "streams": """
import sys
for s in (sys.stdin, sys.stdout, sys.stderr):
    print(s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering, s.write_through)
    print(s.isatty(), type(s.buffer))
print(sys.stdout is sys.__stdout__, sys.stdin.read() == "", sys.stdin.closed)
print("ü", file=sys.stderr)
""",
    "exit-code": "import sys; print('out'); sys.exit(7)",
    "exit-text": "import sys; print('out'); sys.exit('a reason')",
    "exit-none": "import sys; sys.exit()",
    "exit-now": "import os; print('lost'); os._exit(9)",
    "error": """
import atexit
atexit.register(print, "at exit")
def f(): raise ValueError("wrong")
print("before")
try:
    f()
except ValueError as e:
    raise RuntimeError("worse") from e
""",
    "syntax": "x = (\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint('hello')\n",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "hook": """
import sys
sys.excepthook = lambda kind, value, trace: print("hook", kind, value, trace.tb_lineno, trace.tb_next)
raise ValueError(3)
""",
    "hook-exits": "import sys\nsys.excepthook = lambda *_: sys.exit(5)\nraise ValueError(3)\n",
    "hook-fails": "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError(3)\n",
    "thread": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.05), print("thread ends"))).start()
print("main ends")
""",
    "spawn": """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [1, 2, 3]))
""",
    "warning": "import warnings\nwarnings.warn('careful', DeprecationWarning)\n",
    "sibling": "import helper; print(helper.__file__)",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "helper.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize("name", SAME)
def test_a_fork_does_what_a_new_interpreter_does(bare: ForkServer, folder: Path, name: str) -> None:
    (folder / "script.py").write_text(SAME[name])
    command = [PYTHON, "script.py", "--one", "two"]
    assert forked(bare, command, folder) == plain(command, folder)


LEAVES_OPEN = """
import atexit, gzip, sys, threading, time, zipfile
import helper
helper.file = open("of-helper.txt", "w")
helper.file.write("kept by a module")
plain = open("plain.txt", "w")
plain.write("not closed")
packed = gzip.open("packed.gz", "wt")
packed.write("not closed either")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("name", "text")
def wait():
    while True:
        time.sleep(0.001)
        helper.x
threading.Thread(target=wait, daemon=True).start()
atexit.register(print, "at exit")
sys.stdout.write("no newline at the end")
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('no')", "raise ValueError(1)"])
def test_what_a_script_leaves_open_is_written_to_its_end(bare: ForkServer, folder: Path, end: str) -> None:
    """Python itself may lose some of it where a thread is left that nobody waits for."""
    (folder / "script.py").write_text(LEAVES_OPEN + end)
    command = [PYTHON, "script.py"]
    told = plain(command, folder)
    for path in folder.glob("*.[tgz]*"):
        path.unlink()
    assert forked(bare, command, folder) == told
    assert (folder / "of-helper.txt").read_text() == "kept by a module"
    assert (folder / "plain.txt").read_text() == "not closed"
    assert gzip.decompress((folder / "packed.gz").read_bytes()) == b"not closed either"
    with zipfile.ZipFile(folder / "archive.zip") as archive:
        assert archive.read("name") == b"text"


@pytest.mark.parametrize("script", ["./script.py", "inner/../script.py", "link.py", "inner/script.py", "ABSOLUTE"])
def test_however_the_script_is_named(bare: ForkServer, folder: Path, script: str) -> None:
    (folder / "inner").mkdir()
    for path in (folder / "script.py", folder / "inner" / "script.py"):
        path.write_text(SAME["main"])
    (folder / "link.py").symlink_to("inner/script.py")
    command = [PYTHON, str(folder / "script.py") if script == "ABSOLUTE" else script]
    assert forked(bare, command, folder) == plain(command, folder)


@pytest.mark.parametrize(
    "text", [SAME["main"].replace("__spec__, ", "__spec__.name, "), SAME["error"], "import sys; sys.exit(4)"]
)
def test_a_module(bare: ForkServer, folder: Path, text: str) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "run.py").write_text(text)
    for module in ("package.run", "package.nowhere"):
        command = [PYTHON, "-m", module, "--one"]
        assert forked(bare, command, folder) == plain(command, folder)


@pytest.mark.parametrize(
    ("flags", "env"),
    [(["-u"], {}), ([], {"PYTHONUNBUFFERED": "1"}), ([], {"PYTHONDONTWRITEBYTECODE": "1", "TZ": "UTC-3"})],
)
def test_what_is_applied_afterwards(bare: ForkServer, folder: Path, flags: list[str], env: dict[str, str]) -> None:
    (folder / "script.py").write_text(
        SAME["streams"] + "import os, time; print(sys.dont_write_bytecode, time.timezone)\nprint('kept'); os._exit(0)"
    )
    base = {k: v for k, v in os.environ.items() if k not in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")}
    command = [PYTHON, *flags, "script.py"]
    out, status = forked(bare, command, folder, base | env)
    assert (out, status) == plain(command, folder, base | env)
    assert ("kept" in out) == ("PYTHONDONTWRITEBYTECODE" not in env)


def test_umask_and_limits_are_those_of_the_launcher(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").write_text(
        "import os, resource; print(os.umask(0), resource.getrlimit(resource.RLIMIT_CORE))"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    before = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        out, _ = forked(bare, [PYTHON, "script.py"], folder)
    finally:
        os.umask(before)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert out.split()[0] == str(0o027)
    assert out.split()[1] == "(0,"


def test_forks_draw_different_numbers(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").write_text(
        "import random, numpy, multiprocessing as m\n"
        "print(random.random()); print(numpy.random.rand()); print(bytes(m.current_process().authkey).hex())"
    )
    one, two = (forked(bare, [PYTHON, "script.py"], folder)[0].split() for _ in range(2))
    assert len(one) == 3
    assert not set(one) & set(two)


def test_variables_that_an_import_sets(tmp_path: Path, cache: Path) -> None:
    """They are the worker's too, and no reason to refuse a launcher that has done the same import."""
    python = make_environment(tmp_path / "env")
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (packages / "setting.py").write_text(
        "import os\nfor name in ('KMP_X', 'KMP_Y'): os.environ.setdefault(name, 'set')"
    )
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "script.py").write_text("import os, setting; print(os.environ['KMP_X'], os.environ['KMP_Y'])")
    with ForkServer(python, preload=("setting",), cache=cache) as server:
        assert server.wait_ready(), server.failure
        command = [python, "script.py"]
        for env in ({}, {"KMP_X": "set"}):
            assert forked(server, command, tmp_path / "job", os.environ | env) == ("set set\n", 0)
        assert "KMP_X" in server.refusal(command, os.environ | {"KMP_X": "other"}, str(tmp_path / "job"))


def test_a_large_environment(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").write_text("import os; print(sum(len(v) for k, v in os.environ.items() if k[:4] == 'MANY'))")
    env = os.environ | {f"MANY{i}": "x" * 1000 for i in range(1000)}
    assert forked(bare, [PYTHON, "script.py"], folder, env) == ("1000000\n", 0)


REFUSED = {
    "another program": (["bash", "script.py"], {}, "is not the interpreter"),
    "-O": ([PYTHON, "-O", "script.py"], {}, "flag -O"),
    "-X": ([PYTHON, "-X", "dev", "script.py"], {}, "flag -X"),
    "-W": ([PYTHON, "-Werror", "script.py"], {}, "flag -Werror"),
    "-c": ([PYTHON, "-c", "pass"], {}, "flag -c"),
    "standard input": ([PYTHON], {}, "standard input"),
    "no module": ([PYTHON, "-m"], {}, "no module"),
    "no script": ([PYTHON, "missing.py"], {}, "not a Python source file"),
    "folder": ([PYTHON, "."], {}, "not a Python source file"),
    "PYTHONPATH": ([PYTHON, "script.py"], {"PYTHONPATH": "/x"}, "PYTHONPATH"),
    "PYTHONHASHSEED": ([PYTHON, "script.py"], {"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED"),
    "LD_PRELOAD": (
        [PYTHON, "script.py"],
        {"LD_PRELOAD": "/x.so", "LD_LIBRARY_PATH": "/x"},
        "LD_LIBRARY_PATH, LD_PRELOAD",
    ),
    "locale": ([PYTHON, "script.py"], {"LC_ALL": "C"}, "LC_ALL"),
    "torch": ([PYTHON, "script.py"], {"TORCH_LOGS": "all"}, "TORCH_LOGS"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_forked_is_refused_with_the_reason(bare: ForkServer, folder: Path, name: str) -> None:
    (folder / "script.py").touch()
    command, env, reason = REFUSED[name]
    assert reason in bare.refusal(command, os.environ | env, str(folder))


def test_a_refused_command_starts_in_the_plain_way(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").write_text("import sys; print(sys.flags.optimize)")
    with launch([PYTHON, "-O", "script.py"], cwd=folder, log=folder / "log", warm=bare) as process:
        assert process.wait(60.0) == 0
    assert process.how == "plain"
    assert "-O" in process.why
    assert (folder / "log").read_text() == "1\n"


def test_a_script_beside_a_module_that_hides_an_imported_one(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").touch()
    assert bare.refusal([PYTHON, "script.py"], os.environ, str(folder)) == ""
    (folder / "selectors.py").touch()
    assert "has a module selectors" in bare.refusal([PYTHON, "script.py"], os.environ, str(folder))


def test_variables_that_are_read_late_do_not_count() -> None:
    late = {"TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert at_start(late) == {}
    assert at_start({"OMP_PROC_BIND": "1", "LD_X": ""}) == {"OMP_PROC_BIND": "1", "LD_X": ""}
    assert not isinstance(parse(["python", "-u", "a.py", "-O"]), str)


def make_environment(folder: Path) -> str:
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


def test_torch_that_is_not_installed(tmp_path: Path, cache: Path) -> None:
    python = make_environment(tmp_path / "env")
    with ForkServers(cache=cache) as servers:
        server = servers.get(python, os.environ)
        assert not server.wait_ready()
        assert server.failure == "torch is not installed in this environment"
        assert servers.get(python, os.environ) is server
        (tmp_path / "script.py").write_text("import sys; print(sys.prefix)")
        with launch([python, str(tmp_path / "script.py")], log=tmp_path / "log", warm=server) as process:
            assert process.wait(60.0) == 0
    assert (process.how, process.why) == ("plain", server.failure)
    assert (tmp_path / "log").read_text().strip() == str(tmp_path / "env")


def test_a_changed_environment_gets_a_new_server_and_its_workers_go_on(tmp_path: Path, cache: Path) -> None:
    python = make_environment(tmp_path / "env")
    (tmp_path / "script.py").write_text("import time; print('up', flush=True)\nwhile True: time.sleep(0.01)")
    command = [python, str(tmp_path / "script.py")]
    with ForkServers(preload=(), cache=cache) as servers:
        first = servers.get(python, os.environ)
        assert first.wait_ready()
        assert servers.get(python, os.environ) is first
        with launch(command, log=tmp_path / "log", warm=first) as process:
            assert process.how == "forked"
            wait_until(lambda: (tmp_path / "log").read_text())
            packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
            (packages / "thing-1.0.dist-info").mkdir()
            assert "changed" in first.refusal(command, os.environ, "/")
            second = servers.get(python, os.environ)
            assert second.wait_ready()
            assert second is not first
            assert process.poll() is None
        wait_until(lambda: not first.alive)
        assert servers.get(python, os.environ) is second


def test_an_import_that_starts_a_thread_makes_it_unforkable(tmp_path: Path, cache: Path) -> None:
    python = make_environment(tmp_path / "env")
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (packages / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with ForkServer(python, preload=("busy",), cache=cache) as server:
        assert not server.wait_ready()
        assert "started 1 threads" in server.failure


SLEEPER = "import os, time\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(0.01)\n"


def test_kill_9_of_the_server_leaves_no_orphan(folder: Path, cache: Path) -> None:
    (folder / "script.py").write_text(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\nchild.wait()\n"
    )
    with ForkServer(preload=(), cache=cache) as server:
        assert server.wait_ready()
        with launch([PYTHON, "script.py"], cwd=folder, log=folder / "log", warm=server) as process:
            wait_until(lambda: (folder / "log").read_text().strip())
            grandchild = int((folder / "log").read_text())
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not alive(process.pid))
            assert process.wait(20.0) == -signal.SIGKILL
            wait_until(lambda: not alive(grandchild))
        assert "has ended with status -9" in server.refusal([PYTHON, "script.py"], os.environ, str(folder))


def test_the_server_survives_clients_that_go_away_or_talk_nonsense(bare: ForkServer, folder: Path) -> None:
    for word in (b"", b"nonsense"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(bare.address)
            if word:
                client.send(word)
    (folder / "script.py").write_text(SLEEPER)
    with open(folder / "log", "wb") as log, open(os.devnull) as nothing:
        stdio = (nothing.fileno(), log.fileno(), log.fileno())
        worker = bare.fork([PYTHON, "script.py"], os.environ, str(folder), stdio)
    wait_until(lambda: (folder / "log").read_text().strip() == str(worker.pid))
    worker.connection.close()
    os.close(worker.pidfd)
    wait_until(lambda: not alive(worker.pid))
    (folder / "script.py").write_text("print('still here')")
    assert forked(bare, [PYTHON, "script.py"], folder) == ("still here\n", 0)


OWNER = """
import sys, time
from pathlib import Path
from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
folder = Path(sys.argv[1])
server = ForkServer(preload=(), cache=folder)
assert server.wait_ready()
workers = [launch([sys.executable, "script.py"], cwd=folder, log=folder / name, warm=warm)
           for name, warm in (("forked", server), ("plain", None))]
print(server.address, server.pid, *(worker.pid for worker in workers), flush=True)
time.sleep(600)
"""


def test_all_die_with_their_owner(folder: Path) -> None:
    (folder / "script.py").write_text(SLEEPER)
    (folder / "owner.py").write_text(OWNER)
    owner = subprocess.Popen([PYTHON, str(folder / "owner.py"), str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        address, *words = owner.stdout.readline().split()
    pids = [int(word) for word in words]
    wait_until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in ("forked", "plain")))
    assert len(pids) == 3
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids))
    assert not Path(address).parent.exists()


THREADS = """
import json, torch, numpy, threadpoolctl
pools = {(p["user_api"], p["filepath"]): p["num_threads"] for p in threadpoolctl.threadpool_info()}
print(torch.get_num_threads(), sorted(pools.items()), torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}])
def test_numbers_of_threads_are_those_of_the_variables(
    torch_server: ForkServer, folder: Path, env: dict[str, str]
) -> None:
    # The plain one must have the same libraries loaded.
    (folder / "script.py").write_text("import sklearn.datasets\n" + THREADS)
    command = [PYTHON, "script.py"]
    assert forked(torch_server, command, folder, os.environ | env) == plain(command, folder, os.environ | env)


def test_a_forked_worker_trains_on_many_threads_with_its_own_random_numbers(
    torch_server: ForkServer, folder: Path
) -> None:
    (folder / "script.py").write_text("""
import sys, torch
before = set(sys.modules)
print(torch.rand(1).item(), torch.initial_seed())
torch.set_num_threads(4)
model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(1000, 2000)).sum().backward()
optimizer.step()
late = sorted(set(sys.modules) - before)
assert len(late) < 20, late
""")
    results = [forked(torch_server, [PYTHON, "script.py"], folder) for _ in range(2)]
    assert [status for _, status in results] == [0, 0], results
    one, two = (out.split() for out, _ in results)
    assert not set(one) & set(two)


def test_workers_of_one_job_draw_the_same(torch_server: ForkServer, folder: Path) -> None:
    """What a script makes before it joins must not differ between them; workers that were not forked do so as well."""
    (folder / "script.py").write_text("""
import random, numpy, torch
import stretto.torch
print(random.random(), numpy.random.rand(), torch.rand(1).item())
""")
    (folder / "seeded.py").write_text("import torch; torch.manual_seed(3); import stretto.torch; print(torch.rand(1))")
    env = {**os.environ, "STRETTO_COORDINATOR": "ws://127.0.0.1:1", "STRETTO_TOKEN": "abc"}
    command = [PYTHON, "script.py"]
    one = forked(torch_server, command, folder, env)
    assert one[1] == 0, one
    assert one == forked(torch_server, command, folder, env) == plain(command, folder, env)
    assert one != forked(torch_server, command, folder, {**env, "STRETTO_TOKEN": "abd"})
    seeded = [PYTHON, "seeded.py"]
    assert plain(seeded, folder, env) == plain(seeded, folder, dict(os.environ))


SEARCH = """
import os, sys
wanted = sys.argv[1][::-1].encode()
print(wanted in open("/proc/self/environ", "rb").read())
found = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        span, kind, *_ = line.split()
        begin, end = (int(one, 16) for one in span.split("-"))
        if kind.startswith("rw"):
            try:
                memory.seek(begin)
                while begin < end:
                    piece = memory.read(min(end - begin, 1 << 24))
                    at = -1
                    while (at := piece.find(wanted, at + 1)) >= 0:
                        found += 1
                    begin += len(piece)
                    del piece
            except (OSError, OverflowError, ValueError):
                pass
print(found)
"""


def test_nothing_of_one_job_is_left_for_the_next(folder: Path, cache: Path) -> None:
    """Neither in what /proc shows of a worker, nor in the memory that it inherits."""
    canary = "canary-" + os.urandom(16).hex()
    (folder / "script.py").write_text("import os; print(os.environ['API_KEY'])")
    (folder / "search.py").write_text(SEARCH)
    secretive = {**os.environ, "API_KEY": canary}
    with ForkServers(preload=("numpy",), cache=cache) as servers:
        server = servers.get(PYTHON, secretive)
        assert server.wait_ready(), server.failure
        own = search(server, folder, canary)
        for _ in range(3):
            assert forked(server, [PYTHON, "script.py"], folder, secretive) == (f"{canary}\n", 0)
        assert servers.get(PYTHON, os.environ) is server
        assert search(server, folder, canary) == own, "as often as where there never was such a job"
        entries = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    assert not any(canary in entry for entry in entries)
    listed = {"PATH", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LANGUAGE", "HOME"}
    listed |= {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"}
    shown = {entry.partition("=")[0] for entry in entries if entry}
    assert shown <= listed | {"STRETTO_LAUNCH"} | at_start(os.environ).keys()


def search(server: ForkServer, folder: Path, canary: str) -> int:
    """How often it lies in the memory of a fork that does not know it but by its search."""
    said, status = forked(server, [PYTHON, "search.py", canary[::-1]], folder)
    assert status == 0, said
    in_proc, found = said.split()
    assert in_proc == "False"
    return int(found)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_one_that_was_not_asked_for_the_longest_time_makes_room(cache: Path) -> None:
    clock = Clock()
    with ForkServers(preload=(), cache=cache, most=2, clock=clock) as servers:

        def get(value: str) -> ForkServer:
            server = servers.get(PYTHON, {**os.environ, "TORCH_X": value})
            assert server.wait_ready(), server.failure
            return server

        first, second = get("1"), get("2")
        with pytest.raises(ForkFailed, match="all of them are at work"):
            get("3")
        clock.now_s += 60.0
        assert get("1") is first
        clock.now_s += 60.0
        third = get("3")
        wait_until(lambda: not second.alive)
        assert first.alive
        assert third.alive
        assert get("1") is first


def test_nobody_makes_room_who_is_forking(folder: Path, cache: Path) -> None:
    clock = Clock()
    (folder / "script.py").touch()
    env = {**os.environ, "TORCH_X": "1"}
    with ForkServers(preload=(), cache=cache, most=1, clock=clock) as servers, open(os.devnull) as nothing:
        server = servers.get(PYTHON, env)
        assert server.wait_ready(), server.failure
        clock.now_s += 60.0
        made: list[Forked] = []
        stdio = (nothing.fileno(), nothing.fileno(), nothing.fileno())
        asking = threading.Thread(
            target=lambda: made.append(server.fork([PYTHON, "script.py"], env, str(folder), stdio))
        )
        os.kill(server.pid, signal.SIGSTOP)
        try:
            asking.start()
            wait_until(lambda: server.busy)
            with pytest.raises(ForkFailed, match="all of them are at work"):
                servers.get(PYTHON, {**os.environ, "TORCH_X": "2"})
        finally:
            os.kill(server.pid, signal.SIGCONT)
            asking.join()
        (worker,) = made
        worker.connection.close()
        os.close(worker.pidfd)


def test_who_is_not_asked_for_long_ends_but_for_our_own(cache: Path) -> None:
    clock = Clock()
    with ForkServers(preload=(), cache=cache, idle_s=100.0, clock=clock) as servers:
        own, other = (servers.get(PYTHON, {**os.environ, **more}) for more in ({}, {"TORCH_X": "1"}))
        assert own.wait_ready()
        assert other.wait_ready()
        clock.now_s += 99.0
        servers.tend()
        assert other.alive
        clock.now_s += 2.0
        servers.tend()
        wait_until(lambda: not other.alive)
        assert own.alive


def test_they_are_bounded_in_memory(cache: Path) -> None:
    clock = Clock()
    with ForkServers(preload=(), cache=cache, most_mib=1, clock=clock) as servers:
        first = servers.get(PYTHON, {**os.environ, "TORCH_X": "1"})
        assert first.wait_ready()
        assert first.memory_mib() > 1
        clock.now_s += 60.0
        servers.get(PYTHON, {**os.environ, "TORCH_X": "2"})
        wait_until(lambda: not first.alive)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD", "PYTHONMALLOC"])
def test_for_what_differs_from_run_to_run_there_is_no_server(cache: Path, name: str) -> None:
    with ForkServers(preload=(), cache=cache) as servers, pytest.raises(ForkFailed, match=name):
        servers.get(PYTHON, {**os.environ, name: "1"})


def test_who_does_not_ask_holds_up_nobody(bare: ForkServer, folder: Path) -> None:
    (folder / "script.py").write_text("print('here')")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.connect(bare.address)
        assert forked(bare, [PYTHON, "script.py"], folder) == ("here\n", 0)


WORDS = st.sampled_from([b"fork", b"supervise", b"\0", b"retire"]) | st.binary(min_size=1, max_size=100)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["env", "cwd", "x"]), inner),
)


def test_the_server_survives_whatever_it_is_asked(bare: ForkServer, folder: Path) -> None:
    @settings(max_examples=25)
    @given(WORDS, st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()), st.integers(0, 6))
    def ask(word: bytes, request: bytes, files: int) -> None:
        with (
            open(os.memfd_create("request"), "wb", buffering=0) as file,
            open(os.devnull, "r+b") as nothing,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
        ):
            file.write(request)
            client.settimeout(20.0)
            client.connect(bare.address)
            socket.send_fds(client, [word], [file.fileno(), *[nothing.fileno()] * 5][:files])
            data, pidfds, _, _ = socket.recv_fds(client, 65536, 1, socket.MSG_CMSG_CLOEXEC)
            for pidfd in pidfds:
                os.close(pidfd)
            assert json.loads(data).keys() & {"error", "pid"}

    ask()
    (folder / "script.py").write_text("print('still here')")
    assert forked(bare, [PYTHON, "script.py"], folder) == ("still here\n", 0)


def test_a_server_that_speaks_another_language_is_a_failure(cache: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for said in (b"nonsense", b"[1]", b'{"modules": "many"}', b"[" * 100_000, b"\xff"):
        (packages / "rogue.py").write_text(
            "import json, socket, sys, time\n"
            "config = json.load(open(sys.argv[2]))\n"
            f"socket.socket(fileno=config['control']).send({said!r})\ntime.sleep(600)\n"
        )
        with ForkServer(python, preload=("rogue",), cache=cache) as server:
            assert not server.wait_ready()
            assert "does not speak our language" in server.failure
