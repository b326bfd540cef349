"""Several machines on one: each with its own address, processes, name, /dev/shm and /tmp.

A machine is a set of Linux namespaces, held by one shell that ends when the test's process does,
however that happens: the kernel then kills what runs in it, and takes its links and mounts away.
No two have run for equally long, and their wall clocks are minutes apart.
Machines are plugged into a switch, a bridge in a network namespace of its own, so the network of
the machine below stays as it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support import COMPILED, REPOSITORY

SUBNET = "10.213.7"
RAY_PORT = 6379
BINARIES = Path(sys.executable).parent
CLOCK = Path(__file__).parent / "clock"
APART_S = 600
"""Seconds by which each machine's clock is ahead of the one before."""

_INSIDE = """
set -e
hostname "$1"
ip link set lo up
new=/mnt
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$new"
mkdir "$new/home"
for path in "${@:3}"; do
    case "$path" in /tmp/*)
        mkdir -p "$new/${path#/tmp/}"
        mount --bind "$path" "$new/${path#/tmp/}"
    esac
done
mount --move "$new" /tmp
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid > /tmp/boot_id
mount --bind /tmp/boot_id /proc/sys/kernel/random/boot_id
# a name that is asked for over the network would be waited for, in each of an engine's groups
printf '127.0.0.1 localhost\n%s %s\n' "$2" "$1" > /tmp/hosts
: > /tmp/resolv.conf
mount --bind /tmp/hosts /etc/hosts
mount --bind /tmp/resolv.conf /etc/resolv.conf
echo up
read -r _
"""
"""Arguments: the machine's name and address, and folders below /tmp that it sees all the same."""


def why_not() -> str:
    """Why machines cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "machines of namespaces are made by root"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
    probe += ["--time", "--monotonic=1"]
    script = "mount -t tmpfs tmpfs /mnt && ip link add br0 type bridge"
    try:
        done = subprocess.run([*probe, "sh", "-c", script], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


class Machine:
    """One machine of a network, and the commands that run on it."""

    def __init__(self, network: Network, number: int, folders: Sequence[Path]) -> None:
        self.name = f"machine-{number}"
        self.address = f"{SUBNET}.{number}"
        self._network = network
        self._number = number
        running_s = 86400 * (1 + len(network.machines))
        self._shell = _hold(
            [
                *("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"),
                *("--time", f"--monotonic={running_s}", f"--boottime={running_s}"),
            ],
            [_INSIDE, "machine", self.name, self.address, *map(str, folders)],
        )
        (init,) = psutil.Process(self._shell.pid).children()
        self._init = init.pid
        network.plug(number, self._init, self.address)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the repository, with its output in a pipe."""
        variables = {
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{CLOCK}",
            "CLOCK_AHEAD_S": str(APART_S * (self._number - 1)),
            "HOME": "/tmp/home",
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "HF_HUB_OFFLINE": "1",
        }
        return subprocess.Popen(
            [
                *("nsenter", f"--target={self._init}", "--net", "--mount", "--pid", "--uts"),
                *("--ipc", "--time", "env", "-i", "-C", str(REPOSITORY)),
                *(f"{key}={value}" for key, value in variables.items()),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check(self, *command: str) -> str:
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        assert process.returncode == 0, f"{self.name}: {' '.join(command)}: {output}"
        return output

    def start_ray(self, head: Machine, *, num_cpus: int) -> None:
        """Join the head's Ray cluster, or begin it, with its token."""
        words = [f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}"]
        words += ["--object-store-memory=200000000"]
        if head is self:
            self.check("sh", "-c", "ray get-auth-token --generate > /dev/null")
            words += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        else:
            token = head.check("cat", "/tmp/home/.ray/auth_token")
            script = 'umask 077; mkdir -p ~/.ray; printf %s "$0" > ~/.ray/auth_token'
            self.check("sh", "-c", script, token.strip())
            words += [f"--address={head.address}:{RAY_PORT}"]
        self.check("ray", "start", *words)

    @property
    def is_up(self) -> bool:
        return self._shell.poll() is None

    def signal(self, title: str, number: int) -> None:
        """Send a signal to each of its processes whose command line begins with a title."""
        chosen = [
            process
            for process in psutil.Process(self._init).children(recursive=True)
            if " ".join(process.cmdline()).startswith(title)
        ]
        assert chosen, f"{self.name} has no process {title}"
        for process in chosen:
            process.send_signal(number)

    def die(self) -> None:
        if self.is_up:
            os.kill(self._init, signal.SIGKILL)
            self._shell.wait()

    def unplug(self) -> None:
        """Take its link down; its processes continue."""
        self._network.in_switch("link", "set", f"port{self._number}", "down")


class Network:
    """A switch, and the machines that are plugged into it."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._switch = _hold(["--net", "--fork"], ["echo up; read -r _"])
        (holder,) = psutil.Process(self._switch.pid).children()
        self._holder = holder.pid
        self.in_switch("link", "add", "switch", "type", "bridge")
        self.in_switch("link", "set", "switch", "up")

    def boot(self, number: int, folders: Sequence[Path]) -> Machine:
        """A machine with an address of its own; again, when the one before it has died."""
        COMPILED.mkdir(exist_ok=True)
        machine = Machine(self, number, [REPOSITORY, COMPILED, *folders])
        self.machines.append(machine)
        return machine

    def plug(self, number: int, process: int, address: str) -> None:
        """Give the network namespace of a process a link to the switch."""
        port = f"port{number}"
        # the kernel takes its time to remove the link of a machine that has died
        self.in_switch("link", "delete", port, check=False)
        self.in_switch(
            *("link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(process)),
        )
        self.in_switch("link", "set", port, "master", "switch", "up")
        _ip(process, "address", "add", f"{address}/24", "dev", "eth0")
        _ip(process, "link", "set", "eth0", "up")
        # as machines have one: libraries ask which address leads outside
        _ip(process, "route", "add", "default", "dev", "eth0")

    def close(self) -> None:
        for shell in [*(machine._shell for machine in self.machines), self._switch]:
            assert shell.stdin is not None
            shell.stdin.close()
            shell.wait(timeout=30)

    def in_switch(self, *words: str, check: bool = True) -> None:
        _ip(self._holder, *words, check=check)


def _hold(namespaces: Sequence[str], script: Sequence[str]) -> subprocess.Popen[str]:
    """A shell in new namespaces that waits for the end of its standard input."""
    shell = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", *script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    assert shell.stdout.readline() == "up\n", "the namespaces could not be set up"
    return shell


def _ip(process: int, *words: str, check: bool = True) -> None:
    command = ["nsenter", f"--target={process}", "--net", "ip", *words]
    subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)
