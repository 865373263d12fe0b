"""What the parts of an overlay say about each other: names, numbers and references that no schema knows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.manifests.render import ROOT, Object, Pod, named, pods

SECRET = "sao"  # noqa: S105 - its name
SECRET_KEYS = frozenset({"auth-token", "redis-password", "redis-url"})
GPU = "nvidia.com/gpu"
GRACE_BEYOND_DRAIN_S = 30
"""For what a worker does after its drain, and an engine after its worker; more than one call of ingest takes."""
DEFAULTS = {
    "ingest.episode_deadline_s": 300.0,
    "rollout.drain_s": 2.0,
    "rollout.concurrency": 8,
    "rollout.max_tokens": 96,
    "hardware.engine_share": 0.9,
}
"""Of the schema, which is not at hand here."""
_PINNED = re.compile(r"^[^:@]+(:[0-9v][\w.-]*|@sha256:[0-9a-f]{64})$")


def findings(objects: Sequence[Object]) -> list[str]:
    """Every contradiction in an overlay; empty when there is none."""
    checks = (_references, _run_file_is_one, _hardware, _store, _grace, _scaling)
    return [*exposures(objects), *(text for check in checks for text in check(objects))]


def exposures(objects: Sequence[Object]) -> list[str]:
    """Every pod that has more rights, or fewer bounds, than it needs."""
    return [text for check in (_images, _accounts, _hardening, _resources) for text in check(objects)]


def run_file(objects: Sequence[Object]) -> str:
    """The run file that an overlay's pods read."""
    (found,) = named(objects, "ConfigMap", "run-file")
    text: str = found["data"]["run.toml"]
    return text


def effective(objects: Sequence[Object]) -> dict[str, Any]:
    """Its tables over those of its preset."""
    return over_preset(run_file(objects))


def over_preset(text: str) -> dict[str, Any]:
    """The tables of a run file over those of the preset that it names."""
    tables = tomllib.loads(text)
    preset = ROOT / "sao" / "config" / "presets" / f"{tables.pop('preset')}.toml"
    merged = tomllib.loads(preset.read_text())
    for section, values in tables.items():
        merged[section] = {**merged.get(section, {}), **values}
    return merged


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Its variables with a literal value."""
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


def option(container: Mapping[str, Any], name: str) -> str | None:
    """The value of `--name=value`, or of `--name value`, on its command line."""
    argv = [*container.get("command", []), *container.get("args", [])]
    for index, word in enumerate(argv):
        if word.startswith(f"--{name}="):
            return str(word.partition("=")[2])
        if word == f"--{name}":
            return str(argv[index + 1])
    return None


def gpus(pod: Pod) -> int:
    """GPUs of one such pod."""
    return sum(int(one["resources"].get("limits", {}).get(GPU, 0)) for one in pod.spec["containers"])


def _references(objects: Sequence[Object]) -> Iterator[str]:
    """Every account, volume, claim, ConfigMap and Secret key that a pod names is there."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    claims = {
        template["metadata"]["name"]
        for one in objects
        for template in (one.get("spec") or {}).get("volumeClaimTemplates", [])
    }
    for pod in pods(objects):
        if ("ServiceAccount", pod.spec.get("serviceAccountName")) not in names:
            yield f"{pod.owner}: no ServiceAccount {pod.spec.get('serviceAccountName')!r}"
        volumes = {one["name"]: one for one in pod.spec.get("volumes", [])}
        for name, volume in volumes.items():
            if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in names:
                yield f"{pod.owner}: volume {name} is of ConfigMap {volume['configMap']['name']}, which is not there"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and ("PersistentVolumeClaim", claim) not in names:
                yield f"{pod.owner}: volume {name} claims {claim}, which is not there"
        for container in pod.containers:
            where = f"{pod.owner}/{container['name']}"
            for mount in container["volumeMounts"]:
                if mount["name"] not in {*volumes, *claims}:
                    yield f"{where}: mounts {mount['name']}, which is no volume of the pod"
            for one in container.get("env", []):
                secret = one.get("valueFrom", {}).get("secretKeyRef")
                if secret and (secret["name"] != SECRET or secret["key"] not in SECRET_KEYS):
                    yield f"{where}: {one['name']} is {secret['name']}/{secret['key']}, not of the documented Secret"


def _images(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for one in pod.containers:
            if not _PINNED.fullmatch(one["image"]):
                yield f"{pod.owner}/{one['name']}: image {one['image']} is not pinned by a version or a digest"


def _accounts(objects: Sequence[Object]) -> Iterator[str]:
    """No pod has a token of the Kubernetes API, and no account a right there."""
    for one in objects:
        where = f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "ServiceAccount" and one.get("automountServiceAccountToken") is not False:
            yield f"{where}: would mount a token"
        if one["kind"] in {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}:
            yield f"{where}: no service of SAO talks to the Kubernetes API"
    for pod in pods(objects):
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.owner}: would mount a token"


def _hardening(objects: Sequence[Object]) -> Iterator[str]:
    """What PodSecurity `restricted` demands, and a read-only root."""
    for pod in pods(objects):
        security = pod.spec.get("securityContext", {})
        if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
            yield f"{pod.owner}: may run as root"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.owner}: seccompProfile is not RuntimeDefault"
        yield from (f"{pod.owner}: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(key))
        for volume in pod.spec.get("volumes", []):
            if "hostPath" in volume:
                yield f"{pod.owner}: volume {volume['name']} is a hostPath"
        for container in pod.containers:
            yield from (f"{pod.owner}/{container['name']}: {text}" for text in _exposed(container))


def _exposed(container: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    for key, value in {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}.items():
        if own.get(key) is not value:
            yield f"{key} is {own.get(key)}, expected {value}"
    if own.get("privileged") or own.get("capabilities") != {"drop": ["ALL"]}:
        yield "keeps capabilities"


def _resources(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for one in pod.containers:
            for kind in ("requests", "limits"):
                missing = {"cpu", "memory"} - set(one.get("resources", {}).get(kind, {}))
                if missing:
                    yield f"{pod.owner}/{one['name']}: no {kind} of {', '.join(sorted(missing))}"
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = one.get(probe, {}).get("httpGet", {}).get("path", "")
                if path.startswith("/health") and path != "/healthz":
                    yield f"{pod.owner}/{one['name']}: {probe} asks {path}, which hangs while weights are updated"
        tolerates = any(one.get("key") == GPU for one in pod.spec.get("tolerations", []))
        if gpus(pod) and not tolerates:
            yield f"{pod.owner}: wants GPUs and does not tolerate their nodes' taint {GPU}"


def _run_file_is_one(objects: Sequence[Object]) -> Iterator[str]:
    found = [one["metadata"]["name"] for one in named(objects, "ConfigMap", "run-file")]
    if len(found) != 1 or not re.fullmatch(r"run-file-[a-z0-9]{10}", found[0]):
        yield f"ConfigMaps {found}: expected one run file, its name ending in a hash of it"


def _hardware(objects: Sequence[Object]) -> Iterator[str]:
    """GPUs and flags are those of the run file."""
    config = effective(objects)
    ranks = config["trainer"].get("ranks", 1)
    trainers = [pod for pod in pods(objects) if pod.name in {"trainer", "trainer-rank"}]
    on_gpu = config["trainer"].get("device", "auto") == "cuda"
    if (given := sum(gpus(pod) * pod.count for pod in trainers)) != (ranks if on_gpu else 0):
        yield f"the trainer has {given} GPUs, trainer.ranks is {ranks} on {config['trainer'].get('device')}"
    if not on_gpu:
        return
    hardware, engine = config["hardware"], config["engine"]
    engines = [pod for pod in pods(objects) if any(one["name"] == "engine" for one in pod.containers)]
    in_groups = len(engines) > 1
    if (given := sum(gpus(pod) * (pod.count if in_groups else 1) for pod in engines)) != hardware["engine_gpus"]:
        yield f"an engine has {given} GPUs, hardware.engine_gpus is {hardware['engine_gpus']}"
    if in_groups:
        (group,) = named(objects, "LeaderWorkerSet", "engine")
        replicas = group["spec"]["replicas"]
    else:
        replicas = engines[0].count
    scaled = any(one["spec"]["scaleTargetRef"]["name"] == "rollout" for one in named(objects, "ScaledObject"))
    if replicas != hardware["engines"] and not scaled:
        yield f"{replicas} engines, hardware.engines is {hardware['engines']}"
    wanted = {
        "tp-size": hardware["engine_gpus"],
        "dtype": engine["dtype"],
        "max-running-requests": engine["max_running_requests"],
        "max-total-tokens": engine["max_total_tokens"],
        "model-path": config["model"]["path"],
    }
    for pod in engines:
        for name, value in wanted.items():
            if (found := option(pod.container("engine"), name)) != str(value):
                yield f"{pod.owner}: --{name} is {found}, the run file says {value}"
        yield from (f"{pod.owner}: {text}" for text in _engine_bounds(pod.container("engine"), config))
    total = ranks + hardware["engines"] * hardware["engine_gpus"]
    if total != hardware["gpus"]:
        yield f"trainer and engines have {total} GPUs, hardware.gpus is {hardware['gpus']}"
    if not scaled:
        yield from _load(sum(pod.count for pod in pods(objects) if pod.name == "rollout"), replicas, config)


def _engine_bounds(container: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Flags that an engine need not have, and that `sao check` counts on where it has them."""
    share, longest = setting(config, "hardware.engine_share"), setting(config, "rollout.max_tokens")
    if (found := option(container, "mem-fraction-static")) is not None and float(found) != share:
        yield f"--mem-fraction-static is {found}, hardware.engine_share is {share:g}"
    if (found := option(container, "context-length")) is not None and int(found) < longest:
        yield f"--context-length is {found}, rollout.max_tokens is {longest:g}"


def _load(workers: int, engines: int, config: Mapping[str, Any]) -> Iterator[str]:
    """What all workers play at a time is what the engines can hold."""
    episodes = workers * setting(config, "rollout.concurrency") / engines
    if episodes > config["engine"]["max_running_requests"]:
        yield f"{episodes:g} episodes for each engine, engine.max_running_requests is less"
    if episodes * setting(config, "rollout.max_tokens") > config["engine"]["max_total_tokens"]:
        yield f"{episodes:g} of the longest episodes for each engine, engine.max_total_tokens may not hold them"


def _store(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        if pod.name == "valkey":
            memory, said = environment(pod.container("valkey"))["MAXMEMORY"], effective(objects)["redis"]
            if memory != f"{said.get('maxmemory_mb', 512)}mb":
                yield f"{pod.owner}: MAXMEMORY is {memory}, redis.maxmemory_mb is {said.get('maxmemory_mb', 512)}"


def _grace(objects: Sequence[Object]) -> Iterator[str]:
    """A worker that is asked to stop may finish what it plays, and its engine stays until it has."""
    config = effective(objects)
    drain, deadline = setting(config, "rollout.drain_s"), setting(config, "ingest.episode_deadline_s")
    if drain < deadline:
        yield f"rollout.drain_s is {drain:g}: a stop leaves episodes, which may take {deadline:g} s, to be played again"
    for pod in pods(objects):
        if pod.name != "rollout":
            continue
        seconds = pod.spec["terminationGracePeriodSeconds"]
        if seconds < drain + GRACE_BEYOND_DRAIN_S:
            wanted = f"rollout.drain_s {drain:g} and {GRACE_BEYOND_DRAIN_S} s"
            yield f"{pod.owner}: a grace of {seconds} s, expected at least {wanted}"
        for one in pod.spec["containers"]:
            if one["name"] == "engine" and not _waits_for(one, config["rollout"]["metrics_port"]):
                yield f"{pod.owner}/engine: no preStop that waits until the worker beside it is gone"


def _waits_for(container: Mapping[str, Any], port: int) -> bool:
    """Whether it stops only when nobody listens on this port of its pod any more: all get SIGTERM at once otherwise."""
    words = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return f"('127.0.0.1', {port})" in " ".join(words)


def setting(config: Mapping[str, Any], key: str) -> float:
    """One of DEFAULTS, where the tables do not say otherwise."""
    section, name = key.split(".")
    return float(config.get(section, {}).get(name, DEFAULTS[key]))


def _scaling(objects: Sequence[Object]) -> Iterator[str]:
    """KEDA asks for the lag of this run's stream, and nobody else sets the number of replicas."""
    owners = {pod.owner: one for one in objects for pod in pods([one])}
    for scaled in named(objects, "ScaledObject"):
        target, where = scaled["spec"]["scaleTargetRef"], f"ScaledObject {scaled['metadata']['name']}"
        workload = owners.get(f"{target['kind']} {target['name']}")
        if workload is None:
            yield f"{where}: scales {target['kind']} {target['name']}, which is not there"
        elif "replicas" in workload["spec"]:
            yield f"{where}: {target['name']} has a number of replicas, which every apply would set again"
        for trigger in scaled["spec"]["triggers"]:
            if trigger["type"] != "redis-streams":
                continue
            said = trigger["metadata"]
            stream = f"sao:{{{effective(objects)['run']['name']}}}:stream:trajectories"
            if said["stream"] != stream:
                yield f"{where}: asks for {said['stream']}, the run's stream is {stream}"
            if "lagCount" not in said or "pendingEntriesCount" in said:
                yield f"{where}: scales on pending entries, which late acknowledgements inflate; expected lagCount"
