"""Service names lead to pods, as a cluster's name server would say."""

from __future__ import annotations

from typing import Any

import pytest

from sao.doctor.names import resolver
from tests.unit.deploy import files
from tests.unit.tools.network.manifests import NAME, workload
from tools.network.hosts import hosts
from tools.network.names import DOMAIN, records, resolv_conf


def service(name: str, port: int, target: object = None) -> dict[str, Any]:
    ports = [{"port": port, **({"targetPort": target} if target else {})}]
    return {"kind": "Service", "metadata": {"name": name}, "spec": {"selector": {NAME: name}, "ports": ports}}


CONTAINERS = [{"name": "a", "ports": [{"containerPort": 7, "name": "seven"}]}]


def test_a_service_leads_to_each_pod_and_a_stateful_pod_has_a_name() -> None:
    objects = [workload("a", kind="StatefulSet", replicas=2, containers=CONTAINERS), service("a", 7, "seven")]
    first, second, *_ = hosts(objects)
    assert records(objects, hosts(objects)) == [
        (first.address, f"a.{DOMAIN}"),
        (first.address, f"a-0.a.{DOMAIN}"),
        (second.address, f"a.{DOMAIN}"),
        (second.address, f"a-1.a.{DOMAIN}"),
    ]


@pytest.mark.parametrize("target", [8, "seven"])
def test_a_service_that_maps_ports_is_refused(target: object) -> None:
    objects = [workload("a", containers=CONTAINERS), service("a", 80, target)]
    with pytest.raises(ValueError, match="Service a maps port 80 to"):
        records(objects, hosts(objects))


def test_the_cpu_overlay_has_every_name_that_its_run_file_dials() -> None:
    objects = files.overlay("cpu")
    config = files.run_config(objects)
    names = {name.partition(".")[0] for _, name in records(objects, hosts(objects))}
    assert {"valkey", str(config.ingest.target).partition(":")[0], config.engine.dns.partition(":")[0]} <= names


def test_a_short_name_is_asked_for_in_the_namespace_first() -> None:
    found = resolver(resolv_conf("10.231.0.9"))
    assert (found.servers, found.first("valkey")) == (["10.231.0.9"], f"valkey.{DOMAIN}")
