"""The critic's warm-up is long enough in trajectories, whatever an update holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sao.config import load_run_config


@given(per_update=st.integers(1, 256), updates=st.integers(0, 64), trajectories=st.integers(0, 1024))
def test_both_minima_hold_and_nothing_more(per_update: int, updates: int, trajectories: int) -> None:
    sets = [
        f"trainer.trajectories_per_update={per_update}",
        f"critic.warmup_updates={updates}",
        f"critic.warmup_trajectories={trajectories}",
    ]
    found = load_run_config(None, sets, env={}).critic_warmup_updates
    assert found >= updates
    assert found * per_update >= trajectories
    assert found == updates or (found - 1) * per_update < trajectories


def test_the_tiny_preset_warms_up_on_forty_trajectories_at_any_update_size() -> None:
    for per_update in (1, 4):
        config = load_run_config(None, [f"trainer.trajectories_per_update={per_update}"], env={}, preset="tiny")
        assert config.critic_warmup_updates * per_update == 40
