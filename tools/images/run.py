"""The pods of an overlay, brought up in containers, watched, and ended one after the other.

What podman leaves to Kubernetes is done here as the kubelet does it: probes are asked by the pods' addresses, hooks run
before SIGTERM, claims belong to the group of `fsGroup`. NetworkPolicies are not enforced.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tools.images import judge
from tools.images.engine import Engine, EngineError
from tools.images.play import Container, Played, Probe, secret
from tools.manifests.consistency import SECRET

NETWORK = "sao-images-check"
TRAINER, TRAINER_PORT = "trainer-0", 9100
ENGINE, ENGINE_PORT = "rollout-0", 30000
START_S, UPDATES_S = 1800.0, 3600.0
"""Until every container is ready, and until the updates are there."""
TELL_EVERY_S = 15.0
_TURN_S = 2.0
_MAX_RESTARTS = 3
_GONE_S = 30.0
_UPDATE = re.compile(r"^sao_trainer_update_number (\S+)$", re.MULTILINE)

Say = Callable[[str], None]


@dataclass
class Stack:
    """What runs, and what was seen of it."""

    engine: Engine
    pods: Sequence[Played]
    say: Say
    plays: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    seen: judge.Seen = field(default_factory=judge.Seen)
    infra: dict[str, str] = field(default_factory=dict)
    """Container that holds a pod's network, by pod."""
    running_since: dict[str, float] = field(default_factory=dict)
    gone_since: dict[str, float] = field(default_factory=dict)
    """Containers that ran and do not, though nobody told them to end."""
    started: set[str] = field(default_factory=set)
    """Containers whose start-up probe has passed."""

    @property
    def containers(self) -> list[Container]:
        """Of every pod, those that run first included."""
        return [one for pod in self.pods for one in pod.containers]

    @property
    def lasting(self) -> list[Container]:
        """Those that run until they are told to end."""
        return [one for one in self.containers if not one.init]

    def become_ready(self) -> None:
        """Return when every container has started and says that it is ready; EngineError when one cannot."""
        self._wait(self._all_ready, START_S, "every container ready")

    def reach(self, updates: int) -> None:
        """Return when the trainer has made this many and the engine has served a second version; else EngineError."""
        self._wait(
            lambda: self.seen.updates >= updates and len(self.seen.versions) > 1,
            UPDATES_S,
            f"{updates} updates and a second version",
        )

    def look_for_the_last_time(self) -> None:
        """Ask every probe once more, and how often each container was started again."""
        about = self._inspect(self.lasting)
        for one in self.lasting:
            self.seen.restarts[one.full_name] = about[one.full_name]["RestartCount"]
            found = [f"{kind}: {said}" for kind, probe in one.probes.items() if (said := self.ask(one, probe))]
            self.seen.unwell[one.full_name] = "; ".join(found)

    def end(self) -> None:
        """Tell each pod to end while the others run, as an eviction does."""
        for pod in self.pods:
            lasting = [one for one in pod.containers if not one.init]
            with ThreadPoolExecutor(len(lasting)) as threads:
                ends = threads.map(self._end, lasting, [pod.grace_s] * len(lasting))
                for one, ended in zip(lasting, ends, strict=True):
                    self.seen.ended[one.full_name] = ended
                    self.say(f"{one.full_name}: ended with {ended.code} after {ended.seconds:.1f} s")

    def ask(self, one: Container, probe: Probe) -> str:
        """What a probe finds wrong; empty when nothing."""
        try:
            if probe.kind == "exec":
                done = self.engine.try_podman("exec", one.full_name, *probe.command, timeout_s=probe.timeout_s + 5)
                return "" if done.returncode == 0 else f"{probe.command[0]} ended with {done.returncode}"
            if probe.kind == "tcp":
                socket.create_connection((self._address(one.pod), probe.port), timeout=probe.timeout_s).close()
                return ""
            answer = self._get(one.pod, probe.port, probe.path, probe.timeout_s)
        except (httpx.HTTPError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer.status_code == 200 else f"{probe.path} answered {answer.status_code}: {answer.text[:300]}"

    def save_logs(self) -> Path:
        """What each container wrote, as a file each; their folder."""
        folder = self.engine.root / "logs"
        for one in self.lasting:
            done = self.engine.try_podman("logs", one.full_name)
            (folder / f"{one.full_name}.log").write_text(done.stdout + done.stderr)
        return folder

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline, told = time.monotonic() + timeout_s, time.monotonic()
        while True:
            self._turn()
            if condition():
                return
            if time.monotonic() > deadline:
                msg = f"waited {timeout_s:g} s for {what}: {self._state()}"
                raise EngineError(msg)
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                self.say(self._state())
            time.sleep(_TURN_S)

    def _turn(self) -> None:
        """See what is new; EngineError when something cannot become well."""
        for name, play in self.plays.items():
            if play.poll():
                log = self.engine.root / "logs" / f"play-{name}.log"
                msg = f"podman could not play {name}: {log.read_text()[-1500:]}"
                raise EngineError(msg)
        listed = self.engine.asked("ps", "--format", "json")
        # To ask for a pod would wait until its init containers have ended.
        infra = {one["Pod"]: one["Id"] for one in listed if one["IsInfra"]}
        running = {name: one for one in listed for name in one["Names"]}
        self.infra |= {
            one.pod: infra[running[one.full_name]["Pod"]] for one in self.containers if one.full_name in running
        }
        for one in self.containers:
            if one.full_name not in running:
                continue
            self.running_since.setdefault(one.full_name, time.monotonic())
            if one.full_name not in self.seen.inside:
                done = self.engine.try_podman("exec", one.full_name, "sh", "-c", judge.LOOK)
                if done.returncode == 0:
                    self.seen.inside[one.full_name] = judge.inside(done.stdout)
        self._miss({one.full_name for one in self.lasting if one.full_name not in running})
        # A container that runs first is gone as soon as it has ended, at any moment.
        for name, about in self._inspect([one for one in self.lasting if one.full_name in running]).items():
            if about["RestartCount"] > _MAX_RESTARTS:
                msg = f"{name} was started again {about['RestartCount']} times; its log is in {self.save_logs()}"
                raise EngineError(msg)
        self._read_progress()

    def _miss(self, absent: set[str]) -> None:
        now = time.monotonic()
        self.gone_since = {name: self.gone_since.get(name, now) for name in absent & self.running_since.keys()}
        for name, since in self.gone_since.items():
            if now - since > _GONE_S:
                msg = f"{name} ended by itself and was not started again; its log is in {self.save_logs()}"
                raise EngineError(msg)

    def _read_progress(self) -> None:
        with suppress(httpx.HTTPError):
            found = _UPDATE.search(self._get(TRAINER, TRAINER_PORT, "/metrics", 5).text)
            self.seen.updates = int(float(found[1])) if found else self.seen.updates
        with suppress(httpx.HTTPError):
            version = str(self._get(ENGINE, ENGINE_PORT, "/model_info", 5).json()["weight_version"])
            if version not in self.seen.versions:
                self.seen.versions.append(version)

    def _all_ready(self) -> bool:
        ready = [self._ready(one) for one in self.lasting]  # each is asked, also after one that is not
        return all(ready)

    def _ready(self, one: Container) -> bool:
        since = self.running_since.get(one.full_name)
        if since is None:
            return False
        startup, readiness = one.probes.get("startupProbe"), one.probes.get("readinessProbe")
        if startup and one.full_name not in self.started:
            said = self.ask(one, startup)
            patience = startup.period_s * startup.failures
            if said and time.monotonic() - since > patience:
                msg = f"{one.full_name} did not start within the {patience:g} s of its start-up probe: {said}"
                raise EngineError(msg)
            if said:
                return False
            self.started.add(one.full_name)
        return readiness is None or not self.ask(one, readiness)

    def _get(self, pod: str, port: int, path: str, timeout_s: float) -> httpx.Response:
        return httpx.get(f"http://{self._address(pod)}:{port}{path}", timeout=timeout_s, trust_env=False)

    def _address(self, pod: str) -> str:
        """httpx.ConnectError while it has none."""
        if pod not in self.addresses:
            infra = self.infra.get(pod)
            about = self.engine.asked("inspect", infra) if infra else []
            address = about[0]["NetworkSettings"]["Networks"].get(NETWORK, {}).get("IPAddress") if about else ""
            if not address:
                msg = f"{pod} has no address yet"
                raise httpx.ConnectError(msg)
            self.addresses[pod] = address
        return self.addresses[pod]

    def _inspect(self, containers: Sequence[Container]) -> dict[str, dict[str, Any]]:
        names = [one.full_name for one in containers]
        return dict(zip(names, self.engine.asked("inspect", *names), strict=True)) if names else {}

    def _end(self, one: Container, grace_s: float) -> judge.Ended:
        began = time.monotonic()
        if one.pre_stop:
            self.engine.try_podman("exec", one.full_name, *one.pre_stop, timeout_s=grace_s)
        time.sleep(one.pre_stop_s)
        left = max(1, round(grace_s - (time.monotonic() - began)))
        self.engine.podman("stop", "--time", str(left), one.full_name, timeout_s=grace_s + 60)
        return judge.Ended(round(time.monotonic() - began, 1), self._inspect([one])[one.full_name]["State"]["ExitCode"])

    def _state(self) -> str:
        waiting = [one.full_name for one in self.lasting if one.full_name not in self.started]
        if waiting:
            return f"waiting for {', '.join(waiting)}"
        return f"update {self.seen.updates}, {len(self.seen.versions)} versions served"


@contextmanager
def stack(engine: Engine, pods: Sequence[Played], volumes: Path, say: Say) -> Iterator[Stack]:
    """Start every pod at once; on leaving, whatever happened, nothing of them is left but their logs."""
    made = Stack(engine, pods, say)
    _remove(engine, volumes)
    try:
        _prepare(engine, pods, volumes)
        for pod in pods:
            made.plays[pod.name] = _play(engine, pod)
        yield made
    finally:
        for play in made.plays.values():
            if play.poll() is None:
                play.terminate()
        with suppress(EngineError):
            made.save_logs()
        _remove(engine, volumes)
        for play in made.plays.values():
            play.wait(timeout=60)


def _prepare(engine: Engine, pods: Sequence[Played], volumes: Path) -> None:
    engine.podman("network", "create", NETWORK)
    password = secrets.token_hex(24)
    values = {
        "auth-token": secrets.token_hex(24),
        "redis-password": password,
        "redis-url": f"redis://:{password}@valkey:6379/0",
    }
    engine.podman("secret", "create", SECRET, "-", given=secret(values))
    for claim, group in {item for pod in pods for item in pod.claims.items()}:
        folder = volumes / claim
        folder.mkdir(parents=True)
        os.chown(folder, 0, group)
        folder.chmod(0o2775)


def _play(engine: Engine, pod: Played) -> subprocess.Popen[bytes]:
    file = engine.root / "play" / f"{pod.name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(pod.text)
    network = NETWORK + "".join(f"{',' if at else ':'}alias={alias}" for at, alias in enumerate(pod.aliases))
    with (engine.root / "logs" / f"play-{pod.name}.log").open("w") as log:
        return subprocess.Popen(  # noqa: S603
            ["podman", "play", "kube", "--network", network, str(file)],  # noqa: S607
            env=engine.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _remove(engine: Engine, volumes: Path) -> None:
    engine.clear()
    for kind, name in (("network", NETWORK), ("secret", SECRET)):
        if engine.try_podman(kind, "inspect", name).returncode == 0:
            engine.podman(kind, "rm", name)
    shutil.rmtree(volumes, ignore_errors=True)
