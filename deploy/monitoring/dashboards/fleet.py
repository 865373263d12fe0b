"""Fleet: is everything up, where does work wait, how full are store and disks."""

from __future__ import annotations

from deploy.monitoring.dashboards.parts import Board, Line


def board() -> Board:
    """The dashboard to open first."""
    made = Board("fleet", "Fleet", "Is everything up, where does work wait, how full are store and disks.")
    made.row("Now")
    made.number(
        "Instances down",
        'count by (run) (up{job=~"$job", run=~"$run"} == 0) or 0 * count by (run) (up{job=~"$job", run=~"$run"})',
        unit="none",
        why="Targets that do not answer a scrape.",
        red_from=1,
    )
    made.number(
        "Since the last update",
        "time() - max by (run) (sao_trainer_last_update_seconds{@run})",
        unit="s",
        why="Compare with trainer.starvation_timeout_s (SaoTrainerStalled).",
    )
    made.number(
        "Since the last trajectory",
        "time() - max by (run) (sao_ingest_last_accepted_seconds{@run})",
        unit="s",
        why="Since ingest accepted one (SaoNoRollouts).",
    )
    made.number(
        "Engines that serve",
        "sum by (run) (instance:sao_weights_serving_engines:sum{@run})",
        unit="none",
        why="In rotation, proven to hold the version they say.",
    )
    made.number(
        "Store memory",
        "max by (run) (sao_ingest_store_memory_ratio{@run})",
        unit="percentunit",
        why="From redis.back_pressure_at on ingest refuses.",
    )
    made.number(
        "Fullest disk",
        "max by (run) (sao_process_disk_used_ratio{@run})",
        unit="percentunit",
        why="Of the folders that our processes write.",
        alert="SaoDiskFilling",
    )
    made.row("Work on its way")
    made.graph(
        "Trajectories per second",
        [
            Line("run:sao_ingest_accepted_trajectories:rate5m{@run}", "accepted"),
            Line("sum by (run) (instance:sao_trainer_consumed_trajectories:rate5m{@run})", "trained on"),
            Line("sum by (run) (rate(sao_trainer_dropped_trajectories_total{@run}[5m]))", "dropped"),
        ],
        unit="reqps",
        why="What comes in and what becomes of it; the gap between the lines waits, or was dropped.",
    )
    made.graph(
        "Waiting",
        [
            Line("max by (run) (sao_ingest_unconsumed_trajectories{@run})", "accepted, not trained on"),
            Line("max by (run) (sao_ingest_admission_limit_trajectories{@run})", "limit"),
            Line("max by (run) (sao_reward_queue_trajectories{@run})", "for their reward"),
            Line("sum by (run) (sao_rollout_spooled_trajectories{@run})", "in spools"),
            Line("max by (run) (sao_trainer_unsettled_trajectories{@run})", "for a checkpoint"),
        ],
        unit="none",
        why="At the limit no prompt is leased: everybody waits for the trainer, or the reward service.",
    )
    made.graph(
        "Leases",
        [
            Line("max by (run) (sao_ingest_leases_live{@run})", "live"),
            Line("max by (run) (sao_ingest_leases_expired{@run})", "expired"),
            Line("sum by (run) (sao_rollout_episodes_in_flight{@run})", "episodes in flight"),
        ],
        unit="none",
        why="Expired ones are of workers that died or hang; they are given again.",
    )
    made.graph(
        "Answers of ingest",
        [Line("sum by (run, status) (rate(sao_ingest_trajectories_total{@}[$__rate_interval]))", "{{status}}")],
        unit="reqps",
        why="Anything but accepted, duplicate and superseded is a refusal.",
    )
    made.graph(
        "Tokens per second",
        [Line("run:sao_rollout_tokens:rate5m{@run}", "{{kind}}")],
        unit="none",
        why="Of finished episodes.",
    )
    made.graph(
        "Episode length in time",
        [
            Line("run:sao_rollout_episode_seconds:p95_5m{@run}", "95th percentile"),
            Line("max by (run) (sao_ingest_episode_deadline_seconds{@run})", "deadline"),
        ],
        unit="s",
        why="From dispatch to the last token.",
    )
    made.row("What goes wrong")
    made.graph(
        "Attempts given up",
        [Line("run:sao_rollout_failed_attempts:ratio_rate10m{@run}", "{{run}}")],
        unit="percentunit",
        why="Episodes that are played again.",
        alert="SaoEpisodesFail",
    )
    made.graph(
        "Why attempts end",
        [
            Line("sum by (run, kind) (rate(sao_rollout_attempts_failed_total{@}[$__rate_interval]))", "{{kind}}"),
            Line(
                "sum by (run, engine, kind) (rate(sao_rollout_engine_errors_total{@}[$__rate_interval]))",
                "{{engine}} {{kind}}",
            ),
        ],
        unit="reqps",
        why="By reason; errors of engines beside them.",
    )
    made.graph(
        "Store does not answer",
        [
            Line("sum by (run, kind) (rate(sao_ingest_store_errors_total{@}[$__rate_interval]))", "ingest: {{kind}}"),
            Line("sum by (run) (rate(sao_trainer_store_outages_total{@}[$__rate_interval]))", "trainer"),
            Line("sum by (run) (rate(sao_reward_store_retries_total{@}[$__rate_interval]))", "reward"),
            Line("sum by (run, what) (rate(sao_weights_unavailable_total{@}[$__rate_interval]))", "weights: {{what}}"),
        ],
        unit="reqps",
        why="Calls to Redis or Valkey that failed.",
    )
    made.row("Store and disks")
    made.graph(
        "Store memory",
        [
            Line("max by (run) (sao_ingest_store_memory_ratio{@run})", "used"),
            Line("max by (run) (sao_ingest_back_pressure_ratio{@run})", "mark"),
        ],
        unit="percentunit",
        why="At the mark ingest refuses, at 1 the store itself does (docs/store-memory.md).",
        most=1,
    )
    made.graph(
        "Disks",
        [Line("sao_process_disk_used_ratio{@}", "{{instance}} {{folder}}")],
        unit="percentunit",
        why="File systems behind the folders that our processes write.",
        alert="SaoDiskFilling",
        most=1,
    )
    made.graph(
        "Spools",
        [
            Line("sao_rollout_spool_bytes{@}", "{{instance}}"),
            Line("max by (run) (sao_rollout_spool_limit_bytes{@run})", "limit"),
        ],
        unit="bytes",
        why="Finished trajectories that ingest does not have yet; at the limit a worker leases nothing.",
    )
    made.row("Processes")
    made.graph(
        "Up",
        [Line('up{job=~"$job", run=~"$run", instance=~"$instance"}', "{{job}} {{instance}}")],
        unit="none",
        why="1 while it answers scrapes.",
        most=1,
    )
    made.graph(
        "Memory",
        [Line("process_resident_memory_bytes{@}", "{{job}} {{instance}}")],
        unit="bytes",
        why="Resident; the cgroup's limit is what counts.",
    )
    made.graph(
        "Tasks of the event loop",
        [Line("sao_process_tasks{@}", "{{job}} {{instance}}")],
        unit="none",
        why="Goes up and comes down; one that only goes up is a leak.",
    )
    return made
