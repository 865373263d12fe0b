"""What a build takes from the machine that it runs on, so that no Dockerfile has to know it.

pip in a build sees the machine's own configuration of pip: index, certificate, constraints. The files and folders
that it names are mounted at the same places, read-only, for the length of the build.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.manifests.render import kubectl
from tools.setup import TORCH_INDEX

ON_DEBIAN = "buildah podman runc debootstrap netavark aardvark-dns catatonit uidmap iptables"
PROGRAMS = ("buildah", "podman", "runc", "netavark", "aardvark-dns")
"""All that is looked for before anything is done; Debian's packages have the same names."""
PYPI = "https://pypi.org/simple"
_HELPERS = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/local/libexec/podman")
"""Where podman looks for the programs of its network."""
_LINE = re.compile(r"^(?:global|install|:env:)\.(?P<name>[\w-]+)=(?P<value>.+)$")
_PIP_TIMEOUT_S = 120


class CannotCheckError(RuntimeError):
    """Something is not here that the check needs; the message says what to do."""


def require() -> None:
    """CannotCheckError where containers cannot be built and run."""
    if os.geteuid() != 0:
        msg = "containers are run by root (runc, cgroups, a bridge network): run it as root, or with sudo"
        raise CannotCheckError(msg)
    path = os.pathsep.join([os.environ.get("PATH", ""), *_HELPERS])
    lacking = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if lacking:
        msg = f"{', '.join(lacking)} missing: on Debian, apt-get install {ON_DEBIAN}"
        raise CannotCheckError(msg)
    if kubectl() is None:
        msg = "kubectl is not on the PATH; it renders the overlay (https://kubernetes.io/docs/tasks/tools/)"
        raise CannotCheckError(msg)


def pip_settings(listed: str) -> dict[str, str]:
    """`pip config list` as one table of names without their section; the environment's win over a file's."""
    found: dict[str, str] = {}
    for from_environment in (False, True):
        for line in listed.splitlines():
            match = _LINE.match(line)
            if match and line.startswith(":env:") is from_environment:
                found[match["name"]] = str(ast.literal_eval(match["value"]))
    return found


def pip_conf(settings: Mapping[str, str]) -> str:
    """The settings as a file for /etc/pip.conf; a value of several lines is a value of several words."""
    return "[global]\n" + "".join(f"{name} = {' '.join(value.split())}\n" for name, value in sorted(settings.items()))


def mounts(settings: Mapping[str, str], exists: Callable[[str], bool]) -> list[str]:
    """Every path of this machine that the settings name, once; of an index the folder above, where its files lie."""
    words = [word for value in settings.values() for word in value.split()]
    paths = [str(Path(word.removeprefix("file://")).parent) if word.startswith("file://") else word for word in words]
    return sorted({path for path in paths if path.startswith("/") and path != "/" and exists(path)})


def read_pip() -> dict[str, str]:
    """The settings of pip that hold here."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=_PIP_TIMEOUT_S,
        check=True,
    )
    return pip_settings(done.stdout)


def torch_index(pin: str, settings: Mapping[str, str]) -> str:
    """An index that has this CPU build of torch: pip's own where it does, else PyTorch's, as tools/setup.py chooses."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", pin]
    done = subprocess.run(command, capture_output=True, timeout=_PIP_TIMEOUT_S, check=False)  # noqa: S603
    if done.returncode == 0:
        return settings.get("index-url", PYPI)
    return os.environ.get("SAO_TORCH_INDEX", TORCH_INDEX)
