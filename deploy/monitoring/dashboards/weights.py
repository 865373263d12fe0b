"""Weights: which version serves where, and what a round costs."""

from __future__ import annotations

from deploy.monitoring.dashboards.parts import Board, Line, quantile


def board() -> Board:
    """The dashboard of engines and versions."""
    made = Board("weights", "Weights", "Which version serves where, and what a round costs.", show_versions=True)
    made.row("Now")
    made.number(
        "Published update",
        "max by (run) (sao_weights_published_update{@run})",
        unit="none",
        why="Of the version that engines shall serve.",
    )
    made.number(
        "Engines",
        "sum by (run) (instance:sao_weights_engines:count{@run})",
        unit="none",
        why="Known to the weights service.",
    )
    made.number(
        "In rotation",
        "sum by (run) (instance:sao_weights_serving_engines:sum{@run})",
        unit="none",
        why="Proven to hold the version they say.",
    )
    made.number(
        "Quarantined",
        "sum by (run) (sao_weights_quarantined_engines{@run})",
        unit="none",
        why="A round failed on them; they serve nobody.",
        red_from=1,
    )
    made.number(
        "Publishing held",
        "sum by (run) (sao_weights_publishing_held{@run})",
        unit="none",
        why="1 while newer versions wait (docs/weights.md).",
        red_from=1,
    )
    made.number(
        "Published to serving",
        "max by (run) (run:sao_weights_publish_to_serving_seconds:p95_15m{@run})",
        unit="s",
        why="95th percentile of 15 minutes.",
    )
    made.row("Which version serves")
    made.graph(
        "Update",
        [
            Line("max by (run) (sao_trainer_update_number{@run})", "trainer"),
            Line("max by (run) (sao_weights_published_update{@run})", "published"),
            Line("sao_weights_serving_update{@}", "{{engine}}"),
        ],
        unit="none",
        why="An engine's line below the published one is its lag.",
    )
    made.graph(
        "Lag of engines",
        [
            Line("sao_weights_lag_updates{@}", "{{engine}}"),
            Line("max by (run) (sao_trainer_max_lag_updates{@run})", "trainer.max_lag"),
        ],
        unit="none",
        why="Published update minus serving update.",
    )
    made.graph(
        "State of engines",
        [Line("sao_weights_engine_state{@} == 1", "{{engine}} {{state}}")],
        unit="none",
        why="One line for the state each engine is in.",
    )
    made.graph(
        "Held",
        [
            Line("sao_weights_publishing_held{@}", "weights: {{by}}"),
            Line("sao_trainer_publishing_held{@run}", "trainer: {{guard}}"),
        ],
        unit="none",
        why="1 while it holds.",
        most=1,
    )
    made.graph(
        "Out of rotation",
        [Line("sao_weights_out_engines{@}", "for a round"), Line("sao_weights_quarantined_engines{@}", "quarantined")],
        unit="none",
        why="weights.engines_out_max bounds the first.",
    )
    made.graph(
        "Refused and restarted",
        [
            Line("sum by (run, reason) (increase(sao_weights_versions_refused_total{@}[10m]))", "refused: {{reason}}"),
            Line("sum by (run, engine) (increase(sao_weights_engine_restarts_total{@}[10m]))", "{{engine}} restarted"),
        ],
        unit="none",
        why="Within ten minutes.",
    )
    made.row("Proof")
    made.graph(
        "Canary difference",
        [Line("sao_weights_canary_difference_nats{@}", "{{engine}}")],
        unit="none",
        why="Largest of the last canary, in nats; above weights.canary_tolerance the round fails.",
    )
    made.graph(
        "Canary drift",
        [Line("sao_weights_canary_drift_nats{@}", "{{instance}}")],
        unit="none",
        why="From the version before, in nats; beyond weights.canary_drift_max the version waits.",
    )
    made.graph(
        "Failed rounds",
        [Line("engine:sao_weights_failed_rounds:ratio_rate15m{@run,instance}", "{{engine}}")],
        unit="percentunit",
        why="Of all rounds within 15 minutes.",
        alert="SaoWeightRoundsFail",
        most=1,
    )
    made.row("What a round costs")
    made.graph(
        "Published to serving",
        [Line(quantile("sao_weights_publish_to_serving_seconds"), "95th percentile")],
        unit="s",
        why="From the manifest's creation until an engine serves it.",
    )
    made.graph(
        "Steps",
        [Line(quantile("sao_weights_step_seconds", "step"), "{{step}}")],
        unit="s",
        why="95th percentile of each step of a round.",
    )
    made.graph(
        "Pause",
        [Line(quantile("sao_weights_pause_seconds", "engine"), "{{engine}}")],
        unit="s",
        why="95th percentile: what the engine's turns wait for.",
    )
    made.graph(
        "Paused share",
        [Line("sao_weights_paused_ratio{@}", "{{engine}}")],
        unit="percentunit",
        why="Of the time since the start.",
        most=1,
    )
    made.graph(
        "Before a round",
        [
            Line(quantile("sao_weights_staging_seconds"), "reading and comparing files"),
            Line(quantile("sao_weights_slot_wait_seconds"), "waiting for a slot"),
        ],
        unit="s",
        why="95th percentile; engines serve meanwhile.",
    )
    made.graph(
        "Loaded",
        [Line("sum by (run, engine) (rate(sao_weights_loaded_bytes_total{@}[$__rate_interval]))", "{{engine}}")],
        unit="Bps",
        why="Size of the versions that engines have loaded.",
    )
    made.row("What workers feel")
    made.graph(
        "Waiting for an engine",
        [
            Line(quantile("sao_rollout_rotation_wait_seconds"), "in rotation"),
            Line(quantile("sao_rollout_withheld_seconds"), "for a version's proof"),
        ],
        unit="s",
        why="95th percentile of turns.",
    )
    made.graph(
        "Turns in flight",
        [Line("sum by (run, engine) (sao_rollout_engine_turns_in_flight{@})", "{{engine}}")],
        unit="none",
        why="Of all workers.",
    )
    made.graph(
        "Turn time",
        [Line(quantile("sao_rollout_turn_seconds", "engine"), "{{engine}}")],
        unit="s",
        why="95th percentile.",
    )
    return made
