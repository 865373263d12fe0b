"""What the Dockerfiles build, and what starts it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.unit.deploy import files
from tests.unit.deploy.files import DOCKERFILES, ROOT, Container
from tests.unit.deploy.imports import distributions, file_of
from tools.manifests import compose
from tools.manifests.render import OVERLAYS

STARTED_BY = [f"overlay {name}" for name in OVERLAYS] + [f"compose {name}" for name in compose.PROFILES]


def started_by(what: str) -> list[Container]:
    kind, _, name = what.partition(" ")
    return files.containers(files.overlay(name)) if kind == "overlay" else files.compose_containers(name)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
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
    assert compose.unexplained_ignores(path) == []


def test_an_ignore_without_a_reason_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "some.Dockerfile"
    path.write_text("FROM a:1\n# hadolint ignore=DL3013\nRUN pip install b\n")
    assert len(compose.unexplained_ignores(path)) == 1


@pytest.mark.parametrize(
    "path", [path for path in DOCKERFILES if "engine" not in path.name], ids=lambda path: path.name
)
def test_an_image_has_everything_that_its_process_imports(path: Path) -> None:
    module = files.dockerfile_command(path)[2]
    (lock,) = set(re.findall(r"requirements/\w+\.lock", path.read_text()))
    pins = {line.partition("==")[0] for line in (ROOT / lock).read_text().splitlines() if "==" in line}
    assert distributions(module) - pins == set()


@pytest.mark.parametrize("what", STARTED_BY)
def test_a_container_starts_a_module_of_its_image_with_the_run_file(what: str) -> None:
    for one in started_by(what):
        assert files.dockerfile_of(one.image).is_file(), one.where
        if not one.module:
            continue
        assert one.env["HOME"] == "/tmp", one.where
        if one.module.startswith("sglang_cpuref"):
            assert (ROOT / "engine" / one.module.replace(".", "/")).with_suffix(".py").is_file(), one.where
            continue
        assert file_of(one.module) or file_of(f"{one.module}.__main__"), one.where
        assert one.option("--config") == "/etc/sao/run.toml", one.where
        assert {"/etc/sao", "/etc/sao/run.toml", "etc/sao/run.toml:ro"} & set(one.mounts), one.where


@pytest.mark.parametrize("what", ["overlay cpu", "compose cpu"])
def test_warm_start_and_engine_agree_on_the_initial_model(what: str) -> None:
    by_module = {one.module: one for one in started_by(what)}
    engine = by_module["sglang_cpuref.serve"]
    assert by_module["services.trainer.warm_start"].option("--out") == engine.option("--model") == "/data/initial"
    assert engine.option("--seed") is None, "replicas and restarts would sample alike"


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
