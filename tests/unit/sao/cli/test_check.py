from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from sao.cli.check import check
from sao.config import load_run_config


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(check)
    return app


def run(app: typer.Typer, *arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **env})


def rows(output: str) -> dict[str, str]:
    """First two columns of every table row."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]
    return {row[0]: row[1] for row in cells}


def test_effective_values_and_derived_numbers_are_printed(app: typer.Typer) -> None:
    result = run(app, "--preset", "tiny", "--set", "trainer.trajectories_per_update=2")
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert table["trainer.trajectories_per_update"] == "2"
    assert table["trainer.kl_coef"] == "0.02"
    assert table["run.updates"] == "250"
    assert table["policy learning rate"] == "0.0002"
    assert table["admission limit"] == "10 trajectories"
    assert "warning" not in result.stdout


def test_warnings_name_their_key_and_do_not_fail(app: typer.Typer) -> None:
    result = run(app, "--preset", "tiny", "--set", "trainer.max_lag=9")
    assert result.exit_code == 0
    assert "warning trainer.max_lag: 9 updates" in result.stdout


def test_a_scorer_that_does_not_exist_is_told(app: typer.Typer) -> None:
    def found(target: str) -> Result:
        scorer = "reward.scorers.mine"
        sets = [f"{scorer}.kind=python", f'{scorer}.target="{target}"', f'{scorer}.components={{a="b"}}']
        return run(app, "--preset", "tiny", *(part for one in sets for part in ("--set", one)))

    assert "warning reward.scorers.mine.target: no module nowhere" in found("nowhere:wording").stdout
    wrong = found("sao.ids:uuid8")
    assert wrong.exit_code == 2
    assert "reward.scorers.mine.target: module sao.ids has no 'uuid8'" in wrong.stderr
    assert "warning" not in found("sao.ids:uuid7").stdout


def test_a_run_that_its_gpus_cannot_hold_exits_2_with_the_numbers(app: typer.Typer) -> None:
    sets = ["hardware.gpu_memory_gib=80", "hardware.parameters=30532122624", "trainer.ranks=2"]
    result = run(app, "--preset", "paper-math", *(part for one in sets for part in ("--set", one)))
    assert result.exit_code == 2
    assert "trainer.ranks: 2 rank(s) at ZeRO stage 3 need at least 255.9 GiB each" in result.stderr


@pytest.mark.parametrize("arguments", [["--set", "trainer.lr=-1.0"], ["--set", "trainer.lrr=1"], ["--preset", "huge"]])
def test_a_wrong_setting_exits_2_with_its_key_on_stderr(app: typer.Typer, arguments: list[str]) -> None:
    result = run(app, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    key = arguments[1].partition("=")[0] if arguments[0] == "--set" else "preset"
    assert key in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "qwen3 has 0 experts"),
        ({"num_experts": 512, "num_experts_per_tok": 8, "num_hidden_layers": 2}, "512 experts, expected at most 255"),
    ],
)
def test_routing_replay_is_refused_for_a_model_without_a_record(
    app: typer.Typer, tmp_path: Path, model: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    on, path = "trainer.routing_replay=true", f'model.path="{tmp_path}"'
    result = run(app, "--set", on, "--set", path)
    assert result.exit_code == 2
    assert f"trainer.routing_replay: {reason}" in result.stderr
    assert run(app, "--set", path).exit_code == 0
    (tmp_path / "config.json").unlink()  # elsewhere, perhaps
    assert run(app, "--set", on, "--set", path).exit_code == 0


def test_replayed_routes_count_in_the_payload(app: typer.Typer) -> None:
    def payload(*sets: str) -> str:
        return rows(run(app, "--preset", "tiny", *sets).stdout)["payload"]

    assert payload() == f"{(4096 + 96 * 9) / 1024:.4g} KiB"
    assert payload("--set", "trainer.routing_replay=true") == f"{(4096 + 96 * (9 + 2 * 2)) / 1024:.4g} KiB"


def test_a_run_file_is_read(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "tiny"\n[run]\nseed = 77\n')
    assert rows(run(app, str(path)).stdout)["run.seed"] == "77"
    missing = run(app, str(tmp_path / "absent.toml"))
    assert missing.exit_code == 2
    assert "absent.toml" in missing.stderr


def test_the_printed_file_is_the_effective_configuration(app: typer.Typer, tmp_path: Path) -> None:
    result = run(app, "--preset", "tiny", "--toml")
    path = tmp_path / "effective.toml"
    path.write_text(result.stdout)
    assert load_run_config(path, env={}) == load_run_config(env={}, preset="tiny")


def test_secrets_are_not_shown(app: typer.Typer) -> None:
    secrets = {"SAO__AUTH__TOKEN": "s3cret-token", "SAO__REDIS__URL": "redis://:s3cret-password@store:6379/0"}
    result = run(app, **secrets)
    assert rows(result.stdout)["redis.url"] == "redis://store:6379/0"
    assert "s3cret" not in result.output + run(app, "--toml", **secrets).output
