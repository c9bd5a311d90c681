"""Pretended machines: network namespaces with addresses, host names and /etc/hosts of their own, on one file system."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

GRACE_S = 20.0

# What a launcher says must come from the launcher under test alone.
LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_",
    "GLOO_",
)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a job: this interpreter's programs first, one thread, nothing of a launcher."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCH_VARIABLES)}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return {**env, "PATH": programs, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}


def missing() -> str | None:
    """Why there can be no pretended machines here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, to make network namespaces"
    if absent := [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"needs {', '.join(absent)} (apt-get install iproute2 util-linux)"
    name = f"flextrain-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted here ({made.stderr.strip()})"
    entered = subprocess.run(["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "true"], capture_output=True, text=True)  # fmt: skip
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"namespaces of mounts are not permitted here ({entered.stderr.strip()})" if entered.returncode else None


class Machines:
    """``node1``, ``node2``, ... that reach each other over a switch of their own, and nothing else.

    Args:
        count: how many.
        folder: for files of /etc.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.numbers = folder, range(1, count + 1)
        # No other session has these, on this machine; the switch is a namespace too, so that the machine's own is untouched.
        self._name = f"flx{os.getpid()}n"
        self._net = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
        switch = f"{self._name}sw"
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "name", "sw0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "sw0", "up")
        for number in self.numbers:
            node, port = self._namespace(number), f"p{number}"
            self._ip("netns", "add", node)
            self._ip("-n", node, "link", "add", "name", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            self._ip("-n", switch, "link", "set", port, "master", "sw0", "up")
            self._ip("-n", node, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._ip("-n", node, "link", "set", "lo", "up")
            self._ip("-n", node, "link", "set", "eth0", "up")
            others = [f"{self.address(other)} node{other}\n" for other in self.numbers if other != number]
            for file, own in (("hosts", self.address(number)), ("debian", "127.0.1.1")):
                text = ["127.0.0.1 localhost\n", f"{own} node{number}\n", *others]
                (folder / f"{file}{number}").write_text("".join(text))
        # What mpirun and mpiexec take for ssh: they call it as "agent [options] node2 command ...".
        agent = [
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',
            "host=$1; shift",
            'case "$host" in',
            *(f'node{n}) exec {shlex.join(self._entered(n))} sh -c "$*" ;;' for n in self.numbers),
            "esac",
        ]
        self.agent = folder / "agent.sh"
        self.agent.write_text("\n".join(agent) + "\n")
        self.agent.chmod(0o755)

    def address(self, number: int) -> str:
        return f"{self._net}.{number}"

    def command(self, number: int, *command: object, limit_s: float = 120.0, debian: bool = False) -> list[str]:
        """``command`` on a machine, under a time limit; ``debian``: its own name stands for 127.0.1.1."""
        limit = ["timeout", "--kill-after=5", str(limit_s)]
        return [*limit, *self._entered(number, debian), *map(str, command)]

    def run(
        self,
        number: int,
        *command: object,
        limit_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        debian: bool = False,
        status: int | None = 0,
    ) -> str:
        """Run ``command`` on a machine; return its output. Fails if it does not end with ``status`` (None: any)."""
        ended = subprocess.run(
            self.command(number, *command, limit_s=limit_s, debian=debian),
            env=environment(**(env or {})),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert status in (None, ended.returncode), f"ended with {ended.returncode}:\n{ended.stdout[-6000:]}"
        return ended.stdout

    def start(
        self,
        number: int,
        *command: object,
        log: Path,
        limit_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        debian: bool = False,
    ) -> subprocess.Popen[str]:
        """Start ``command`` on a machine, with its output in the file ``log``."""
        with log.open("a") as output:
            return subprocess.Popen(
                self.command(number, *command, limit_s=limit_s, debian=debian),
                env=environment(**(env or {})),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def cut(self, number: int) -> None:
        """Take the machine's link down."""
        self._ip("-n", self._namespace(number), "link", "set", "eth0", "down")

    def mend(self, number: int) -> None:
        self._ip("-n", self._namespace(number), "link", "set", "eth0", "up")

    def processes(self, numbers: Iterable[int] | None = None) -> dict[int, str]:
        """Command lines of what runs on these machines (None: on all), by process."""
        found = {}
        for number in self.numbers if numbers is None else numbers:
            listed = subprocess.run(["ip", "netns", "pids", self._namespace(number)], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return {pid: line for pid, line in found.items() if line}  # a zombie has none

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes of these machines, as a loss of power does."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self, allowed: Iterable[int] = (), grace_s: float = GRACE_S) -> dict[int, str]:
        """What still runs besides ``allowed`` after some seconds; it is killed."""
        deadline = time.monotonic() + grace_s
        known = set(allowed)
        while left := {pid: line for pid, line in self.processes().items() if pid not in known}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.kill(left)
        return left

    def close(self) -> list[str]:
        """Remove the machines; return what was left: processes and namespaces."""
        left = list(self.left().values())
        for name in (*map(self._namespace, self.numbers), f"{self._name}sw"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
        return left + [name for name in names if name.startswith(self._name)]

    def _namespace(self, number: int) -> str:
        return f"{self._name}{number}"

    def _entered(self, number: int, debian: bool = False) -> list[str]:
        # Not "ip netns exec": it mounts a /sys without control groups, and slurmd does not start there.
        hosts = self.folder / f"{'debian' if debian else 'hosts'}{number}"
        there = ["nsenter", f"--net=/run/netns/{self._namespace(number)}", "unshare", "--mount", "--uts"]
        return [*there, "sh", "-c", f'mount --bind {hosts} /etc/hosts; hostname node{number}; exec "$@"', "sh"]

    @staticmethod
    def _ip(*command: str) -> None:
        done = subprocess.run(["ip", *command], capture_output=True, text=True)
        assert done.returncode == 0, f"ip {' '.join(command)}: {done.stderr}"
