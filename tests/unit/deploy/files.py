"""docker-compose.yml, the Dockerfiles and deploy/k8s/base, read as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "deploy" / "k8s" / "base"
RUN_FILE = BASE / "run.toml"
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
OURS = "sao/"
"""What the names of our own images begin with."""


@dataclass(frozen=True)
class Container:
    """One container, wherever it is described."""

    where: str
    image: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    """Volume by path."""
    read_only: bool = False
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """What `python -m` starts; empty for another program."""
        return self.argv[2] if self.argv[:2] == ["python", "-m"] else ""

    def option(self, name: str) -> str | None:
        """The value after `name` on the command line."""
        return self.argv[self.argv.index(name) + 1] if name in self.argv else None


def dockerfile_command(path: Path) -> list[str]:
    """The CMD of a Dockerfile."""
    found = re.findall(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)
    command: list[str] = json.loads(found[-1])
    return command


def dockerfile_of(image: str) -> Path:
    """The file that builds sao/NAME."""
    return ROOT / "deploy" / "docker" / f"{image.removeprefix(OURS)}.Dockerfile"


def compose() -> dict[str, Any]:
    """docker-compose.yml, merge keys resolved."""
    made: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return made


def compose_containers() -> list[Container]:
    """Every service that we build."""
    found = []
    for name, service in compose()["services"].items():
        if "build" not in service:
            continue
        dockerfile = ROOT / service["build"]["dockerfile"]
        mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
        found.append(
            Container(
                where=f"compose/{name}",
                image=f"{OURS}{dockerfile.name.removesuffix('.Dockerfile')}",
                argv=service.get("command") or dockerfile_command(dockerfile),
                env=service["environment"],
                mounts=mounts | dict.fromkeys(service["tmpfs"], "tmpfs"),
                read_only=service["read_only"],
                raw=service,
            )
        )
    return found


def k8s_objects() -> list[dict[str, Any]]:
    """Every object of the base, before kustomize has seen it."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((BASE / name).read_text())]


def k8s_pods() -> dict[str, dict[str, Any]]:
    """Pod template by workload name."""
    return {
        one["metadata"]["name"]: one["spec"]["template"] for one in k8s_objects() if "template" in one.get("spec", {})
    }


def k8s_services() -> dict[str, dict[str, int]]:
    """Port by port name by Service."""
    return {
        one["metadata"]["name"]: {port["name"]: port["port"] for port in one["spec"]["ports"]}
        for one in k8s_objects()
        if one["kind"] == "Service"
    }


def k8s_containers() -> list[Container]:
    """Every container and init container."""
    return [
        Container(
            where=f"k8s/{pod}/{one['name']}",
            image=one["image"],
            argv=one["args"],
            env={item["name"]: item["value"] for item in one.get("env", []) if "value" in item},
            mounts={mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]},
            read_only=one["securityContext"]["readOnlyRootFilesystem"],
            raw=one,
        )
        for pod, template in k8s_pods().items()
        for one in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    ]


def our_containers() -> list[Container]:
    """Every container of our images, in both deployments."""
    return [one for one in [*compose_containers(), *k8s_containers()] if one.image.startswith(OURS)]
