from __future__ import annotations

from pathlib import Path

import pytest

from tools import compose_check
from tools.manifests import policy
from tools.manifests.policy import Suppression, Violation

ROOT_FS = Violation("cpu", "CKV_K8S_22", "Deployment.sao.ingest", "read-only root")


def test_every_suppression_of_the_repository_has_a_reason() -> None:
    assert policy.suppressions()


def test_a_suppression_without_a_reason_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "checkov.toml"
    file.write_text('[[suppress]]\ncheck = "CKV_K8S_22"\nobjects = "*"\nreason = "not now"\n')
    monkeypatch.setattr(policy, "SUPPRESSIONS", file)
    with pytest.raises(ValueError, match="CKV_K8S_22"):
        policy.suppressions()


def test_a_suppression_covers_its_check_on_its_objects_and_no_more() -> None:
    ours = Suppression("CKV_K8S_22", "Deployment.sao.*", "why")
    others = [Suppression("CKV_K8S_22", "Pod.*", "why"), Suppression("CKV_K8S_23", "*", "why")]
    assert policy.unexplained([ROOT_FS], [ours, *others]) == ([], others)
    assert policy.unexplained([ROOT_FS], others) == ([ROOT_FS], others)
    assert policy.unexplained([], [ours]) == ([], [ours])


def test_a_compose_binary_that_is_not_there_is_an_error_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compose_check.BINARY_VARIABLE, "/nowhere/docker-compose")
    with pytest.raises(FileNotFoundError, match="/nowhere/docker-compose"):
        compose_check.compose_command()
