"""Two weights services of one run, as processes: the earlier one ends and says which one keeps the engines now."""

from __future__ import annotations

from pathlib import Path

from sao.config import RunConfig, dump_run_config
from tests.support.processes import free_port
from tests.support.services import service


def _beside(config: RunConfig, folder: Path, name: str) -> tuple[RunConfig, Path]:
    """The same run, on another port, with no engine that answers."""
    engine = config.engine.model_copy(update={"urls": [f"http://127.0.0.1:{free_port()}"]})
    weights = config.weights.model_copy(update={"port": free_port()})
    made = config.model_copy(update={"weights": weights, "engine": engine})
    file = folder / f"{name}.toml"
    file.write_text(dump_run_config(made))
    return made, file


def test_the_later_start_wins_and_a_killed_one_leaves_nothing_behind(run_config: RunConfig, tmp_path: Path) -> None:
    first, second, third = (_beside(run_config, tmp_path, name) for name in ("first", "second", "third"))
    with service("services.weights", first[0].weights.port, *first, tmp_path / "first.log") as earlier:
        with service("services.weights", second[0].weights.port, *second, tmp_path / "second.log") as later:
            assert earlier.wait(30) == 1
            said = (tmp_path / "first.log").read_text()
            assert "weights service epoch 1 is fenced: epoch 2 (" in said
            assert f"process {later.pid}, started " in said
            later.kill()
            later.wait(30)
        with service("services.weights", third[0].weights.port, *third, tmp_path / "third.log") as last:
            assert last.poll() is None
    assert '"epoch": 3' in (tmp_path / "third.log").read_text()
