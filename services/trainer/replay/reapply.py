"""Re-apply archived steps on a CPU: the calls of services/trainer/loop.py, with the archive in the stream's place."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from sao.config import RunConfig
from sao.outcome import OUTCOME, Scored
from sao.preference import MissingComponentError, Preference, PreferenceDocument
from sao.routing import RoutingShape, replayed_routing
from sao.rows import CRITIC_ONLY
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from services.trainer import batcher
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.consumer import Taken, routes_of, tensors_of
from services.trainer.core.baselines import Baseline, baseline_of
from services.trainer.core.staleness import judge_staleness
from services.trainer.core.update import Update, UpdateSettings, UpdateStats
from services.trainer.ranks import Ranks
from services.trainer.records import FinishedUpdate, finite, summary
from services.trainer.recovery import ArchivedStep, values_of
from services.trainer.replay.history import ArchivedRun, CannotReplayError, Stretch
from services.trainer.warm_start_key import initial_model_path


def reapplied(run: ArchivedRun, stretch: Stretch) -> Iterator[tuple[pb.ArchivedUpdate, pb.ArchivedUpdate]]:
    """Each step of the stretch in order: as it was archived, and as it comes out now.

    Every epoch gets a trainer of its own, under its own run file, as it did in the run. CannotReplayError when the
    initial model is gone or the archive is of a release that wrote too little.
    """
    start = stretch.start
    state = start.backend_dir if start is not None else None
    remembered: Mapping[str, Sequence[float]] = start.progress.baseline if start is not None else {}
    critic_only = start.progress.critic_only if start is not None else 0
    done = list(stretch.before)
    with tempfile.TemporaryDirectory(prefix="sao-replay-") as work:
        for epoch, steps in groupby(stretch.steps, key=lambda step: step.name.epoch):
            trainer = _Trainer.begin(run, epoch, state, remembered, done)
            for step in steps:
                logged = run.archive.load(step.name)
                critic_only += logged.critic_only
                taken, stats = trainer.update(logged)
                yield logged, _archived(logged, taken, stats, critic_only, trainer.config)
                trainer.learn(taken, stats)
                done.append(step)
            if step is not stretch.steps[-1]:
                state = Path(work) / f"epoch-{epoch}"
                state.mkdir()
                trainer.ranks.save(state)
                remembered = trainer.remembered


@dataclass(frozen=True)
class _Trainer:
    """One epoch's networks, settings and books."""

    config: RunConfig
    ranks: Ranks
    baseline: Baseline | None
    routing: RoutingShape | None

    @classmethod
    def begin(
        cls,
        run: ArchivedRun,
        epoch: int,
        state: Path | None,
        remembered: Mapping[str, Sequence[float]],
        done: Sequence[ArchivedStep],
    ) -> _Trainer:
        """As the epoch found things; `state` None: the initial model."""
        config = run.config(epoch)
        initial = initial_model_path(config)
        if not (initial / "config.json").exists():
            make = ", or make it again: python -m services.trainer.warm_start" if config.model.path is None else ""
            msg = f"the initial model {initial} is gone, and every replay needs it: put it back{make}"
            raise CannotReplayError(msg)
        torch.set_num_threads(1)
        backend = TorchReferenceBackend(config, initial)
        ranks = Ranks(backend, Update(backend, UpdateSettings.of(config)))
        if state is not None:
            ranks.load(state)
        for values, reward in values_of(run.archive, done, config.critic.explained_variance_window):
            ranks.recall(values, reward)
        baseline = baseline_of(config)
        if baseline is not None:
            baseline.load(remembered)
        return cls(config, ranks, baseline, replayed_routing(config, initial))

    def update(self, logged: pb.ArchivedUpdate) -> tuple[list[Taken], UpdateStats]:
        """The archived update once more, from its trajectories, raw reward components and lags."""
        preference = _preference(logged)
        if gone := [one.trajectory.id for one in logged.trajectories if one.forgotten]:
            msg = f"update {logged.update} is forgotten: the text of {', '.join(gone)} was erased (docs/privacy.md)"
            raise CannotReplayError(msg)
        judged = [self._judged(trained, preference) for trained in logged.trajectories]
        taken = batcher.again(judged, self.config, self.baseline)
        self.ranks.begin(policy_lr=logged.policy_lr, critic_lr=logged.critic_lr, critic_only=logged.critic_only)
        for one in taken:
            self.ranks.accumulate([one.tensors])
        return taken, self.ranks.finish()

    def learn(self, taken: Sequence[Taken], stats: UpdateStats) -> None:
        """What the batcher does when an update is finished."""
        if self.baseline is not None:
            batcher.learn(self.baseline, taken, stats.trajectories)

    @property
    def remembered(self) -> dict[str, list[float]]:
        return self.baseline.state() if self.baseline is not None else {}

    def _judged(self, trained: pb.TrainedTrajectory, preference: Preference | None) -> Taken:
        """What the consumer made of it; the reward anew wherever the document that it is under is known."""
        trajectory, outcome = Trajectory(trained.trajectory), OUTCOME.validate_json(trained.outcome_json)
        if not isinstance(outcome, Scored):
            msg = f"trajectory {trajectory.id}: its archived outcome is {outcome.kind}, only `scored` trains"
            raise CannotReplayError(msg)
        unknown = sorted({name for name in trajectory.versions if name} - trained.version_lags.keys())
        if unknown:
            msg = f"trajectory {trajectory.id}: no lag of {unknown} is archived; an earlier release kept none"
            raise CannotReplayError(msg)
        routes_TLK = self._routes(trajectory, trained.routed_experts)
        reward = outcome.value
        if preference is not None and preference.version == trained.trained_under:
            try:
                reward = outcome.value_under(preference.document)
            except (MissingComponentError, ValueError) as error:
                msg = f"trajectory {trajectory.id}: {error}"
                raise CannotReplayError(msg) from error
        tensors = tensors_of(trajectory, trained.version_lags, reward, routes_TLK)
        trainer = self.config.trainer
        stale = judge_staleness(tensors.lag_T, tensors.action_mask_T, trainer.max_lag, trainer.stale_policy)
        return Taken(
            trajectory=trajectory,
            outcome=outcome,
            reward=reward,
            trained_under=trained.trained_under,
            version_lags=dict(trained.version_lags),
            lag=stale.lag,
            tensors=tensors,
            size=0,
            consumed_s=0.0,
        )

    def _routes(self, trajectory: Trajectory, record: bytes) -> torch.Tensor | None:
        """The experts that were replayed; CannotReplayError when model or run file do not fit the record."""
        if not record:
            return None
        if self.routing is None:
            problem = "trainer.routing_replay is off in the run file of its time"
        else:
            problem = self.routing.problem(record, len(trajectory.token_ids) - 1)
        if problem:
            msg = f"trajectory {trajectory.id} was trained with routed experts: {problem}"
            raise CannotReplayError(msg)
        return routes_of(record, self.routing)


def _preference(logged: pb.ArchivedUpdate) -> Preference | None:
    if not logged.preference_json:
        return None
    document = PreferenceDocument.model_validate_json(logged.preference_json)
    return Preference(version=logged.preference_version, document=document)


def _archived(
    logged: pb.ArchivedUpdate, taken: Sequence[Taken], stats: UpdateStats, critic_only: int, config: RunConfig
) -> pb.ArchivedUpdate:
    """The archive entry of the update made again, at the run file's learning rates (the critic's ramp as logged)."""
    return FinishedUpdate(
        run=logged.run,
        epoch=logged.trainer_epoch,
        update=logged.update,
        version_before=logged.version_before,
        preference=_preference(logged),
        policy_lr=config.trainer.policy_lr,
        critic_lr=logged.critic_lr if logged.critic_only else config.critic.lr,
        taken=taken,
        stats=stats,
        numbers=finite(stats.metrics | summary(taken) | {CRITIC_ONLY: float(critic_only)}),
        finished_s=logged.finished_s,
        phase="",
        held=[],
    ).archived()
