"""Each overlay, rendered: its parts agree, and what its pods read is a run that can be."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from sao.cli.main import app
from sao.cli.task_check import refuse_unusable_task
from sao.config.derived import engine_bytes, policy_parameters, stop_s, trainer_bytes
from sao.config.fits import refuse_what_cannot_fit
from sao.config.schema import ModelSection, RunConfig
from tests.unit.deploy import files
from tools.manifests import consistency, edges, mutations
from tools.manifests.render import K8S, OVERLAYS, Object, kubectl, loader, named, pods, render, render_with

FAST = [one for one in mutations.MUTATIONS if one.caught_by in {"edges", "consistency"}]
PORTS = {"ingest": (50051, 9100), "rollout": (9100,), "reward": (8080,), "trainer": (9100,), "weights": (8080,)}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Object]:
    name: str = request.param
    return files.overlay(name)


def test_its_parts_agree(overlay: list[Object]) -> None:
    assert consistency.findings(overlay) == []


@pytest.mark.parametrize("mutation", FAST, ids=lambda mutation: mutation.name)
def test_a_mistake_is_noticed(mutation: mutations.Mutation) -> None:
    objects = copy.deepcopy(files.overlay(mutation.overlay))
    mutation.break_(objects)
    if mutation.caught_by == "edges":
        assert edges.differences(objects, mutation.overlay) != []
    else:
        assert consistency.findings(objects) != []


def test_its_run_file_is_valid_and_fits_its_gpus(overlay: list[Object]) -> None:
    config = files.run_config(overlay)
    refuse_what_cannot_fit(config)
    refuse_unusable_task(config)
    if config.trainer.device == "cuda":
        assert config.hardware.gpu_memory_gib is not None
        assert config.hardware.gpus is not None
        assert policy_parameters(config) is not None
    for one in files.containers(overlay):
        for name, value in one.settings.items():
            files.run_config(overlay, **{name: value})


def checked(tmp_path: Path, objects: list[Object], before: str = "", after: str = "") -> Result:
    """`sao check` of the run file that an overlay's pods read, a text in it replaced."""
    path, text = tmp_path / "run.toml", consistency.run_file(objects)
    assert before in text
    path.write_text(text.replace(before, after) if before else text)
    return CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "200"})


VERDICTS = {
    "cpu": "trains on CPU, no GPU is compared",
    "gpu": "fits 8 GPUs of 80 GiB: 6 trainer rank(s), 2 engine(s) of 1",
    "gpu-multi": "fits 32 GPUs of 80 GiB: 16 trainer rank(s), 2 engine(s) of 8",
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_sao_check_says_what_its_run_file_fits(name: str, tmp_path: Path) -> None:
    found = checked(tmp_path, files.overlay(name))
    assert found.exit_code == 0, found.output
    assert f"memory {VERDICTS.get(name, VERDICTS['gpu'])}" in found.output
    doubted = {line.split()[1].rstrip(":") for line in found.output.splitlines() if line.startswith("warning ")}
    # The token comes from the Secret, the model is on the volume.
    assert doubted <= {"auth.token", "model.path"}


@pytest.mark.parametrize(
    ("overlay", "before", "after", "key"),
    [
        ("gpu", "parameters = 8_190_735_360", "parameters = 32_762_123_264", "trainer.ranks"),
        ("gpu-multi", "gpu_memory_gib = 80", "gpu_memory_gib = 6", "trainer.ranks"),
        ("gpu", "ranks = 6", "ranks = 7", "hardware.gpus"),
        ("gpu", "engine_gpus = 1 ", "engine_gpus = 2 ", "hardware.gpus"),
        ("gpu", "max_total_tokens = 262144", "max_total_tokens = 32767", "engine.max_total_tokens"),
    ],
)
def test_sao_check_refuses_a_run_file_that_cannot_be(
    overlay: str, before: str, after: str, key: str, tmp_path: Path
) -> None:
    found = checked(tmp_path, files.overlay(overlay), before, after)
    assert found.exit_code == 2
    assert f"configuration error: {key}" in found.output


@pytest.mark.parametrize(
    ("overlay", "before", "after", "key"),
    [
        ("gpu", "gpu_memory_gib = 80", "gpu_memory_gib = 40", "trainer.ranks"),
        ("gpu", "max_total_tokens = 262144", "max_total_tokens = 600000", "engine.max_total_tokens"),
        ("gpu", "drain_s = 9600.0", "drain_s = 9601.0", "rollout.drain_s"),
    ],
)
def test_sao_check_doubts_a_run_file_that_may_not_be(
    overlay: str, before: str, after: str, key: str, tmp_path: Path
) -> None:
    found = checked(tmp_path, files.overlay(overlay), before, after)
    assert found.exit_code == 0
    assert f"warning {key}:" in found.output
    assert ("may not fit" in found.output) == (key != "rollout.drain_s")


def test_what_is_taken_for_a_default_is_one() -> None:
    """The checks of `make k8s-check` run where the schema is not at hand."""
    for key, value in consistency.DEFAULTS.items():
        section, name = key.split(".")
        assert getattr(getattr(RunConfig(), section), name) == value


@pytest.mark.parametrize("name", OVERLAYS)
def test_its_workers_may_end_what_they_play(name: str) -> None:
    """A worker's own stop, the engine's after it and the last call of ingest fit into the grace period."""
    objects = files.overlay(name)
    config = files.run_config(objects)
    (worker,) = (pod for pod in pods(objects) if pod.name == "rollout")
    assert config.ingest.episode_deadline_s <= config.rollout.drain_s
    assert stop_s(config) < worker.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_on_cpu_holds_what_it_computes_with(name: str) -> None:
    objects = files.overlay(name)
    config = files.run_config(objects)
    if config.trainer.device == "cuda":
        assert config.hardware.gpu_memory_gib is not None, "compared by sao check"
        return
    tiny = config.model_copy(update={"model": ModelSection()})
    count = policy_parameters(tiny)
    assert count is not None
    by_name = {one["name"]: one["resources"]["limits"]["memory"] for pod in pods(objects) for one in pod.containers}
    for container, need in (("trainer", trainer_bytes(tiny, count)), ("engine", engine_bytes(tiny, count))):
        assert need is not None
        assert need < int(by_name[container].removesuffix("Gi")) * 2**30


def test_its_ports_and_names_are_those_of_its_run_file(overlay: list[Object]) -> None:
    config = files.run_config(overlay)
    assert ports_of(config) == PORTS
    by_name = {pod.name: pod for pod in pods(overlay)}
    for name, expected in PORTS.items():
        open_ = {port["containerPort"] for one in by_name[name].containers for port in one.get("ports", [])}
        assert open_ - {30000} == set(expected), name
    services = {one["metadata"]["name"]: one["spec"] for one in named(overlay, "Service")}
    assert "clusterIP" not in services["ingest"]
    assert config.ingest.target == "ingest:50051"
    redis = urlsplit(config.redis.url)
    assert {port["port"] for port in services[str(redis.hostname)]["ports"]} == {redis.port}
    engines = services[config.engine.dns.partition(":")[0]]
    assert engines["publishNotReadyAddresses"], "an engine would seem to leave at every round"
    assert engines["clusterIP"] == "None"
    assert {config.ingest.bind, config.reward.bind, config.weights.bind} == {"0.0.0.0"}


def ports_of(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return {
        "ingest": (config.ingest.port, config.ingest.metrics_port),
        "rollout": (config.rollout.metrics_port,),
        "reward": (config.reward.port,),
        "trainer": (config.trainer.metrics_port,),
        "weights": (config.weights.port,),
    }


def test_everything_is_written_to_a_volume(overlay: list[Object]) -> None:
    config = files.run_config(overlay)
    assert config.model.path is not None
    for place in (config.run.dir, config.run.cache_dir, config.model.path):
        assert place.is_relative_to("/data")
    assert config.versions_dir.is_relative_to("/versions")
    for one in files.containers(overlay):
        if one.module.startswith("services.") and one.module != "services.trainer.warm_start":
            assert {"/data", "/versions", "/tmp"} <= set(one.mounts), one.where
    spool = files.run_config(overlay, **environment_of(overlay, "services.rollout")).rollout.spool_dir
    assert spool == Path("/spool")


def environment_of(overlay: list[Object], module: str) -> dict[str, str]:
    (one,) = (each for each in files.containers(overlay) if each.module == module)
    return one.settings


def test_a_consumers_name_is_its_pods(overlay: list[Object]) -> None:
    for module, variable in (
        ("services.reward", "SAO__REWARD__CONSUMER"),
        ("services.rollout", "SAO__ROLLOUT__WORKER_ID"),
    ):
        (one,) = (each for each in files.containers(overlay) if each.module == module)
        found = {each["name"]: each.get("valueFrom") for each in one.raw["env"]}
        assert found[variable]["fieldRef"]["fieldPath"] == "metadata.name"
    kinds = {one["metadata"]["name"]: one["kind"] for one in overlay if one["kind"] in {"StatefulSet", "Deployment"}}
    assert kinds["reward"] == kinds["rollout"] == "StatefulSet", "only their pods have names that last"


def test_what_may_be_there_once_is_never_there_twice(overlay: list[Object]) -> None:
    deployments = {one["metadata"]["name"]: one["spec"] for one in named(overlay, "Deployment")}
    for name in {"trainer", "weights"} & set(deployments):
        assert deployments[name]["strategy"] == {"type": "Recreate"}
        assert deployments[name]["replicas"] == 1
    for group in named(overlay, "LeaderWorkerSet", "trainer"):
        assert group["spec"]["replicas"] == 1
        assert group["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] == 0
    trainers = [one for one in files.containers(overlay) if one.module == "services.trainer"]
    assert trainers
    for one in trainers:
        assert files.run_config(overlay, **one.settings).run.updates is None, "it would be started again for ever"


def test_every_workload_has_a_budget_and_an_account_of_its_own(overlay: list[Object]) -> None:
    selectors = [one["spec"]["selector"] for one in named(overlay, "PodDisruptionBudget")]
    for pod in pods(overlay):
        covering = [one for one in selectors if edges.selects(one, pod.labels)]
        assert len(covering) == 1, pod.owner
        assert pod.spec["serviceAccountName"] == pod.name.removesuffix("-rank")


def test_nothing_secret_is_in_the_manifests(overlay: list[Object]) -> None:
    assert named(overlay, "Secret") == []
    readers = {
        (pod.name, variable["valueFrom"]["secretKeyRef"]["key"])
        for pod in pods(overlay)
        for one in pod.containers
        for variable in one.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    both = {(name, key) for name in ("ingest", "rollout", "reward", "weights") for key in ("auth-token", "redis-url")}
    assert readers == {*both, ("trainer", "redis-url"), ("valkey", "redis-password")}


@pytest.mark.parametrize("name", ["cpu", "gpu-multi"])
def test_a_changed_run_file_replaces_every_pod_that_reads_it(name: str, tmp_path: Path) -> None:
    before = files.overlay(name)
    shutil.copytree(K8S, tmp_path / "k8s", ignore=shutil.ignore_patterns(".own-*"))
    run_file = tmp_path / "k8s" / ("base" if name == "cpu" else f"overlays/{name}") / "run.toml"
    run_file.write_text(run_file.read_text().replace("[weights]\n", "[weights]\nkeep_versions = 5\n"))
    after = render(tmp_path / "k8s" / "overlays" / name)
    assert consistency.findings(after) == []
    (old,), (new,) = (named(objects, "ConfigMap", "run-file") for objects in (before, after))
    assert old["metadata"]["name"] != new["metadata"]["name"]
    reading = {
        pod.owner: [one["configMap"]["name"] for one in pod.spec["volumes"] if "configMap" in one]
        for pod in pods(after)
        if "volumes" in pod.spec
    }
    assert {name for names in reading.values() for name in names} == {new["metadata"]["name"]}


def test_a_managed_store_takes_the_place_of_ours() -> None:
    if kubectl() is None:
        pytest.skip(files.NO_KUBECTL)
    objects = render_with("gpu", ["managed-redis"])
    assert consistency.findings(objects) == []
    assert not [one for one in objects if one["metadata"]["name"] == "valkey"]
    (way_out,) = (one["spec"] for one in named(objects, "NetworkPolicy", "managed-redis"))
    assert all(edges.selects(way_out["podSelector"], pod.labels) for pod in pods(objects))


def test_the_loader_has_no_more_rights_than_the_others() -> None:
    assert consistency.exposures(loader()) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_reads_the_initial_model_waits_for_it(name: str) -> None:
    for pod in pods(files.overlay(name)):
        reads = pod.name in {"reward", "rollout", "trainer", "trainer-rank", "engine", "engine-rank"}
        waits = {"wait-for-initial-model", "warm-start"} & {one["name"] for one in pod.spec.get("initContainers", [])}
        assert bool(waits) == reads, pod.owner
