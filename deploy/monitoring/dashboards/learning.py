"""Learning: does the reward rise, and does the policy move soundly."""

from __future__ import annotations

from deploy.monitoring.dashboards.parts import Board, Line, quantile


def _guard(name: str, series: str) -> list[Line]:
    return [
        Line(f"{series}{{@run,instance}}"),
        Line(f'max by (run) (sao_trainer_guard_limit{{@run, guard="{name}"}})', "guard's limit"),
    ]


def board() -> Board:
    """The dashboard of the person who owns the run."""
    made = Board("learning", "Learning", "Does the reward rise, and does the policy move soundly.")
    made.row("Now")
    made.number(
        "Update",
        "max by (run) (sao_trainer_update_number{@run})",
        unit="none",
        why="Policy updates since the run began.",
    )
    made.number(
        "Updates per minute",
        "60 * sum by (run) (instance:sao_trainer_updates:rate5m{@run})",
        unit="none",
        why="Of policy and critic.",
    )
    made.number(
        "Reward",
        "avg by (run) (avg_over_time(sao_trainer_reward_mean{@run}[5m]))",
        unit="none",
        why="Mean of the last five minutes' updates, as trained.",
    )
    made.number(
        "Mean lag",
        "max by (run) (instance:sao_trainer_lag_updates:avg10m{@run})",
        unit="none",
        why="Of action tokens, in updates; trainer.max_lag is the most that trains.",
    )
    made.number(
        "Trainer busy",
        "avg by (run) (instance:sao_trainer_busy:ratio_rate5m{@run})",
        unit="percentunit",
        why="Low: rollouts are the bottleneck. Near 1: the trainer is.",
    )
    made.number(
        "Guards that hold",
        "sum by (run) (sao_trainer_publishing_held{@run})",
        unit="none",
        why="Publishing is held while there are any.",
        red_from=1,
    )
    made.row("Reward and critic")
    made.graph(
        "Reward",
        [
            Line("sao_trainer_reward_mean{@}", "last update"),
            Line("avg_over_time(sao_trainer_reward_mean{@}[10m])", "10 minutes"),
        ],
        unit="none",
        why="A preference switch (purple) changes what it means.",
    )
    made.graph(
        "Explained variance",
        [
            Line("sao_trainer_explained_variance_ratio{@}", "running window"),
            Line("instance:sao_trainer_explained_variance:max10m{@}", "best of 10 minutes"),
        ],
        unit="none",
        why="Below 0 the critic is worse than a constant.",
        alert="SaoExplainedVarianceNegative",
    )
    made.graph(
        "Value and reward",
        [Line("sao_trainer_value_mean{@}", "mean V"), Line("sao_trainer_reward_mean{@}", "mean reward")],
        unit="none",
        why="What the critic expects, and what comes.",
    )
    made.graph("Loss", [Line("sao_trainer_loss_value{@}", "{{network}}")], unit="none", why="Of the last update.")
    made.graph(
        "Gradient norm", [Line("sao_trainer_gradient_norm{@}", "{{network}}")], unit="none", why="Before clipping."
    )
    made.graph(
        "Phase",
        [Line("sao_trainer_phase_active{@}", "{{phase}}"), Line("sao_trainer_critic_gate_state{@}", "gate {{state}}")],
        unit="none",
        why="The policy moves in `train` only.",
        most=1,
    )
    made.row("How far the policy moves")
    made.graph("Entropy", [Line("sao_trainer_policy_entropy_nats{@}")], unit="none", why="Nats at action tokens.")
    made.graph(
        "Entropy slope",
        _guard("entropy_slope", "instance:sao_trainer_entropy_slope_nats_per_update:deriv10m"),
        unit="none",
        why="Nats per update, without its sign. At the limit publishing is held.",
    )
    made.graph(
        "KL",
        [
            Line("sao_trainer_rollout_kl_nats{@}", "to the rollout, lag {{lag}}"),
            Line("sao_trainer_reference_kl_nats{@}", "to the initial policy"),
        ],
        unit="none",
        why="Nats, k3 estimate.",
    )
    made.graph(
        "Mismatch KL",
        _guard("mismatch_kl", "instance:sao_trainer_mismatch_kl_nats:avg10m"),
        unit="none",
        why="Engine and trainer about the same weights: about 0 in float32.",
    )
    made.graph(
        "Rejected share",
        _guard("rejected_share", "instance:sao_trainer_rejected:ratio_avg10m"),
        unit="percentunit",
        why="Of the fresh action tokens, by importance sampling.",
    )
    made.graph(
        "Importance ratio",
        [Line("sao_trainer_importance_ratio{@}", "{{statistic}}")],
        unit="none",
        why="Before masking.",
    )
    made.row("How old what trains is")
    made.graph(
        "Lag",
        [
            Line("sao_trainer_lag_updates{@}", "{{statistic}}"),
            Line("max by (run) (sao_trainer_max_lag_updates{@run})", "trainer.max_lag"),
        ],
        unit="none",
        why="Updates between sampling and training.",
    )
    made.graph(
        "Lost to staleness",
        [
            Line("instance:sao_trainer_dropped_as_stale:ratio_rate10m{@run,instance}", "trajectories dropped"),
            Line("instance:sao_trainer_masked_as_stale:ratio_avg10m{@run,instance}", "tokens masked"),
        ],
        unit="percentunit",
        why="Rolled out in vain.",
        alert="SaoStaleWork",
        most=1,
    )
    made.graph(
        "Tokens by verdict",
        [Line('sao_trainer_dis_tokens_fraction{@, lag="all"}', "{{verdict}}")],
        unit="percentunit",
        why="Of action tokens in the last update.",
        most=1,
    )
    made.graph(
        "Versions in a trajectory",
        [Line("sao_trainer_trajectory_versions{@}", "{{statistic}}")],
        unit="none",
        why="More than one: weights changed while it was played.",
    )
    made.graph(
        "Not trained on",
        [
            Line(
                "sum by (run, reason) (rate(sao_trainer_dropped_trajectories_total{@}[$__rate_interval]))",
                "dropped: {{reason}}",
            ),
            Line("sum by (run) (rate(sao_trainer_rescored_trajectories_total{@}[$__rate_interval]))", "scored again"),
            Line("sum by (run, outcome) (rate(sao_trainer_groups_total{@}[$__rate_interval]))", "groups: {{outcome}}"),
        ],
        unit="reqps",
        why="By reason; groups only for algorithms that compare.",
    )
    made.graph(
        "Truncated",
        [Line("sao_trainer_truncated_fraction{@}")],
        unit="percentunit",
        why="Cut by a length or turn limit.",
        most=1,
    )
    made.row("Where time goes")
    made.graph(
        "Time per update",
        [
            Line(
                quantile("sao_trainer_update_seconds"),
                "95th percentile",
            ),
            Line(
                quantile("sao_trainer_update_seconds", share=0.5),
                "median",
            ),
        ],
        unit="s",
        why="From the first trajectory to the step.",
    )
    made.graph(
        "What the trainer does",
        [
            Line("sum by (run, work) (rate(sao_trainer_busy_seconds_total{@}[$__rate_interval]))", "{{work}}"),
            Line("sum by (run) (rate(sao_trainer_idle_seconds_total{@}[$__rate_interval]))", "idle"),
        ],
        unit="percentunit",
        why="Share of each second.",
        most=1,
    )
    made.graph(
        "Length",
        [
            Line(
                quantile("sao_trainer_trajectory_tokens", "kind", share=0.5),
                "{{kind}}, median",
            ),
            Line(
                quantile("sao_trainer_trajectory_tokens", "kind"),
                "{{kind}}, 95th percentile",
            ),
        ],
        unit="none",
        why="Tokens of trained trajectories.",
    )
    return made
