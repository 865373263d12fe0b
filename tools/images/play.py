"""What an overlay renders, as `podman play kube` runs it; pure.

Podman knows Pods, ConfigMaps and volumes, so each replica of a workload becomes a Pod of its own: `reward-0` as a
StatefulSet names it. What a pod may and what it is limited to stays as rendered: users, capabilities, read-only root,
seccomp, environment, command, mounts, limits, init containers. Played by hand instead, because podman does not:

probes and hooks   asked and run by tools/images/run.py, as the kubelet does
Services           names on a network, so a Service's port has to be its container's
claims             folders of the host, owned as `fsGroup` says
restarts           after a failure only: under `Always` podman repeats an init container that has ended well
ports              known, not published
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.manifests.render import Object

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_GRACE_S = 30
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class CannotPlayError(ValueError):
    """The overlay has something that this module does not turn into what podman plays; the message names it."""


@dataclass(frozen=True)
class Probe:
    """How the kubelet asks a container, and how patient it is."""

    kind: str
    """http, tcp or exec."""
    port: int
    path: str
    command: tuple[str, ...]
    timeout_s: float
    period_s: float
    failures: int
    """In a row, until the kubelet acts."""


@dataclass(frozen=True)
class Container:
    """One container of a pod."""

    pod: str
    name: str
    init: bool
    """It runs to its end before the others start."""
    uid: int | None
    """Under which the manifest lets it run; None for the image's own."""
    memory: int
    """Limit in bytes."""
    probes: Mapping[str, Probe]
    """By the manifest's name of each."""
    pre_stop: tuple[str, ...]
    """Command run in the container before it is told to end."""
    pre_stop_s: float
    """Seconds to let pass before it is told to end."""

    @property
    def full_name(self) -> str:
        """Its name in podman."""
        return f"{self.pod}-{self.name}"


@dataclass(frozen=True)
class Played:
    """One pod."""

    name: str
    text: str
    """What podman reads."""
    aliases: tuple[str, ...]
    """Its names on the network."""
    claims: Mapping[str, int]
    """Group that owns each folder it mounts, by name."""
    grace_s: int
    containers: tuple[Container, ...]


def played(objects: Sequence[Object], images: Mapping[str, str], volumes: Path) -> list[Played]:
    """Every pod of an overlay, in its order.

    `images` gives the local name of each image of the manifest, `volumes` the folder under which claims lie.
    CannotPlayError for a Service whose port is another than its container's, and for an image without a local name.
    """
    services = [one for one in objects if one["kind"] == "Service"]
    maps = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ConfigMap"}
    return [_played(pod, services, maps, images, volumes) for pod in _pods(objects)]


def secret(values: Mapping[str, str]) -> str:
    """A Secret as podman keeps it."""
    return json.dumps({key: base64.b64encode(value.encode()).decode() for key, value in values.items()})


def images_of(objects: Sequence[Object]) -> list[str]:
    """Every image that the overlay's containers name."""
    return sorted({one["image"] for pod in _pods(objects) for one in _every(pod["spec"])})


def size(text: str) -> int:
    """Bytes of a Kubernetes quantity."""
    return int(text[:-2]) * _UNITS[text[-2:]] if text[-2:] in _UNITS else int(text)


def _pods(objects: Sequence[Object]) -> Iterator[Object]:
    for one in objects:
        if one["kind"] not in {"Deployment", "StatefulSet"}:
            continue
        spec = one["spec"]
        for ordinal in range(spec["replicas"]):
            pod = copy.deepcopy(spec["template"])
            name = f"{one['metadata']['name']}-{ordinal}"
            pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": {**pod["metadata"], "name": name}}
            for claim in spec.get("volumeClaimTemplates", ()):
                made = {"claimName": f"{claim['metadata']['name']}-{name}"}
                volume = {"name": claim["metadata"]["name"], "persistentVolumeClaim": made}
                pod["spec"].setdefault("volumes", []).append(volume)
            yield pod


def _played(
    pod: Object, services: Sequence[Object], maps: Mapping[str, Object], images: Mapping[str, str], volumes: Path
) -> Played:
    spec, name = pod["spec"], pod["metadata"]["name"]
    containers = tuple(_container(pod, one) for one in _every(spec))
    aliases = tuple(_aliases(pod, services))
    text, used, claims = copy.deepcopy(pod), [], {}
    for volume in text["spec"].get("volumes", ()):
        if "configMap" in volume:
            used.append(maps[volume["configMap"]["name"]])
        elif "persistentVolumeClaim" in volume:
            claim = volume.pop("persistentVolumeClaim")["claimName"]
            claims[claim] = int(spec["securityContext"]["fsGroup"])
            volume["hostPath"] = {"path": str(volumes / claim), "type": "Directory"}
    text["spec"]["restartPolicy"] = "OnFailure"
    for one in _every(text["spec"]):
        if one["image"] not in images:
            msg = f"{name}/{one['name']}: nothing was built for the image {one['image']}; there is {sorted(images)}"
            raise CannotPlayError(msg)
        one |= {"image": images[one["image"]], "imagePullPolicy": "Never"}
        for key in ("ports", "lifecycle", *_PROBES):
            one.pop(key, None)
    return Played(
        name=name,
        text=yaml.safe_dump_all([*used, text], sort_keys=False),
        aliases=aliases,
        claims=claims,
        grace_s=spec.get("terminationGracePeriodSeconds", _GRACE_S),
        containers=containers,
    )


def _every(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _aliases(pod: Object, services: Sequence[Object]) -> Iterator[str]:
    """Names of the Services that choose the pod."""
    labels = pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for one in pod["spec"]["containers"] for port in one.get("ports", ())}
    for service in services:
        if not service["spec"]["selector"].items() <= labels.items():
            continue
        for port in service["spec"]["ports"]:
            target = ports.get(port["targetPort"], port["targetPort"])
            if target != port["port"]:
                name = service["metadata"]["name"]
                msg = f"Service {name}: port {port['port']} leads to {target}; a name on a network cannot do that"
                raise CannotPlayError(msg)
        yield service["metadata"]["name"]


def _container(pod: Object, one: Mapping[str, Any]) -> Container:
    ports = {port["name"]: port["containerPort"] for port in one.get("ports", ())}
    hook = one.get("lifecycle", {}).get("preStop", {})
    user = one["securityContext"].get("runAsUser", pod["spec"]["securityContext"].get("runAsUser"))
    return Container(
        pod=pod["metadata"]["name"],
        name=one["name"],
        init=one in pod["spec"].get("initContainers", ()),
        uid=user,
        memory=size(one["resources"]["limits"]["memory"]),
        probes={kind: _probe(one[kind], ports) for kind in _PROBES if kind in one},
        pre_stop=tuple(hook.get("exec", {}).get("command", ())),
        pre_stop_s=float(hook.get("sleep", {}).get("seconds", 0)),
    )


def _probe(said: Mapping[str, Any], ports: Mapping[str, int]) -> Probe:
    timeout_s, period_s = float(said.get("timeoutSeconds", 1)), float(said.get("periodSeconds", 10))
    failures = int(said.get("failureThreshold", 3))
    if "exec" in said:
        return Probe("exec", 0, "", tuple(said["exec"]["command"]), timeout_s, period_s, failures)
    kind, how = ("http", said["httpGet"]) if "httpGet" in said else ("tcp", said["tcpSocket"])
    port = ports.get(how["port"], how["port"])
    return Probe(kind, port, how.get("path", ""), (), timeout_s, period_s, failures)
