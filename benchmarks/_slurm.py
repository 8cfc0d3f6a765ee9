"""Slurm as a peer: munged, slurmctld and one slurmd of Debian's packages, in a temporary folder, on free ports.

It uses nothing of the system's own configuration, and ends all its processes however the measurement ends.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from _measure import cpu_s

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
_READY_S = 30.0

_CONF = """
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldDebug=error
SlurmdDebug=error
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MailProg=/bin/true
ReturnToService=2
MaxJobCount=100000
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=defer
NodeName=bench0 NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=bench Nodes=bench0 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """`with Slurm() as slurm`: up when the body begins."""

    about = "accounting off, log level error, SchedulerParameters=defer, CR_Core, one slurmd, state on the same disk"

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._processes: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> list[str]:
        """The programs that are not here."""
        return [name for name in _PROGRAMS if _program(name) is None]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self._folder / "slurm.conf")}

    @property
    def version(self) -> str:
        return self.output("sbatch", "--version").strip()

    def cpu_s(self) -> float:
        """What its daemons have used so far."""
        return sum(cpu_s(process.pid) for process in self._processes)

    def output(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """The last one first; who will not end is killed."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._temporary.cleanup()

    def _start(self) -> None:
        folder = self._folder
        # Whoever holds the key may be anybody: munge wants it private, and its socket reachable for all.
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (folder / "slurm.conf").write_text(self._conf())
        # Read by all three where the file is there; nothing here is about control groups.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._begin(
            "munged", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self._wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self._begin("slurmctld", "-D", "-i", "-f", f"{folder}/slurm.conf")
        self._begin("slurmd", "-D", "-N", "bench0", "-f", f"{folder}/slurm.conf")
        self._wait_for(self._node_is_idle, "the node of Slurm")

    def _conf(self) -> str:
        control_port, node_port = _free_ports(2)
        return _CONF.format(
            host=socket.gethostname().partition(".")[0],
            control_port=control_port,
            node_port=node_port,
            user=getpass.getuser(),
            folder=self._folder,
            cores=os.cpu_count(),
        )

    def _begin(self, name: str, *options: str) -> None:
        program = _program(name)
        assert program is not None
        with (self._folder / f"{name}.out").open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [program, *options], env=self.environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=out,
                )
            )  # fmt: skip

    def _node_is_idle(self) -> bool:
        try:
            return self.output("sinfo", "-h", "-o", "%T").strip() == "idle"
        except RuntimeError:
            return False

    def _wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + _READY_S
        while not is_there():
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() >= end_s:
                raise RuntimeError(f"{what} did not come up:\n{self._words()}")
            time.sleep(0.05)

    def _words(self) -> str:
        """The end of everything that they wrote."""
        logs = sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _program(name: str) -> str | None:
    """Daemons are not on everybody's path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
