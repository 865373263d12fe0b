"""The pods of an overlay at work in their namespaces: the store, every service, real SGLang servers."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sao.adaptation import first_served
from sao.rows import read_rows
from sao.supervisor.guard import Guard
from sao.supervisor.process import Child, Command, describe_exit, spawn
from sao.supervisor.sessions import end_sessions
from tools.manifests import consistency
from tools.manifests.render import Object
from tools.network import names
from tools.network.containers import Container, container, entry_script
from tools.network.hosts import Host
from tools.network.namespaces import World

FIRST = ("valkey", "trainer")
"""What is started before the rest: the store, and the trainer, whose init container makes the model for everybody."""
INIT_S, EXEC_S, END_S = 900.0, 120.0, 15.0
NICE = ("nice", "-n", "10")
"""A stack that takes every core must not keep a doctor from being quick."""


class StackError(RuntimeError):
    """A container ends, or does not get as far as it must; what it said last."""


class Stack:
    """Every container of every pod."""

    def __init__(self, world: World, objects: Sequence[Object], work: Path, guard: Guard) -> None:
        self._world = world
        self._objects = objects
        self._work = work
        self._guard = guard
        self._secrets = _secrets()
        self._children: list[Child] = []
        self.run_dir = work / "volumes" / "data" / "run"
        """The run's folder, as it lies on this machine."""

    def host(self, role: str) -> Host:
        """The first pod, or whoever is outside, in that role."""
        return next(host for host in self._world.hosts if role in host.peer.roles)

    def start_names(self) -> None:
        """The name server."""
        host, file = self.host("dns"), self._work / "names"
        records = names.records(self._objects, self._world.hosts)
        file.write_text("".join(f"{address} {name}\n" for address, name in records))
        self._spawn("dns", self._world.inside(host, *names.server_command(host.address, str(file))), {})

    def start(self) -> Iterator[str]:
        """Every pod, its init containers first; tells what it is at."""
        pods = [host for host in self._world.hosts if host.pod is not None]
        for host in sorted(pods, key=lambda one: _order(one.name)):
            assert host.pod is not None
            for spec in host.pod.spec.get("initContainers", []):
                yield f"{host.name}: {spec['name']}"
                self._finish(self._start(host, self._container(host, spec)))
            for spec in host.pod.spec["containers"]:
                yield f"{host.name}: {spec['name']} starts"
                self._children.append(self._start(host, self._container(host, spec)))

    def execute(self, host: Host, name: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec` does; outside, in a pod that has the same run file alone."""
        one = self._beside(host) if host.pod is None else self._container(host, host.pod.container(name))
        return subprocess.run(  # noqa: S603
            [*self._entered(host, one), *argv],
            env={**os.environ, **one.env},
            capture_output=True,
            text=True,
            timeout=EXEC_S,
            check=False,
        )

    def _beside(self, host: Host) -> Container:
        """A container in somebody else's namespace: the run file and no secret, as somebody outside would have."""
        ingest = self.host("ingest")
        assert ingest.pod is not None
        like = self._container(ingest, ingest.pod.container("ingest"))
        env = {name: value for name, value in like.env.items() if not name.startswith("SAO__")}
        return Container(host.name, [], env, [one for one in like.mounts if one.at == "/etc/sao"], like.user)

    def updates(self) -> int:
        """Policy updates that were made."""
        rows = [row.update for row, _ in read_rows(self.run_dir / "updates.jsonl")]
        return max(rows, default=0)

    def served(self) -> list[str]:
        """Weight versions that an engine has served, in order."""
        found = first_served(self.run_dir)
        return sorted(found, key=lambda version: found[version])

    def check_alive(self) -> None:
        """StackError when a container has ended."""
        for child in self._children:
            if (code := child.exit_code()) is not None:
                raise StackError(_told(child, describe_exit(code)))

    def stop(self) -> None:
        """End every process."""
        end_sessions([child.pid for child in self._children], grace_s=END_S, reap=self._reap)

    def _reap(self) -> None:
        for child in self._children:
            child.exit_code()

    def _start(self, host: Host, one: Container) -> Child:
        return self._spawn(f"{host.name}-{one.name}", [*NICE, *self._entered(host, one), *one.argv], one.env)

    def _spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        return spawn(Command(name, tuple(argv), self._work / "logs" / f"{name}.log", env), self._guard)

    def _finish(self, child: Child) -> None:
        deadline = time.monotonic() + INIT_S
        while (code := child.exit_code()) is None:
            self.check_alive()
            if time.monotonic() > deadline:
                raise StackError(_told(child, f"not done within {INIT_S:g} s"))
            time.sleep(0.2)
        if code:
            raise StackError(_told(child, describe_exit(code)))

    def _entered(self, host: Host, one: Container) -> list[str]:
        folder = self._work / "pods" / host.name
        root, script = folder / "root", folder / f"{one.name}.sh"
        root.mkdir(parents=True, exist_ok=True)
        resolv = folder / "resolv.conf"
        resolv.write_text(names.resolv_conf(self.host("dns").address))
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n")
        script.write_text(entry_script(one, host.name, root, [(resolv, "resolv.conf"), (hosts, "hosts")]))
        return self._world.inside(host, "unshare", "--uts", "sh", str(script))

    def _container(self, host: Host, spec: Mapping[str, object]) -> Container:
        assert host.pod is not None
        named = {str(mount["name"]) for one in host.pod.containers for mount in one.get("volumeMounts", [])}
        shared = {"data", "versions", "run-file"}
        folders = {
            name: self._work / ("volumes" if name in shared else f"pods/{host.name}/volumes") / name for name in named
        }
        made = container(host, spec, self._secrets, folders)
        for folder in folders.values():
            if not folder.is_dir():
                folder.mkdir(parents=True)
                os.chown(folder, made.user, made.user)
        run_file = folders.get("run-file")
        if run_file is not None and not (run_file / "run.toml").exists():
            (run_file / "run.toml").write_text(consistency.run_file(self._objects))
        return made


def _order(name: str) -> int:
    workload = name.rpartition("-")[0]
    return FIRST.index(workload) if workload in FIRST else len(FIRST)


def _secrets() -> dict[str, str]:
    """As docs/kubernetes.md makes them."""
    password = secrets.token_hex(24)
    return {
        "auth-token": secrets.token_hex(24),
        "redis-password": password,
        "redis-url": f"redis://:{password}@valkey:6379/0",
    }


def _told(child: Child, how: str) -> str:
    return "\n  ".join([f"{child.name}: {how} (log {child.command.log})", *child.log_tail()])


@contextlib.contextmanager
def running(world: World, objects: Sequence[Object], work: Path) -> Iterator[Stack]:
    """A stack whose processes end with the block, and with this process however it ends."""
    guard = Guard()
    stack = Stack(world, objects, work, guard)
    try:
        yield stack
    finally:
        stack.stop()
        guard.close()
