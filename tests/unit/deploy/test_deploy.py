"""What the deployments start: compose, Dockerfiles, kustomize and the run file say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from sao.config import RunConfig, load_run_config
from tests.unit.deploy import files
from tests.unit.deploy.files import BASE, DOCKERFILES, ROOT, RUN_FILE, Container
from tests.unit.deploy.imports import distributions, file_of

WRITABLE = ("/data", "/tmp")


def name_of(value: Container | Path) -> str:
    return value.where if isinstance(value, Container) else value.name


def run_config(**env: str) -> RunConfig:
    return load_run_config(RUN_FILE, env=env)


def of_module(containers: list[Container], module: str) -> Container:
    (found,) = [one for one in containers if one.module == module]
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_a_dockerfile_copies_what_exists_and_runs_as_nobody(path: Path) -> None:
    text = path.read_text()
    for sources in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in (ROOT / ".dockerignore").read_text().split(), source
    for lock in re.findall(r"\S+\.lock", text):
        assert lock.startswith("/tmp/") or (ROOT / lock).is_file(), lock
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "10001"
    assert re.findall(r"^WORKDIR (.*)$", text, re.MULTILINE)[-1] != "/src", "the sources would shadow the package"


@pytest.mark.parametrize("path", [path for path in DOCKERFILES if "engine" not in path.name], ids=name_of)
def test_an_image_has_everything_that_its_process_imports(path: Path) -> None:
    module = files.dockerfile_command(path)[2]
    (lock,) = set(re.findall(r"requirements/\w+\.lock", path.read_text()))
    pins = {line.partition("==")[0] for line in (ROOT / lock).read_text().splitlines() if "==" in line}
    assert distributions(module) - pins == set()


@pytest.mark.parametrize("container", files.our_containers(), ids=name_of)
def test_a_container_starts_a_module_of_its_image_with_the_run_file(container: Container) -> None:
    dockerfile = files.dockerfile_of(container.image)
    assert dockerfile.is_file()
    if not container.module:
        return
    if container.module.startswith("sglang_cpuref"):
        assert (ROOT / "engine" / container.module.replace(".", "/")).with_suffix(".py").is_file()
        return
    assert file_of(container.module) or file_of(f"{container.module}.__main__"), container.module
    config = container.option("--config")
    assert config is not None
    mounted = container.mounts.get(config) or container.mounts.get(str(Path(config).parent))
    assert mounted in {"./deploy/k8s/base/run.toml", "run-file"}
    for variable in container.env:
        if variable.startswith("SAO__"):
            run_config(**{variable: container.env[variable]})


@pytest.mark.parametrize("container", files.our_containers(), ids=name_of)
def test_a_container_writes_only_where_something_is_mounted(container: Container) -> None:
    assert container.read_only
    config = run_config()
    if container.module:
        assert container.env["HOME"] == "/tmp"
        assert "/tmp" in container.mounts
        assert "/data" in container.mounts
    places = [config.run.dir, config.run.cache_dir, config.versions_dir, config.model.path]
    assert all(str(place).startswith("/data/") for place in places)


@pytest.mark.parametrize("containers", [files.compose_containers(), files.k8s_containers()], ids=["compose", "k8s"])
def test_warm_start_trainer_and_engine_agree_on_the_initial_model(containers: list[Container]) -> None:
    model = str(run_config().model.path)
    assert of_module(containers, "services.trainer.warm_start").option("--out") == model
    engine = of_module(containers, "sglang_cpuref.serve")
    assert engine.option("--model") == model
    assert engine.option("--seed") is None, "replicas and restarts would sample alike"
    assert engine.option("--dtype") in {None, run_config().engine.dtype}


def test_a_service_that_reads_the_initial_model_waits_for_it() -> None:
    services = files.compose()["services"]
    for name in ("engine", "trainer", "reward"):
        assert "warm-start" in services[name]["depends_on"], name
    pods = files.k8s_pods()
    for name in ("rollout", "reward"):
        waits = [one["name"] for one in pods[name]["spec"]["initContainers"]]
        assert waits == ["wait-for-initial-model"], name


def test_a_trainer_ends_only_where_it_is_not_started_again() -> None:
    in_compose = of_module(files.compose_containers(), "services.trainer")
    assert run_config(**settings(in_compose)).run.updates is not None
    assert in_compose.raw["restart"] == "on-failure"
    in_k8s = of_module(files.k8s_containers(), "services.trainer")
    assert run_config(**settings(in_k8s)).run.updates is None, "a Deployment would start it again for ever"


def test_what_has_a_fixed_name_is_never_there_twice() -> None:
    strategies = {
        one["metadata"]["name"]: one["spec"].get("strategy", {}).get("type")
        for one in files.k8s_objects()
        if one["kind"] == "Deployment"
    }
    assert {name for name, kind in strategies.items() if kind == "Recreate"} == {"reward", "trainer", "weights"}


def settings(container: Container) -> dict[str, str]:
    return {name: value for name, value in container.env.items() if name.startswith("SAO__")}


def test_ports_and_names_in_the_run_file_are_those_of_kubernetes() -> None:
    config, services = run_config(), files.k8s_services()
    ports = {
        "services.rollout.ingest": {config.ingest.port, config.ingest.metrics_port},
        "services.rollout": {config.rollout.metrics_port},
        "services.reward": {config.reward.port},
        "services.trainer": {config.trainer.metrics_port},
        "services.weights": {config.weights.port},
    }
    for module, expected in ports.items():
        container = of_module(files.k8s_containers(), module)
        assert {port["containerPort"] for port in container.raw["ports"]} == expected
        probed = {container.raw[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")}
        assert probed <= expected
    assert config.ingest.target == f"ingest:{services['ingest']['grpc']}"
    redis = urlsplit(config.redis.url)
    assert services[str(redis.hostname)]["redis"] == redis.port
    for index, url in enumerate(config.engine.urls):
        parts = urlsplit(url)
        assert parts.hostname == f"rollout-{index}.rollout"
        assert parts.port == services["rollout"]["engine"]
    assert {config.ingest.bind, config.reward.bind, config.weights.bind} == {"0.0.0.0"}
    for pod, template in files.k8s_pods().items():
        if "annotations" not in template["metadata"]:
            continue
        scraped = int(template["metadata"]["annotations"]["prometheus.io/port"])
        assert scraped in {port["containerPort"] for one in template["spec"]["containers"] for port in one["ports"]}, (
            pod
        )


def test_ports_and_names_in_the_run_file_are_those_of_compose() -> None:
    services = files.compose()["services"]
    engine = of_module(files.compose_containers(), "sglang_cpuref.serve")
    for container in files.compose_containers():
        config = run_config(**settings(container))
        assert [urlsplit(url).netloc for url in config.engine.urls] == [f"engine:{engine.option('--port')}"]
    published = {name: services[name]["ports"][0].rpartition(":")[2] for name in ("ingest", "reward", "weights")}
    assert published == {
        "ingest": str(config.ingest.port),
        "reward": str(config.reward.port),
        "weights": str(config.weights.port),
    }
    assert {str(urlsplit(config.redis.url).hostname), config.ingest.target.partition(":")[0]} <= set(services)


def test_valkey_has_the_memory_that_the_run_file_says() -> None:
    commands = [files.compose()["services"]["valkey"]["command"]]
    commands += [one.argv for one in files.k8s_containers() if one.image.startswith("valkey/")]
    for command in commands:
        assert command[command.index("--maxmemory") + 1] == f"{run_config().redis.maxmemory_mb}mb"
        assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
        assert command[command.index("--appendonly") + 1] == "yes"


def test_everything_beside_the_code_is_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    listed = subprocess.run(
        ["git", "ls-files", "sao", "services"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("no git repository: cannot tell what is tracked")
    others = [Path(line).name for line in listed.stdout.splitlines() if not line.endswith(".py")]
    assert others
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_kustomize_builds_the_base() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: the base is read as files only")
    built = subprocess.run([kubectl, "kustomize", str(BASE)], capture_output=True, text=True, timeout=60, check=False)
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    (run_file,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert run_file["data"]["run.toml"] == RUN_FILE.read_text()
    images = re.findall(r"image: (sao/\S+)", built.stdout)
    assert images
    assert all(re.fullmatch(r"sao/[a-z-]+:\d+\.\d+\.\d+", image) for image in images)
    assert {one["metadata"]["namespace"] for one in objects if one["kind"] != "Namespace"} == {"sao"}
