"""What podman is given of an overlay, and what is kept for the check itself."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy import files
from tools.images.play import CannotPlayError, Played, Probe, images_of, played, secret, size
from tools.manifests.render import Object, pods

VOLUMES = Path("/volumes")
LABELS = {"app.kubernetes.io/name": "store"}
CONTAINER: Object = {
    "name": "server",
    "image": "some/store:1",
    "args": ["serve"],
    "env": [{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "sao", "key": "redis-password"}}}],
    "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
    "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 20, "failureThreshold": 6},
    "readinessProbe": {"exec": {"command": ["ping", "-e"]}, "timeoutSeconds": 4},
    "startupProbe": {"httpGet": {"path": "/healthz", "port": "redis"}, "periodSeconds": 2, "failureThreshold": 150},
    "ports": [{"name": "redis", "containerPort": 6379}],
    "resources": {"limits": {"cpu": "1", "memory": "64Mi"}},
    "securityContext": {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
    "volumeMounts": [{"name": "stream", "mountPath": "/stream"}],
}
STORE: Object = {
    "kind": "StatefulSet",
    "metadata": {"name": "store"},
    "spec": {
        "replicas": 2,
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                "containers": [CONTAINER],
                "securityContext": {"runAsUser": 10001, "fsGroup": 10002},
                "terminationGracePeriodSeconds": 60,
                "volumes": [
                    {"name": "run-file", "configMap": {"name": "run-file-1"}},
                    {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                ],
            },
        },
        "volumeClaimTemplates": [{"metadata": {"name": "stream"}}],
    },
}
SERVICE: Object = {
    "kind": "Service",
    "metadata": {"name": "valkey"},
    "spec": {"selector": LABELS, "ports": [{"port": 6379, "targetPort": "redis"}]},
}
RUN_FILE: Object = {"kind": "ConfigMap", "metadata": {"name": "run-file-1"}, "data": {"run.toml": "a"}}
IMAGES = {"some/store:1": "localhost/store"}


def play(*objects: Object) -> list[Played]:
    return played([*objects, RUN_FILE], IMAGES, VOLUMES)


def documents(pod: Played) -> list[Any]:
    return list(yaml.safe_load_all(pod.text))


def test_each_replica_is_a_pod_with_the_name_that_a_stateful_set_gives_it() -> None:
    assert [pod.name for pod in play(STORE)] == ["store-0", "store-1"]
    assert [documents(pod)[-1]["metadata"]["name"] for pod in play(STORE)] == ["store-0", "store-1"]
    assert documents(play(STORE)[0])[-1]["metadata"]["labels"] == LABELS


def test_a_claim_is_a_folder_of_the_group_that_fs_group_names_and_a_template_makes_one_for_each_replica() -> None:
    first, second = play(STORE)
    assert first.claims == {"data": 10002, "stream-store-0": 10002}
    assert second.claims == {"data": 10002, "stream-store-1": 10002}
    volumes = {one["name"]: one for one in documents(second)[-1]["spec"]["volumes"]}
    assert volumes["stream"]["hostPath"] == {"path": "/volumes/stream-store-1", "type": "Directory"}
    assert "persistentVolumeClaim" not in volumes["data"]


def test_a_config_map_travels_with_the_pod_that_mounts_it() -> None:
    assert documents(play(STORE)[0])[0] == RUN_FILE
    alone = copy.deepcopy(STORE)
    del alone["spec"]["template"]["spec"]["volumes"][0]
    assert [one["kind"] for one in documents(play(alone)[0])] == ["Pod"]


def test_probes_and_hooks_are_for_the_check_and_not_for_podman() -> None:
    pod = play(STORE)[0]
    (container,) = pod.containers
    assert container.full_name == "store-0-server"
    assert container.probes == {
        "startupProbe": Probe("http", 6379, "/healthz", (), 1, 2, 150),
        "readinessProbe": Probe("exec", 0, "", ("ping", "-e"), 4, 10, 3),
        "livenessProbe": Probe("tcp", 6379, "", (), 1, 20, 6),
    }
    assert (container.pre_stop, container.pre_stop_s, pod.grace_s) == ((), 5, 60)
    assert (container.uid, container.memory, container.init) == (10001, 64 * 2**20, False)
    (given,) = documents(pod)[-1]["spec"]["containers"]
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"} & given.keys()
    assert (given["image"], given["imagePullPolicy"]) == ("localhost/store", "Never")


def test_podman_starts_again_what_failed_and_not_what_ended_well() -> None:
    assert [documents(pod)[-1]["spec"]["restartPolicy"] for pod in play(STORE)] == ["OnFailure", "OnFailure"]


def test_a_container_s_own_user_comes_before_its_pod_s() -> None:
    own = copy.deepcopy(STORE)
    own["spec"]["template"]["spec"]["containers"][0]["securityContext"]["runAsUser"] = 0
    assert play(own)[0].containers[0].uid == 0


def test_services_that_choose_a_pod_are_its_names() -> None:
    other = copy.deepcopy(SERVICE) | {"metadata": {"name": "other"}}
    other["spec"]["selector"] = {"app.kubernetes.io/name": "other"}
    assert play(STORE, SERVICE, other)[0].aliases == ("valkey",)


def test_a_service_that_translates_ports_cannot_be_played() -> None:
    moved = copy.deepcopy(SERVICE)
    moved["spec"]["ports"][0]["port"] = 80
    with pytest.raises(CannotPlayError, match="valkey: port 80 leads to 6379"):
        play(STORE, moved)


def test_an_image_that_nobody_built_cannot_be_played() -> None:
    with pytest.raises(CannotPlayError, match=r"store-0/server: .*some/store:1"):
        played([STORE, RUN_FILE], {}, VOLUMES)


def test_a_secret_is_what_podman_reads() -> None:
    assert {key: base64.b64decode(value) for key, value in json.loads(secret({"a": "b"})).items()} == {"a": b"b"}


@pytest.mark.parametrize(("text", "bytes_"), [("64Mi", 2**26), ("1Gi", 2**30), ("2Ki", 2048), ("7", 7)])
def test_quantities(text: str, bytes_: int) -> None:
    assert size(text) == bytes_


def test_what_a_pod_of_overlay_cpu_may_and_gets_stays_as_it_was_rendered() -> None:
    objects = files.overlay("cpu")
    rendered = {pod.name: pod for pod in pods(objects)}
    given = played(objects, {image: image for image in images_of(objects)}, VOLUMES)
    assert {pod.name for pod in given} == {f"{name}-0" for name in rendered}
    for pod in given:
        was, spec = rendered[pod.name.removesuffix("-0")], documents(pod)[-1]["spec"]
        assert spec["securityContext"] == was.spec["securityContext"]
        is_ = [*spec.get("initContainers", ()), *spec["containers"]]
        assert len(is_) == len(was.containers) == len(pod.containers)
        for one, before in zip(is_, was.containers, strict=True):
            left_out = {"ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe", "imagePullPolicy"}
            assert {key: value for key, value in one.items() if key not in left_out} == {
                key: value for key, value in before.items() if key not in left_out
            }
    lasting = [one for pod in given for one in pod.containers if not one.init]
    assert all({"startupProbe", "readinessProbe", "livenessProbe"} <= one.probes.keys() for one in lasting)
    assert {one.full_name for one in lasting if one.pre_stop or one.pre_stop_s} == {
        "ingest-0-ingest",
        "reward-0-reward",
        "rollout-0-engine",
    }
