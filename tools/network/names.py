"""The cluster's names: each Service leads to its pods' addresses, each pod of a StatefulSet has one of its own.

Kubernetes' proxying of a Service's own address is left out: a name leads to the pods at once, so a Service must not map
its port to another of the pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.manifests.edges import NAMESPACE
from tools.manifests.render import Object
from tools.network.hosts import Host

CLUSTER = "cluster.local"
DOMAIN = f"{NAMESPACE}.svc.{CLUSTER}"


def records(objects: Sequence[Object], hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """Address and name of each, as in /etc/hosts; ValueError for a Service that maps a port to another."""
    return [pair for one in objects if one["kind"] == "Service" for pair in _of_service(one, hosts)]


def _of_service(service: Object, hosts: Sequence[Host]) -> Iterator[tuple[str, str]]:
    name, selector = service["metadata"]["name"], service["spec"]["selector"].items()
    for host in hosts:
        if host.pod is None or not selector <= host.peer.labels.items():
            continue
        _refuse_mapped_ports(service, host)
        yield host.address, f"{name}.{DOMAIN}"
        if host.pod.owner.startswith("StatefulSet"):
            yield host.address, f"{host.name}.{name}.{DOMAIN}"


def _refuse_mapped_ports(service: Object, host: Host) -> None:
    assert host.pod is not None
    numbers = {
        port.get("name"): port["containerPort"] for one in host.pod.containers for port in one.get("ports") or []
    }
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        if numbers.get(target, target) != port["port"]:
            name = service["metadata"]["name"]
            msg = f"Service {name} maps port {port['port']} to {target} of {host.name}: expected the same number"
            raise ValueError(msg)


def resolv_conf(server: str) -> str:
    """What kubelet writes into a pod of the namespace."""
    return f"search {DOMAIN} svc.{CLUSTER} {CLUSTER}\nnameserver {server}\noptions ndots:5\n"


def server_command(address: str, hosts_file: str) -> list[str]:
    """A dnsmasq that knows these names and no others, over UDP and TCP."""
    return [
        "dnsmasq",
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--user=root",
        "--no-resolv",
        "--no-hosts",
        f"--addn-hosts={hosts_file}",
        "--local=/#/",
        f"--listen-address={address}",
        "--bind-interfaces",
    ]
