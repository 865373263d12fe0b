"""Mistakes that people make in manifests, each with the check that has to notice it: `make k8s-check ARGS=--mutate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tools.manifests.render import Object, named

Stage = Literal["kubernetes", "custom", "checkov", "edges", "consistency"]


@dataclass(frozen=True)
class Mutation:
    """One mistake in one overlay."""

    name: str
    overlay: str
    caught_by: Stage
    break_: Callable[[Sequence[Object]], None]


def one(objects: Sequence[Object], kind: str, name: str) -> Any:  # noqa: ANN401 - a manifest
    """The object of this kind and name."""
    (found,) = (each for each in named(objects, kind, name) if kind == "ConfigMap" or each["metadata"]["name"] == name)
    return found


def pod(objects: Sequence[Object], kind: str, name: str) -> Any:  # noqa: ANN401
    """Its pod template's spec."""
    return one(objects, kind, name)["spec"]["template"]["spec"]


def container(objects: Sequence[Object], kind: str, workload: str, name: str) -> Any:  # noqa: ANN401
    """One of its containers."""
    (found,) = (each for each in pod(objects, kind, workload)["containers"] if each["name"] == name)
    return found


def _misspelt_field(objects: Sequence[Object]) -> None:
    spec = container(objects, "Deployment", "ingest", "ingest")
    spec["redinessProbe"] = spec.pop("readinessProbe")


def _wrong_type(objects: Sequence[Object]) -> None:
    one(objects, "StatefulSet", "reward")["spec"]["replicas"] = "two"


def _unknown_in_crd(objects: Sequence[Object]) -> None:
    one(objects, "LeaderWorkerSet", "engine-group")["spec"]["leaderWorkerTemplate"]["sizes"] = 2


def _unknown_in_crd_pod(objects: Sequence[Object]) -> None:
    group = one(objects, "LeaderWorkerSet", "trainer-group")["spec"]["leaderWorkerTemplate"]
    group["workerTemplate"]["spec"]["containers"][0]["limits"] = {"cpu": "1"}


def _bad_scaled_object(objects: Sequence[Object]) -> None:
    one(objects, "ScaledObject", "rollout")["spec"]["maxReplicas"] = 3


def _unknown_kind(objects: Sequence[Object]) -> None:
    one(objects, "ScaledObject", "reward")["kind"] = "ScaleObject"


def _no_limits(objects: Sequence[Object]) -> None:
    del container(objects, "Deployment", "weights", "weights")["resources"]["limits"]


def _privileged(objects: Sequence[Object]) -> None:
    container(objects, "StatefulSet", "rollout", "engine")["securityContext"]["privileged"] = True


def _root(objects: Sequence[Object]) -> None:
    spec = pod(objects, "Deployment", "trainer")
    spec["securityContext"]["runAsNonRoot"] = False
    spec["securityContext"]["runAsUser"] = 0


def _writable_root(objects: Sequence[Object]) -> None:
    container(objects, "StatefulSet", "reward", "reward")["securityContext"]["readOnlyRootFilesystem"] = False


def _kept_capabilities(objects: Sequence[Object]) -> None:
    del container(objects, "StatefulSet", "valkey", "valkey")["securityContext"]["capabilities"]


def _host_network(objects: Sequence[Object]) -> None:
    group = one(objects, "LeaderWorkerSet", "engine-group")["spec"]["leaderWorkerTemplate"]
    group["workerTemplate"]["spec"]["hostNetwork"] = True


def _latest_image(objects: Sequence[Object]) -> None:
    container(objects, "StatefulSet", "valkey", "valkey")["image"] = "valkey/valkey:latest"


def _token_mounted(objects: Sequence[Object]) -> None:
    pod(objects, "Deployment", "ingest")["automountServiceAccountToken"] = True


def _a_role(objects: Sequence[Object]) -> None:
    assert isinstance(objects, list)
    objects.append(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "reader", "namespace": "sao"},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
        }
    )


def _removed_edge(objects: Sequence[Object]) -> None:
    spec = one(objects, "NetworkPolicy", "weights")["spec"]
    spec["egress"] = [rule for rule in spec["egress"] if rule["ports"][0]["port"] != 30000]


def _one_end_only(objects: Sequence[Object]) -> None:
    one(objects, "NetworkPolicy", "valkey")["spec"]["ingress"][0]["from"].pop()


def _opened_store(objects: Sequence[Object]) -> None:
    one(objects, "NetworkPolicy", "valkey")["spec"]["ingress"].append({"ports": [{"protocol": "TCP", "port": 6379}]})


def _no_denial(objects: Sequence[Object]) -> None:
    assert isinstance(objects, list)
    objects.remove(one(objects, "NetworkPolicy", "reward"))
    objects.remove(one(objects, "NetworkPolicy", "deny-all"))


def _new_way_out(objects: Sequence[Object]) -> None:
    rule = {"to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "weights"}}}]}
    one(objects, "NetworkPolicy", "trainer")["spec"]["egress"].append(rule)
    rule = {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "trainer"}}}]}
    one(objects, "NetworkPolicy", "weights")["spec"]["ingress"].append(rule)


def _sleepy_probe(objects: Sequence[Object]) -> None:
    container(objects, "StatefulSet", "rollout", "engine")["livenessProbe"] = {
        "httpGet": {"path": "/health", "port": 30000}
    }


def _old_run_file(objects: Sequence[Object]) -> None:
    for volume in pod(objects, "Deployment", "trainer")["volumes"]:
        if volume["name"] == "run-file":
            volume["configMap"]["name"] = "run-file-0000000000"


def _run_file_without_hash(objects: Sequence[Object]) -> None:
    one(objects, "ConfigMap", "run-file")["metadata"]["name"] = "run-file"


def _too_few_gpus(objects: Sequence[Object]) -> None:
    container(objects, "Deployment", "trainer", "trainer")["resources"]["limits"]["nvidia.com/gpu"] = "4"


def _another_tp_size(objects: Sequence[Object]) -> None:
    group = one(objects, "LeaderWorkerSet", "engine-group")["spec"]["leaderWorkerTemplate"]
    args = group["workerTemplate"]["spec"]["containers"][0]["args"]
    args[args.index("--tp-size=8")] = "--tp-size=4"


def _no_toleration(objects: Sequence[Object]) -> None:
    del pod(objects, "StatefulSet", "rollout")["tolerations"]


def _smaller_store(objects: Sequence[Object]) -> None:
    for variable in container(objects, "StatefulSet", "valkey", "valkey")["env"]:
        if variable["name"] == "MAXMEMORY":
            variable["value"] = "512mb"


def _short_grace(objects: Sequence[Object]) -> None:
    pod(objects, "StatefulSet", "rollout")["terminationGracePeriodSeconds"] = 30


def _flag(objects: Sequence[Object], flag: str) -> None:
    container(objects, "StatefulSet", "rollout", "engine")["args"].append(flag)


def _another_share(objects: Sequence[Object]) -> None:
    _flag(objects, "--mem-fraction-static=0.5")


def _short_context(objects: Sequence[Object]) -> None:
    _flag(objects, "--context-length=16384")


def _more_workers(objects: Sequence[Object]) -> None:
    one(objects, "StatefulSet", "rollout")["spec"]["replicas"] = 5


def _more_gpus(objects: Sequence[Object]) -> None:
    _in_run_file(objects, "gpus = 8", "gpus = 16")


def _longer_drain(objects: Sequence[Object]) -> None:
    _in_run_file(objects, "drain_s = 300.0", "drain_s = 320.0")


def _no_drain(objects: Sequence[Object]) -> None:
    _in_run_file(objects, "drain_s = 9600.0", "drain_s = 2.0")


def _in_run_file(objects: Sequence[Object], before: str, after: str) -> None:
    data = one(objects, "ConfigMap", "run-file")["data"]
    assert before in data["run.toml"]
    data["run.toml"] = data["run.toml"].replace(before, after)


def _hasty_engine(objects: Sequence[Object]) -> None:
    container(objects, "StatefulSet", "rollout", "engine")["lifecycle"] = {"preStop": {"sleep": {"seconds": 5}}}


def _pending_entries(objects: Sequence[Object]) -> None:
    said = one(objects, "ScaledObject", "reward")["spec"]["triggers"][0]["metadata"]
    said["pendingEntriesCount"] = said.pop("lagCount")


def _another_run(objects: Sequence[Object]) -> None:
    one(objects, "ScaledObject", "reward")["spec"]["triggers"][0]["metadata"]["stream"] = (
        "sao:{run}:stream:trajectories"
    )


def _unknown_secret(objects: Sequence[Object]) -> None:
    for variable in container(objects, "Deployment", "weights", "weights")["env"]:
        if variable["name"] == "SAO__AUTH__TOKEN":
            variable["valueFrom"]["secretKeyRef"]["key"] = "token"


MUTATIONS = (
    Mutation("a misspelt field", "cpu", "kubernetes", _misspelt_field),
    Mutation("text for a number", "cpu", "kubernetes", _wrong_type),
    Mutation("an unknown field in a LeaderWorkerSet", "gpu-multi", "custom", _unknown_in_crd),
    Mutation("an unknown field deep in its pods", "gpu-multi", "custom", _unknown_in_crd_pod),
    Mutation("an unknown field in a ScaledObject", "keda", "custom", _bad_scaled_object),
    Mutation("a kind that nobody defines", "keda", "custom", _unknown_kind),
    Mutation("no limits", "cpu", "checkov", _no_limits),
    Mutation("no limits (seen without checkov)", "cpu", "consistency", _no_limits),
    Mutation("a privileged engine", "cpu", "checkov", _privileged),
    Mutation("a privileged engine (seen without checkov)", "gpu", "consistency", _privileged),
    Mutation("root", "cpu", "checkov", _root),
    Mutation("a writable root", "cpu", "checkov", _writable_root),
    Mutation("capabilities kept", "cpu", "checkov", _kept_capabilities),
    Mutation("host network in a LeaderWorkerSet", "gpu-multi", "checkov", _host_network),
    Mutation("image latest", "cpu", "checkov", _latest_image),
    Mutation("a token of the API in a pod", "cpu", "consistency", _token_mounted),
    Mutation("a role", "cpu", "consistency", _a_role),
    Mutation("an edge removed", "cpu", "edges", _removed_edge),
    Mutation("an edge removed at its other end", "gpu", "edges", _one_end_only),
    Mutation("the store open to everybody", "gpu", "edges", _opened_store),
    Mutation("no denial by default", "cpu", "edges", _no_denial),
    Mutation("an edge that the page does not have", "gpu-multi", "edges", _new_way_out),
    Mutation("a probe that hangs during updates", "gpu", "consistency", _sleepy_probe),
    Mutation("the ConfigMap of an earlier run file", "cpu", "consistency", _old_run_file),
    Mutation("a run file without its hash", "cpu", "consistency", _run_file_without_hash),
    Mutation("fewer GPUs than ranks", "gpu", "consistency", _too_few_gpus),
    Mutation("another --tp-size than GPUs", "gpu-multi", "consistency", _another_tp_size),
    Mutation("GPUs without a toleration", "gpu", "consistency", _no_toleration),
    Mutation("a store smaller than the run file says", "gpu", "consistency", _smaller_store),
    Mutation("a grace shorter than an episode", "gpu", "consistency", _short_grace),
    Mutation("another share of the memory for an engine", "gpu", "consistency", _another_share),
    Mutation("a context shorter than a trajectory", "gpu", "consistency", _short_context),
    Mutation("more episodes than the engines hold", "gpu-multi", "consistency", _more_workers),
    Mutation("more GPUs than there are pods for", "gpu", "consistency", _more_gpus),
    Mutation("a drain longer than the grace", "cpu", "consistency", _longer_drain),
    Mutation("a drain shorter than an episode", "gpu-multi", "consistency", _no_drain),
    Mutation("an engine that stops before its worker", "cpu", "consistency", _hasty_engine),
    Mutation("an engine on a GPU that stops before its worker", "gpu", "consistency", _hasty_engine),
    Mutation("scaling on pending entries", "keda", "consistency", _pending_entries),
    Mutation("scaling on another run's stream", "keda", "consistency", _another_run),
    Mutation("a Secret key that nobody makes", "cpu", "consistency", _unknown_secret),
)
