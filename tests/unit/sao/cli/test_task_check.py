"""`sao check` refuses what could only fail later, and names the key."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sao.cli.main import app


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("task.name=nope", "task.name"),
        ("task.prompts=missing.jsonl", "task.prompts"),
        ('preference={name="x", weights={nosuch=1.0}}', "preference"),
        ('critic.frozen=["("]', "critic.frozen"),
        ('engine.urls=["foo"]', "engine.urls"),
        ("redis.url=nonsense", "redis.url"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(setting: str, key: str) -> None:
    result = CliRunner().invoke(app, ["check", "--preset", "tiny", "--set", setting])
    assert result.exit_code == 2
    assert f"configuration error: {key}: " in result.stderr


def test_a_task_that_is_not_importable_here_is_a_warning() -> None:
    result = CliRunner().invoke(app, ["check", "--preset", "tiny", "--set", "task.name=elsewhere.tasks:Mine"])
    assert result.exit_code == 0
    assert "elsewhere" in result.stdout
