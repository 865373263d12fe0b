"""Which namespaces there are, one for each pod and for everyone outside, and where each is."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.manifests.edges import OUTSIDE, Peer, pod_name, roles_of
from tools.manifests.render import Object, Pod, pods

NETWORK = ipaddress.ip_network("10.231.0.0/16")
"""Only in namespaces of our own: no route of the machine leads there."""


@dataclass(frozen=True)
class Host:
    """One pod, or somebody outside."""

    name: str
    """As Kubernetes names the pod of a StatefulSet."""
    peer: Peer
    address: str
    pod: Pod | None
    """None: outside."""


def hosts(objects: Sequence[Object], replicas: Mapping[str, int] | None = None) -> list[Host]:
    """Every pod of these objects, and everyone outside that policies may name.

    `replicas`: of a workload, where it is another number than the manifest's, as `kubectl scale` would make it.
    """
    found = [*_pods(objects, replicas or {}), *((pod_name(peer), peer, None) for peer in OUTSIDE)]
    addresses = NETWORK.hosts()
    return [Host(name, peer, str(next(addresses)), pod) for name, peer, pod in found]


def _pods(objects: Sequence[Object], replicas: Mapping[str, int]) -> Iterator[tuple[str, Peer, Pod]]:
    for pod in pods(objects):
        # "LeaderWorkerSet engine-group (worker)": the two templates of a group are pods of different names.
        workload = "-".join(word.strip("()") for word in pod.owner.split()[1:])
        for index in range(replicas.get(workload, pod.count)):
            yield f"{workload}-{index}", Peer(roles_of(pod), pod.labels), pod
