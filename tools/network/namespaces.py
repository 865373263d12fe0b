"""Network namespaces and their iptables, on a bridge in a namespace of its own: nothing of the machine's is touched.

A world holds a lock as long as it lives; what a killed one left is found by its lock, which nobody holds, and removed
before the next one is made, its folder of files included: the lock names that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.network.hosts import NETWORK, Host
from tools.network.rules import Rule, Ruleset

PREFIX = "saon"
LOCKS = Path("/run/saon")
PROGRAMS = {"ip": "iproute2", "iptables": "iptables", "iptables-restore": "iptables", "dnsmasq": "dnsmasq-base"}
"""Debian's package by program."""
COMMAND_S, END_S = 30, 20.0
_NAMESPACES = re.compile(rf"^({PREFIX}-\d+)-\S+", re.MULTILINE)
_INTERFACE = "eth0"


class NamespaceError(RuntimeError):
    """A command that makes or changes namespaces fails; its own words."""


def lacking(programs: Sequence[str] = tuple(PROGRAMS)) -> str:
    """Why no namespaces can be made here, and what would change that; empty when they can."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PROGRAMS[name] for name in missing))
        return f"{', '.join(missing)} not found; on Debian: apt-get install --no-install-recommends {packages}"
    if os.geteuid() != 0:
        return "only root may make network namespaces: run it as root, or under sudo"
    name = f"{PREFIX}-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except NamespaceError as error:
        return f"this machine makes no network namespaces ({error}); in a container it wants CAP_SYS_ADMIN"
    try:
        _run("ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW")
    except NamespaceError as error:
        return f"iptables does not work here ({error}); it wants CAP_NET_ADMIN and the kernel's nf_tables, nf_conntrack"
    finally:
        _run("ip", "netns", "del", name)
    return ""


class World:
    """The namespaces of one run."""

    def __init__(self, name: str, hosts: Sequence[Host]) -> None:
        self._name = name
        self.hosts = list(hosts)

    def namespace(self, host: Host) -> str:
        """Its name for `ip netns`."""
        return f"{self._name}-{host.name}"

    def inside(self, host: Host, *command: str) -> list[str]:
        """A command line that runs in a host's namespace, with mounts of its own."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def close(self, ruleset: Ruleset) -> None:
        """Give every host its table, in one step each."""
        for host in self.hosts:
            _run(*self.inside(host, "iptables-restore"), text=ruleset.restore(host))

    def remove(self, rules: Sequence[Rule]) -> None:
        """Take rules away; connections that are open stay open."""
        self._change("-D", rules)

    def put_back(self, rules: Sequence[Rule]) -> None:
        """Undo `remove`."""
        self._change("-A", rules)

    def _change(self, how: str, rules: Sequence[Rule]) -> None:
        by_name = {host.name: host for host in self.hosts}
        for rule in rules:
            _run(*self.inside(by_name[rule.host], "iptables", how, *rule.arguments()))


@contextlib.contextmanager
def world(hosts: Sequence[Host], work: Path | None = None) -> Iterator[World]:
    """Namespaces that reach each other and nobody else, until the block ends; every process in them is killed then.

    `work`: a folder of this run's own, to be removed after a kill.
    """
    LOCKS.mkdir(exist_ok=True)
    remove_leftovers()
    name = f"{PREFIX}-{os.getpid()}"
    lock = LOCKS / name
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(str(work or ""))
        file.flush()
        try:
            _make(name, hosts)
            yield World(name, hosts)
        finally:
            _remove(name)
            lock.unlink(missing_ok=True)


def remove_leftovers() -> list[str]:
    """End what killed runs left; the names of their namespaces."""
    removed = []
    for name in sorted(set(_NAMESPACES.findall(_run("ip", "netns", "list")))):
        lock = LOCKS / name
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it lives
            removed += _remove(name)
            file.seek(0)
            if work := file.read():
                shutil.rmtree(work, ignore_errors=True)
            lock.unlink(missing_ok=True)
    return removed


def _make(name: str, hosts: Sequence[Host]) -> None:
    bridge = f"{name}-bridge"
    _add(bridge)
    _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", bridge, "link", "set", "bridge", "up")
    for index, host in enumerate(hosts):
        own, port = f"{name}-{host.name}", f"{PREFIX}{index}"
        _add(own)
        _run("ip", "-n", bridge, "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", own)
        _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", own, "addr", "add", f"{host.address}/{NETWORK.prefixlen}", "dev", _INTERFACE)
        _run("ip", "-n", own, "link", "set", _INTERFACE, "up")


def _add(namespace: str) -> None:
    _run("ip", "netns", "add", namespace)
    # Rules are for IPv4: another way between the namespaces would make them worth nothing.
    write = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
    _run("ip", "netns", "exec", namespace, "sh", "-c", f"[ ! -d /proc/sys/net/ipv6 ] || {write}")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _remove(name: str) -> list[str]:
    listed = _run("ip", "netns", "list").splitlines()
    mine = [word for line in listed if (word := line.split()[0]).startswith(f"{name}-")]
    deadline = time.monotonic() + END_S
    for namespace in mine:
        while pids := _run("ip", "netns", "pids", namespace).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                msg = f"{namespace}: processes {', '.join(pids)} outlive SIGKILL"
                raise NamespaceError(msg)
            time.sleep(0.05)
        _run("ip", "netns", "del", namespace)
    return mine


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(  # noqa: S603
        command, input=text, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode != 0:
        msg = f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
        raise NamespaceError(msg)
    return done.stdout
