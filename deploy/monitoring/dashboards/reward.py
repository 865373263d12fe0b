"""Reward and preferences: what is rewarded, by which version, and whether scoring keeps up."""

from __future__ import annotations

from deploy.monitoring.dashboards.parts import Board, Line, mean_of, quantile


def board() -> Board:
    """The dashboard of whoever switches preferences."""
    made = Board(
        "reward", "Reward and preferences", "What is rewarded, by which version, and whether scoring keeps up."
    )
    made.row("Now")
    made.number(
        "Preference version",
        "max by (run) (sao_reward_preference_version{@run})",
        unit="none",
        why="Newest that any replica has used or stored.",
    )
    made.number(
        "Mean reward",
        mean_of("sao_reward_trajectory_value", window="5m"),
        unit="none",
        why="Of what was scored in the last five minutes.",
    )
    made.number(
        "Scorings that fail",
        "run:sao_reward_failures:ratio_rate10m{@run}",
        unit="percentunit",
        why="Came to no score within 10 minutes.",
        alert="SaoRewardFailures",
    )
    made.number(
        "Oldest that waits",
        "max by (run) (sao_reward_queue_age_seconds{@run})",
        unit="s",
        why="On the trajectories stream.",
        alert="SaoRewardQueueOld",
    )
    made.number(
        "Waiting",
        "max by (run) (sao_reward_queue_trajectories{@run})",
        unit="none",
        why="Entries on the trajectories stream.",
    )
    made.number(
        "Dead letters",
        "sum by (run) (increase(sao_reward_buried_total{@run}[1h])) or vector(0)",
        unit="none",
        why="Buried by the reward service within an hour.",
    )
    made.row("What is rewarded")
    made.graph(
        "Reward",
        [
            Line(
                mean_of("sao_reward_trajectory_value"),
                "scored",
            ),
            Line("max by (run) (sao_trainer_reward_mean{@run})", "trained on"),
        ],
        unit="none",
        why="Under the preference of the scoring, and re-weighted as the trainer takes it.",
    )
    made.graph(
        "Components",
        [
            Line(
                mean_of("sao_reward_component_value", "component"),
                "{{component}}",
            )
        ],
        unit="none",
        why="Raw means, before any preference weighs them.",
    )
    made.graph(
        "Preference version",
        [Line("sao_reward_preference_version{@}", "{{instance}}")],
        unit="none",
        why="A step is a switch; replicas follow with their next scoring.",
    )
    made.row("Whether scoring keeps up")
    made.graph(
        "Outcomes",
        [Line("sum by (run, kind) (rate(sao_reward_outcomes_total{@}[$__rate_interval]))", "{{kind}}")],
        unit="reqps",
        why="Only `scored` trains; nothing else becomes a number.",
    )
    made.graph(
        "Failures",
        [Line("run:sao_reward_failures:ratio_rate10m{@run}", "{{run}}")],
        unit="percentunit",
        why="Scorings that came to no score.",
        alert="SaoRewardFailures",
    )
    made.graph(
        "Queue",
        [
            Line("max by (run) (sao_reward_queue_trajectories{@run})", "waiting"),
            Line("sum by (run) (sao_reward_in_flight_trajectories{@run})", "being scored"),
        ],
        unit="none",
        why="Growing: add replicas, or look at the slowest component.",
    )
    made.graph(
        "Age of the oldest",
        [Line("max by (run) (sao_reward_queue_age_seconds{@run})", "{{run}}")],
        unit="s",
        why="On the trajectories stream.",
        alert="SaoRewardQueueOld",
    )
    made.graph(
        "Time per component",
        [
            Line(
                quantile("sao_reward_component_seconds", "component"),
                "{{component}}",
            )
        ],
        unit="s",
        why="95th percentile, deadline misses included.",
    )
    made.graph(
        "Overdue threads",
        [Line("sao_reward_overdue_threads{@}", "{{instance}} {{component}}")],
        unit="none",
        why="Scorers that run on after their deadline.",
    )
    made.row("What is thrown away")
    made.graph(
        "Dead letters",
        [
            Line("sum by (run, kind) (increase(sao_reward_buried_total{@}[10m]))", "reward: {{kind}}"),
            Line(
                "sum by (run, reason) (increase(sao_trainer_buried_trajectories_total{@run}[10m]))",
                "trainer: {{reason}}",
            ),
            Line(
                "sum by (run, code) (increase(sao_rollout_dead_trajectories_total{@run}[10m]))",
                "workers' dead folder: {{code}}",
            ),
        ],
        unit="none",
        why="Within ten minutes (docs/dead-letters.md).",
    )
    made.graph(
        "Deliveries lost to another consumer",
        [Line("sum by (run, instance) (rate(sao_reward_lost_deliveries_total{@}[$__rate_interval]))", "{{instance}}")],
        unit="reqps",
        why="Outcomes thrown away: scoring takes longer than reward.claim_idle_s, or a replica was stopped.",
    )
    made.graph(
        "Preferences",
        [
            Line("sum by (run) (increase(sao_reward_preference_changes_total{@}[10m]))", "stored"),
            Line("sum by (run) (increase(sao_reward_restored_preferences_total{@}[10m]))", "given back to the board"),
            Line(
                "sum by (run) (increase(sao_reward_preference_folder_errors_total{@}[10m]))", "not kept in the folder"
            ),
        ],
        unit="none",
        why="Within ten minutes.",
    )
    return made
