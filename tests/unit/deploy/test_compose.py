"""docker-compose.yml: hardened, complete, and in agreement with its run files."""

from __future__ import annotations

import pytest

from sao.config import load_run_config
from sao.config.fits import refuse_what_cannot_fit
from tests.unit.deploy import files
from tests.unit.deploy.files import ROOT
from tools.manifests import compose

MISTAKES = {
    "a writable root": ("  read_only: true\n  user:", "  user:"),
    "root": ('user: "10001:10001"', 'user: "0"'),
    "capabilities": ("cap_drop: [ALL]\n  security_opt", "security_opt"),
    "a port open to the network": ('"127.0.0.1:8080:8080"', '"8080:8080"'),
    "an image without a version": ("sao/reward:0.1.0", "sao/reward"),
    "a Dockerfile that is not there": ("deploy/docker/weights.Dockerfile", "deploy/docker/weight.Dockerfile"),
    "a token in the file": ("${SAO_AUTH_TOKEN:?copy .env.example to .env and set it}", "abc"),
    "a variable that nobody explains": ("${SAO_STORE_LIMIT:-1g}", "${SAO_STORE_SIZE:-1g}"),
    "a wait for what another profile starts": ("completed_successfully, required: false", "completed_successfully"),
    "no engine without GPUs": ("aliases: [engine]", "aliases: [engines]"),
    "fewer GPUs than ranks": ('["0", "1", "2", "3", "4", "5"]', '["0", "1", "2", "3", "4"]'),
    "a GPU given twice": ('device_ids: ["6"]', 'device_ids: ["5"]'),
    "a grace shorter than an episode": ("${SAO_ROLLOUT_GRACE:-330s}", "${SAO_ROLLOUT_GRACE:-30s}"),
    "an engine that stops before its worker": ("engine-cpu: {condition: service_started, required: false}", ""),
    "an ingest that stops before the worker": ("ingest: {condition: service_started}", ""),
    "another cache than the run file says": ("--max-total-tokens=262144", "--max-total-tokens=524288"),
}


def test_nothing_is_wrong_with_it() -> None:
    assert compose.findings() == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    old, new = MISTAKES[mistake]
    text = compose.FILE.read_text()
    assert old in text
    assert compose.findings(text.replace(old, new)) != []


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_ports_names_and_settings_are_those_of_the_run_file(profile: str) -> None:
    there = compose.of_profile(compose.services(), profile)
    path = ROOT / compose.example(profile)["SAO_RUN_FILE"]
    for one in files.compose_containers(profile):
        if not one.module.startswith("services."):
            continue
        config = load_run_config(path, env=one.settings)
        refuse_what_cannot_fit(config)
        assert config.engine.dns == "engine:30000"
        assert config.rollout.spool_dir is not None
        assert config.rollout.spool_dir.is_relative_to("/data")
        assert config.ingest.target.partition(":")[0] in there
    published = {name: there[name]["ports"][0].rpartition(":")[2] for name in ("ingest", "reward", "weights")}
    assert published == {
        "ingest": str(config.ingest.port),
        "reward": str(config.reward.port),
        "weights": str(config.weights.port),
    }


def test_a_service_that_reads_the_tiny_model_waits_for_it() -> None:
    there = compose.of_profile(compose.services(), "cpu")
    for name in ("engine-cpu", "trainer-cpu", "reward"):
        assert "warm-start" in there[name]["depends_on"], name


def test_the_tiny_run_ends() -> None:
    (trainer,) = (one for one in files.compose_containers("cpu") if one.module == "services.trainer")
    path = ROOT / compose.example("cpu")["SAO_RUN_FILE"]
    assert load_run_config(path, env=trainer.settings).run.updates is not None
    assert trainer.raw["restart"] == "on-failure"
