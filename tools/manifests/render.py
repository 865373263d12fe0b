"""Overlays as Kubernetes will see them: `kubectl kustomize`, offline, and the pods in the result."""

from __future__ import annotations

import copy
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("cpu", "gpu", "gpu-multi", "monitoring", "keda", "traces")
NEEDS_MONITORING = frozenset({"monitoring", "keda"})
"""Overlays that include deploy/monitoring."""
NAME = "app.kubernetes.io/name"
_RENDER_TIMEOUT_S = 60

Object = dict[str, Any]


class RenderError(RuntimeError):
    """kustomize refuses; the message is its own."""


@dataclass(frozen=True)
class Pod:
    """The pods of one template."""

    owner: str
    """Kind and name of what makes them."""
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    count: int
    """Of one group for a LeaderWorkerSet, else of the workload."""

    @property
    def name(self) -> str:
        """The workload they belong to, by its label."""
        return self.labels.get(NAME, "")

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """Its containers, those that run first included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> Mapping[str, Any]:
        """One of them; KeyError when it has none of that name."""
        for one in self.containers:
            if one["name"] == name:
                return one
        msg = f"{self.owner} has no container {name}"
        raise KeyError(msg)


def kubectl() -> str | None:
    """The binary that renders, where there is one."""
    return shutil.which("kubectl")


def render(folder: Path) -> list[Object]:
    """Every object of a kustomization; RenderError with kustomize's own words, FileNotFoundError without kubectl."""
    binary = kubectl()
    if binary is None:
        msg = "kubectl is not on the PATH; it renders the overlays (https://kubernetes.io/docs/tasks/tools/)"
        raise FileNotFoundError(msg)
    done = subprocess.run(  # noqa: S603
        [binary, "kustomize", str(folder)], capture_output=True, text=True, timeout=_RENDER_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        msg = f"{folder}: {done.stderr.strip()}"
        raise RenderError(msg)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def render_overlay(name: str) -> list[Object]:
    """Every object of deploy/k8s/overlays/NAME."""
    return render(K8S / "overlays" / name)


def loader() -> list[Object]:
    """The pod that puts a checkpoint into the volume."""
    return [yaml.safe_load((K8S / "loader.yaml").read_text())]


def render_with(overlay: str, components: Sequence[str]) -> list[Object]:
    """An overlay of one's own: `overlay` with these components of deploy/k8s/components."""
    with tempfile.TemporaryDirectory(dir=K8S / "overlays", prefix=".own-") as folder:
        own = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "sao",
            "resources": [f"../{overlay}"],
            "components": [f"../../components/{name}" for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(own))
        return render(Path(folder))


def pods(objects: Sequence[Object]) -> list[Pod]:
    """The pods of every workload; a LeaderWorkerSet has two templates."""
    return [pod for one in objects for pod in _pods_of(one)]


def _pods_of(one: Object) -> Iterator[Pod]:
    owner, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec") or {}
    if one["kind"] == "Pod":
        yield Pod(owner, one["metadata"]["labels"], spec, 1)
    elif one["kind"] in {"Deployment", "StatefulSet"}:
        template = spec["template"]
        yield Pod(owner, template["metadata"]["labels"], template["spec"], spec.get("replicas", 1))
    elif one["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        for role, count in (("leader", 1), ("worker", group["size"] - 1)):
            template = group[f"{role}Template"]
            yield Pod(f"{owner} ({role})", template["metadata"]["labels"], template["spec"], count)


def checked_as(one: Object) -> list[Object]:
    """The object itself, and for a LeaderWorkerSet its templates as pods, which generic checkers understand."""
    if one["kind"] != "LeaderWorkerSet":
        return [one]
    group, name = one["spec"]["leaderWorkerTemplate"], one["metadata"]["name"]
    return [
        one,
        *(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-{role}",
                    "namespace": one["metadata"]["namespace"],
                    "labels": group[f"{role}Template"]["metadata"]["labels"],
                },
                "spec": copy.deepcopy(group[f"{role}Template"]["spec"]),
            }
            for role in ("leader", "worker")
        ),
    ]


def named(objects: Sequence[Object], kind: str, name: str = "") -> list[Object]:
    """Objects of a kind whose name is `name`, or begins with it and goes on with a dash."""
    return [
        one
        for one in objects
        if one["kind"] == kind
        and (not name or one["metadata"]["name"] == name or one["metadata"]["name"].startswith(f"{name}-"))
    ]
