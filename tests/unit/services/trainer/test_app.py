"""What a trainer process refuses before it trains."""

from __future__ import annotations

import pytest

from sao.config import ConfigError, load_run_config
from services.trainer.app import refuse_another_algorithm
from services.trainer.loop import fresh_progress


@pytest.mark.parametrize(("made_by", "told"), [("spo", "spo"), ("", "sao")])
def test_a_state_of_another_algorithm_is_not_taken_for_ones_own(made_by: str, told: str) -> None:
    config = load_run_config(None, ["trainer.algorithm=reinforce_ma"], env={})
    progress = fresh_progress("run").model_copy(update={"update": 3, "algorithm": made_by})
    with pytest.raises(ConfigError, match=f"one of {told}, found reinforce_ma") as refusal:
        refuse_another_algorithm(progress, config)
    assert refusal.value.key == "trainer.algorithm"


def test_a_fresh_run_and_a_run_of_the_same_algorithm_go_on() -> None:
    config = load_run_config(None, ["trainer.algorithm=reinforce_ma"], env={})
    refuse_another_algorithm(fresh_progress("run"), config)
    same = fresh_progress("run").model_copy(update={"update": 3, "algorithm": "reinforce_ma"})
    refuse_another_algorithm(same, config)
