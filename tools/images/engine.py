"""podman and buildah on a store, a network configuration and a runtime of this check's own.

Nothing of the machine's own containers is seen or changed: images, containers, volumes, networks, locks and sockets lie
under two folders. Containers run with runc and cgroupfs, which needs no systemd.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUICK_S = 120.0
"""More than any call takes that only asks or tells."""
BUILD_S = 3600.0
_PATIENCE_S = 3600
"""Before podman kills of its own accord: it stops a pod whose last container ends while another one is still ending."""
_NONE: Mapping[str, str] = {}
_CONTAINERS = """\
[containers]
default_ulimits = {ulimits}
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
stop_timeout = {patience}
lock_type = "file"
tmp_dir = "{run}/tmp"
[network]
network_backend = "netavark"
network_config_dir = "{root}/networks"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{root}/storage"
runroot = "{run}/storage"
"""


class EngineError(RuntimeError):
    """podman or buildah refused, or took too long; the message has its last words."""


@dataclass(frozen=True)
class Engine:
    """Both programs, and where everything lies."""

    root: Path
    """What stays: images and their layers, logs."""
    run: Path
    """What ends with the machine: locks, sockets, mounts."""

    def prepare(self) -> None:
        """Write what both read."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "containers.conf").write_text(
            _CONTAINERS.format(root=self.root, run=self.run, ulimits=json.dumps(_ulimits()), patience=_PATIENCE_S)
        )
        (self.root / "storage.conf").write_text(_STORAGE.format(root=self.root, run=self.run))

    def forget(self) -> None:
        """Remove everything: containers, images, layers, and both folders."""
        if (self.root / "storage.conf").exists():
            self.clear()
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in sorted(mounted, reverse=True):
            if Path(path).is_relative_to(self.root) or Path(path).is_relative_to(self.run):
                subprocess.run(["umount", path], timeout=QUICK_S, check=True)  # noqa: S603, S607
        for folder in (self.root, self.run):
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove every pod, container and volume, and what a build that was cut short left; images stay."""
        _checked(self._run(["buildah", "rm", "--all"], QUICK_S, None))
        for arguments in (("pod", "rm", "--all", "--force", "--time", "0"), ("volume", "prune", "--force")):
            self.podman(*arguments)

    @property
    def environment(self) -> dict[str, str]:
        """With which both are started."""
        return os.environ | {
            "CONTAINERS_CONF": str(self.root / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.root / "storage.conf"),
        }

    def try_podman(self, *arguments: str, timeout_s: float = QUICK_S) -> subprocess.CompletedProcess[str]:
        """What podman says, whatever it says; 124 and a sentence when it takes too long."""
        return self._run(["podman", *arguments], timeout_s, None)

    def podman(self, *arguments: str, timeout_s: float = QUICK_S, given: str | None = None) -> str:
        """What podman prints; EngineError when it refuses."""
        return _checked(self._run(["podman", *arguments], timeout_s, given))

    def asked(self, *arguments: str) -> list[dict[str, Any]]:
        """What podman prints as JSON."""
        found: list[dict[str, Any]] = json.loads(self.podman(*arguments) or "[]")
        return found

    def versions(self) -> dict[str, str]:
        """What builds and runs here."""
        (about,) = json.loads(f"[{self.podman('info', '--format', 'json')}]")
        return {
            "podman": about["version"]["Version"],
            "runtime": about["host"]["ociRuntime"]["version"].splitlines()[0],
            "cgroups": about["host"]["cgroupVersion"],
        }

    def build(
        self, context: Path, file: Path, tag: str, *, arguments: Mapping[str, str] = _NONE, volumes: Sequence[str] = ()
    ) -> None:
        """One image, its unchanged layers from before; EngineError with the end of the log, which lies beside."""
        log = self.root / "logs" / f"build-{file.name}.log"
        log.parent.mkdir(exist_ok=True)
        command = ["buildah", "bud", "--isolation", "chroot", "--layers", "--file", str(file), "--tag", tag]
        command += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        command += [word for volume in volumes for word in ("--volume", volume)]
        with log.open("w") as out:
            try:
                done = subprocess.run(  # noqa: S603
                    [*command, str(context)],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=BUILD_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                msg = f"{tag} was not built within {BUILD_S:g} s ({log})"
                raise EngineError(msg) from error
        if done.returncode != 0:
            msg = f"{tag} was not built ({log}):\n{log.read_text()[-2000:]}"
            raise EngineError(msg)

    def _run(self, command: list[str], timeout_s: float, given: str | None) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(  # noqa: S603
                command,
                env=self.environment,
                input=given or "",
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout_s:g} s")


def _ulimits() -> list[str]:
    """Open files as this process may have them, and few processes: podman's defaults are refused to a confined root."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return ["nproc=1024:1024", *([] if files == resource.RLIM_INFINITY else [f"nofile={files}:{files}"])]


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode != 0:
        msg = f"{' '.join(done.args[:4])} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}"
        raise EngineError(msg)
    return done.stdout
