"""Machines of one machine: network and mount namespaces, each with an address, folders and a Ray node of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PORT = 6391
START_SECONDS = 300.0
HEAD = 1
PORTS = [
    f"--{name}-port={6400 + number}"
    for number, name in enumerate(
        ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    )
]
"""Of a node's agent: the node begins without waiting until it has chosen some, for which Ray gives it 30 seconds."""


def can_be_made() -> bool:
    """Whether the kernel and this user's rights allow namespaces with a network between them."""
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    tried = [
        "unshare",
        "--mount",
        "--net",
        "sh",
        "-c",
        "mount -t tmpfs none /mnt && ip link add x type bridge",
    ]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


class Machines:
    """Machines 1, 2, … with addresses 10.77.0.1, 10.77.0.2, …; the first has Ray's head.

    `/tmp` and `/dev/shm` are each one's own and empty, and so is `hidden`: what the first machine keeps there is on no
    other. Python and shoal are installed on all. The first has no core for Ray.

    Args:
        folder: where each has its working directory and its `/tmp`; not below `/tmp`, and of a short name, since
            sockets lie there. In `hidden`, below it, lies what only the first machine sees.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.hidden = folder, folder / "hidden"
        self.hidden.mkdir(parents=True)
        self.prefix = f"shoal{os.getpid()}"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._names: set[int] = set()
        self.token = secrets.token_hex(32)
        _ip("link", "add", self.prefix[:15], "type", "bridge")
        _ip("link", "set", self.prefix[:15], "up")

    @property
    def address(self) -> str:
        """Of Ray's head."""
        return f"10.77.0.{HEAD}:{PORT}"

    def add(self, number: int, command: Sequence[str] = ()) -> None:
        """Start a machine and its node of Ray, which joins a while later; the first is waited for.

        With `command` the machine runs that instead of Ray.
        """
        name = f"{self.prefix}n{number}"
        if number not in self._names:
            outer, inner = f"v{os.getpid() % 10_000}n{number}", f"e{os.getpid() % 10_000}n{number}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", outer, "master", self.prefix[:15], "up")
            _ip("link", "set", inner, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", inner)
            _ip("-n", name, "link", "set", inner, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self._names.add(number)
        log = self.folder / f"node{number}.log"
        with log.open("wb") as output:
            program = list(command) or self._node_of_ray(number)
            self.nodes[number] = node = self._spawn(number, program, stdout=output, stderr=output)
        if number == HEAD:  # which the others join
            end = time.monotonic() + START_SECONDS
            while b"Ray runtime started" not in log.read_bytes():
                assert node.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.2)

    def run(self, program: str, *arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a Python program on the first machine; its output."""
        command = [sys.executable, "-c", program, *arguments]
        process = self._spawn(HEAD, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            raise AssertionError(f"the program did not end within {seconds:g} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(self, program: str, *arguments: str, stderr: Any, **variables: str) -> subprocess.Popen[str]:
        """A Python program on the first machine, which goes on meanwhile and reads what is written to it."""
        command = [sys.executable, "-u", "-c", program, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        return self._spawn(HEAD, command, variables, **pipes)

    def kill(self, number: int) -> None:
        """Pull the plug of a machine: everything on it is gone at once."""
        _kill(self.nodes.pop(number))

    def close(self) -> None:
        """End all machines."""
        for number in list(self.nodes):
            self.kill(number)
        for number in self._names:
            _ip("netns", "del", f"{self.prefix}n{number}")
        _ip("link", "del", self.prefix[:15])

    def _spawn(
        self, number: int, command: list[str], variables: Mapping[str, str] | None = None, **pipes: Any
    ) -> subprocess.Popen[Any]:
        """A program on a machine, which is made if it is not there; all of a new machine ends with this program."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment |= {
            "PYTHONPATH": f"{REPO / 'src'}:{REPO}",
            "RAY_ADDRESS": self.address,
            "OMP_NUM_THREADS": "1",
            "RAY_scheduler_spread_threshold": "0.0",  # each next piece of work goes to the emptiest machine
        }
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        environment |= variables or {}
        if number in self.nodes:
            inside = (
                Path(f"/proc/{self.nodes[number].pid}/task/{self.nodes[number].pid}/children")
                .read_text()
                .split()
            )
            wrapped = ["nsenter", f"--target={inside[0]}", "--mount", "--net", "--uts", "--pid"]
            wrapped += ["sh", "-c", f'cd {self._own(number) / "work"}; exec "$@"', "sh", *command]
        else:
            wrapped = [
                "ip",
                "netns",
                "exec",
                f"{self.prefix}n{number}",
                "unshare",
                "--mount",
                "--pid",
                "--uts",
            ]
            wrapped += [
                "--fork",
                "--mount-proc",
                "--kill-child",
                "sh",
                "-ec",
                self._setting_up(number),
                "sh",
                *command,
            ]
        return subprocess.Popen(wrapped, env=environment, start_new_session=True, **pipes)

    def _node_of_ray(self, number: int) -> list[str]:
        # Ray gives a node half a minute to begin; on a busy machine that takes a second attempt.
        ray = ["sh", "-c", 'until "$@"; do sleep 1; done', "sh", str(Path(sys.executable).parent / "ray")]
        ray += ["start", "--block", f"--num-cpus={0 if number == HEAD else 4}"]
        ray += [
            f"--node-ip-address=10.77.0.{number}",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
        ]
        ray += [f'--resources={{"machine{number}": 100}}', *PORTS]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        return ray + (head if number == HEAD else [f"--address={self.address}"])

    def _own(self, number: int) -> Path:
        return self.folder / f"machine{number}"

    def _setting_up(self, number: int) -> str:
        """What a shell does on a new machine before its program."""
        own = self._own(number)
        for part in ("tmp", "work"):
            (own / part).mkdir(parents=True, exist_ok=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{number} machine{number}\n")
        (own / "resolv.conf").write_text("")
        lines = [f"hostname machine{number}", "mount -t tmpfs none /dev/shm"]
        lines += [f"mount --bind {own / name} /etc/{name}" for name in ("hosts", "resolv.conf")]
        lines += [f"mount --bind {own / 'tmp'} /tmp", f"cd {own / 'work'}"]
        if number != HEAD:
            lines.append(f"mount -t tmpfs none {self.hidden}")
        return "\n".join([*lines, 'exec "$@"'])


def _kill(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
