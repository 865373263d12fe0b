"""docker-compose.yml, the Dockerfiles and the rendered overlays, as data."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sao.config import RunConfig, load_run_config
from tools.manifests import compose, consistency
from tools.manifests.render import Object, Pod, kubectl, pods, render_overlay

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
OURS = "sao/"
"""What the names of our own images begin with."""
NO_KUBECTL = "kubectl is not installed: overlays are not rendered"


@dataclass(frozen=True)
class Container:
    """One container of one of our images, wherever it is described."""

    where: str
    image: str
    """Without its tag."""
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Those with a literal value."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Volume by path."""
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Our module that it runs; empty for another program."""
        words = [word for word in self.argv if re.match(r"(services|sglang_cpuref)\.", word)]
        return words[0] if words else ""

    def option(self, name: str) -> str | None:
        """The value after `name` on the command line."""
        return self.argv[self.argv.index(name) + 1] if name in self.argv else None

    @property
    def settings(self) -> dict[str, str]:
        """What its environment says about the run."""
        return {name: value for name, value in self.env.items() if name.startswith("SAO__")}


def dockerfile_command(path: Path) -> list[str]:
    """The CMD of a Dockerfile."""
    found = re.findall(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)
    command: list[str] = json.loads(found[-1])
    return command


def dockerfile_of(image: str) -> Path:
    """The file that builds sao/NAME."""
    return ROOT / "deploy" / "docker" / f"{image.removeprefix(OURS)}.Dockerfile"


def overlay(name: str) -> list[Object]:
    """Its objects; skips the test where nothing can render them."""
    if kubectl() is None:
        pytest.skip(NO_KUBECTL)
    return list(_rendered(name))


@cache
def _rendered(name: str) -> tuple[Object, ...]:
    return tuple(render_overlay(name))


def run_config(objects: list[Object], **env: str) -> RunConfig:
    """What the processes of an overlay read."""
    return _loaded(consistency.run_file(objects), tuple(env.items()))


@cache
def _loaded(text: str, env: tuple[tuple[str, str], ...]) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text)
        return load_run_config(path, env=dict(env))


def containers(objects: list[Object]) -> list[Container]:
    """Every container of our images in an overlay."""
    return [_container(pod, one) for pod in pods(objects) for one in pod.containers if one["image"].startswith(OURS)]


def _container(pod: Pod, one: Mapping[str, Any]) -> Container:
    return Container(
        where=f"{pod.owner}/{one['name']}",
        image=one["image"].partition(":")[0],
        argv=[*one.get("command", []), *one.get("args", [])],
        env=consistency.environment(one),
        mounts={mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]},
        raw=one,
    )


def compose_containers(profile: str) -> list[Container]:
    """Every container of our images that a profile of docker-compose.yml starts."""
    found = []
    for name, one in compose.of_profile(compose.services(), profile).items():
        if "build" not in one:
            continue
        dockerfile = ROOT / one["build"]["dockerfile"]
        found.append(
            Container(
                where=f"compose/{name}",
                image=one["image"].partition(":")[0],
                argv=one.get("command") or dockerfile_command(dockerfile),
                env={key: value for key, value in one["environment"].items() if "${" not in value},
                mounts={volume.rsplit(":/", 1)[1]: volume for volume in one["volumes"]},
                raw=one,
            )
        )
    return found
