"""The trainer's loop, one trajectory at a time.

    publish the state as a new version
    repeat: begin ─ take, accumulate (until trajectories_per_update) ─ finish ─ archive ─ publish ─ row ─ board
            checkpoint when due ─ settle what it holds

Nothing is settled before a durable checkpoint holds its effect; nothing is trained twice, because a checkpoint
names the ids it has trained on whose entries may still exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sao.adaptation import FirstUse
from sao.archive import Archive
from sao.board.base import Board, EngineState, TrainerFacts, TrainerState
from sao.board.messages import fenced_message
from sao.config import RunConfig, dump_run_config
from sao.curves import Recovery
from sao.rows import CRITIC_ONLY
from sao.streams.base import FencedError, StoreEmptiedError, StreamName, StreamUnavailableError, TrajectoryStreams
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, Tracer
from services.trainer import metrics
from services.trainer.batcher import Batcher
from services.trainer.cadence import Cadence
from services.trainer.checkpoint import CheckpointStore, Progress
from services.trainer.consumer import Consumer, Position, Refused, Taken
from services.trainer.core.update import UpdateStats
from services.trainer.holding import Holding
from services.trainer.outage import ride_out
from services.trainer.publisher import NonFiniteWeightsError, Publisher
from services.trainer.ranks import Ranks
from services.trainer.records import FinishedUpdate, append_row, finite, summary
from services.trainer.recovery import recent_metrics, recent_values
from services.trainer.schedule import Gate, Phase, Pretraining, Schedule
from services.trainer.tracing import note_update, note_version

log = get_logger(__name__)

POLL_MS = 200
"""Longest blocking read: how soon a stop or starvation is noticed."""
HEARTBEAT_S = 60.0
EPOCH_S = 1.0
"""How soon a store that was emptied is noticed."""
ENGINE_POLL_S = 0.05


@dataclass(frozen=True)
class Parts:
    """What the loop drives."""

    config: RunConfig
    ranks: Ranks
    streams: TrajectoryStreams
    board: Board
    consumer: Consumer
    batcher: Batcher
    publisher: Publisher
    checkpoints: CheckpointStore
    archive: Archive
    health: Health
    epoch: int
    tracer: Tracer = OFF


@contextlib.contextmanager
def _busy(work: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        metrics.BUSY_SECONDS.labels(work).inc(time.perf_counter() - started)


def fresh_progress(run: str) -> Progress:
    """A run's beginning."""
    return Progress(
        run=run,
        update=0,
        critic_only=0,
        consumed=0,
        unsettled_ids=[],
        version="",
        trainer_epoch=0,
        dropped={},
        pretraining=Pretraining(),
    )


class TrainerLoop:
    """Runs from a restored (or fresh) progress to the run's last update, or until stopped."""

    def __init__(self, parts: Parts, progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._restored = progress
        self._config = parts.config
        self._clock = clock
        self._update = progress.update
        self._critic_only = progress.critic_only
        self._consumed = progress.consumed
        self._version = progress.version
        self._schedule = Schedule.of(parts.config, has_critic=parts.config.algorithm.has_critic)
        self._pretraining = self._schedule.resumed(progress.pretraining)
        self._holding = Holding(parts.config.guards, parts.checkpoints)
        self._unsettled: list[Taken] = []
        self._steps_since_checkpoint = 0
        self._idle_s = 0.0
        self._started_s = 0.0
        self._epoch_seen_at = clock()
        trainer = parts.config.trainer
        self._cadence = Cadence(
            trainer.publish_every, trainer.publish_min_seconds, trainer.max_lag, update=progress.update, at=clock()
        )
        self._told: TrainerFacts | None = None
        self._preference = 0
        self._first_use = FirstUse()
        self._recovery = Recovery()

    @property
    def finished(self) -> bool:
        """Whether the run's last update is made."""
        return self._config.run.updates is not None and self._update >= self._config.run.updates

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the run is over or `stop` is set; what is unfinished then is delivered again next time."""
        parts = self._parts
        parts.health.working("training")
        parts.archive.write_run_file(parts.epoch, dump_run_config(self._config))
        window = self._config.critic.explained_variance_window
        for values, reward in recent_values(parts.archive, self._restored, window, ranks=parts.ranks.count):
            parts.ranks.recall(values, reward)
        earlier = recent_metrics(parts.archive, self._restored, self._holding.memory)
        self._holding.recall(earlier, update=self._update, version=self._version)
        await self._publish_beginning()
        parts.batcher.load(self._restored.baseline)
        await self._tell(TrainerState.TRAINING)
        await ride_out(parts.consumer.open)
        parts.health.set_ready(True)
        while not self.finished:
            taken = await self._collect(stop)
            if taken is None:
                break
            await self._complete(taken)
            if self._config.algorithm.synchronous:
                await self._synchronise(stop)
            if reason := self._checkpoint_reason():
                await self._checkpoint(reason)
        await self._checkpoint("end" if self.finished else "stop")
        if self.finished:
            if held := self._holding.reasons:
                log.error("the newest weights are not published: held", reasons=held, newest=self._version)
            await self._tell(TrainerState.FINISHED)
            parts.health.idle("the run is over")
        log.info("trainer ends", update=self._update, finished=self.finished, consumed=self._consumed)

    # --- one update -----------------------------------------------------------------------------------------

    async def _collect(self, stop: asyncio.Event) -> list[Taken] | None:
        """Accumulate the trajectories of one update as they arrive; None when stopped before they were there."""
        parts, trainer = self._parts, self._config.trainer
        self._begin()
        taken: list[Taken] = []
        share: list[Taken] = []
        missing = trainer.trajectories_per_update
        waiting_since = last_heartbeat = self._clock()
        while missing > 0:
            if stop.is_set():
                return None
            before = self._clock()
            found = await self._take()
            now = self._clock()
            self._note_idle(now - before)
            if now - self._epoch_seen_at > EPOCH_S:
                await self._require_epoch()
                self._epoch_seen_at = now
            if now - last_heartbeat > HEARTBEAT_S:
                parts.ranks.heartbeat()
                last_heartbeat = now
            if found is not None:
                parts.health.progress()
            if found is None or isinstance(found, Refused):
                # While publishing is held all that comes may be stale: nothing trains, however much arrives.
                if now - waiting_since > self._config.checkpoint.starved_after_s and self._unsettled:
                    await self._checkpoint("starved")
                continue
            waiting_since = now
            if not taken:
                self._started_s = waiting_since
            for one in found:
                taken.append(one)
                share.append(one)
                missing -= one.tensors.copies
                if len(share) == parts.ranks.count or missing <= 0:
                    with _busy("accumulate"):
                        parts.ranks.accumulate([t.tensors for t in share])
                    share.clear()
        return taken

    def _begin(self) -> None:
        """Learning rates, and whether the policy moves at all, as the schedule has it."""
        self._plan = plan = self._schedule.plan(self._update, self._critic_only, self._pretraining)
        metrics.show_phase(plan.phase, self._pretraining.gate)
        self._parts.ranks.begin(policy_lr=plan.policy_lr, critic_lr=plan.critic_lr, critic_only=plan.critic_only)
        self._parts.consumer.begin_update()
        self._idle_s = 0.0

    def _advance(self, stats: UpdateStats, trajectories: int) -> str:
        """Carry the schedule and the guards past this update; how far the critic is, in words."""
        variance = stats.metrics.get("explained_variance")
        if self._plan.phase is Phase.PRETRAIN:
            self._pretraining = self._schedule.after(self._pretraining, trajectories, variance)
        told = self._schedule.told(self._plan.phase, self._critic_only, self._pretraining, variance)
        if self._plan.phase is Phase.PRETRAIN and self._pretraining.gate is not Gate.OPEN:
            passed = self._pretraining.gate is Gate.PASSED
            (log.info if passed else log.warning)("critic pre-training is over", result=told)
        if not stats.critic_only:
            self._holding.observe(stats.metrics, update=self._update, version=self._version)
        return told

    async def _complete(self, taken: list[Taken]) -> None:
        """Step, and record it: archive first, then the version, the row and the board."""
        parts = self._parts
        with _busy("step"):
            stats = parts.ranks.finish()
        if stats.skipped:
            metrics.SKIPPED.inc()
            log.error("update skipped, nothing was changed", update=self._update + 1, reason=stats.skipped_reason)
        parts.batcher.finished(taken, stats.trajectories)
        parts.consumer.trained(taken)
        version_before = self._version
        # A skipped update counts: its trajectories are spent.
        self._update += not stats.critic_only
        self._critic_only += stats.critic_only
        self._consumed += len(taken)
        self._unsettled += taken
        self._steps_since_checkpoint += 1
        phase = self._advance(stats, len(taken))
        done = FinishedUpdate(
            run=self._config.run.name,
            epoch=parts.epoch,
            update=self._update,
            version_before=version_before,
            preference=parts.consumer.preference,
            policy_lr=self._plan.policy_lr,
            critic_lr=self._plan.critic_lr,
            taken=taken,
            stats=stats,
            numbers=finite(stats.metrics | summary(taken) | parts.batcher.numbers() | await self._loop_numbers()),
            finished_s=time.time(),
            phase=phase,
            held=self._holding.reasons,
        )
        parts.archive.append(done.archived())
        self._follow_preference(done)
        version = await self._publish() if self._publish_due(stats) else ""
        append_row(self._config.run.dir / "updates.jsonl", done.row(version, dict(parts.consumer.dropped)))
        self._show(done)
        note_update(parts.tracer, done, version)
        await self._tell(TrainerState.TRAINING)

    def _follow_preference(self, done: FinishedUpdate) -> None:
        """How long ago the preference was stored that this update is the first to train under, or recovers under."""
        if done.preference is None:
            return
        self._preference = max(self._preference, done.preference.version)
        if (seconds := self._first_use.seconds(done.preference)) is not None:
            metrics.ADAPTATION.labels("trained").set(seconds)
        back = [self._recovery.observe(taken.reward, taken.trained_under) for taken in done.taken]
        if any(back) and done.preference.stored_s > 0:
            metrics.ADAPTATION.labels("recovered").set(max(done.finished_s - done.preference.stored_s, 0.0))

    async def _synchronise(self, stop: asyncio.Event) -> None:
        """Let the next rollouts begin: not before every engine serves the weights that the last ones made."""
        parts = self._parts
        deadline = self._clock() + self._config.group.timeout_s
        while behind := [
            facts.engine_id
            for facts in (await ride_out(parts.board.engines)).values()
            if facts.state is not EngineState.QUARANTINED and not (facts.in_rotation and facts.version == self._version)
        ]:
            if stop.is_set():
                return
            if self._clock() > deadline:
                log.warning("going on without waiting longer for engines", engines=behind, version=self._version)
                break
            parts.health.progress()
            await asyncio.sleep(ENGINE_POLL_S)
        await ride_out(parts.consumer.release)

    def _publish_due(self, stats: UpdateStats) -> bool:
        if stats.critic_only or self._holding.reasons:
            return False
        return self._cadence.due(self._update, self._clock()) or self.finished

    async def _loop_numbers(self) -> dict[str, float]:
        depth = await ride_out(lambda: self._parts.streams.depth(StreamName.SCORED))
        wall = max(self._clock() - self._started_s, 1e-9)
        metrics.UPDATE_SECONDS.observe(wall)
        return {
            CRITIC_ONLY: float(self._critic_only),
            "queue_depth": float(max(depth.length - depth.pending, 0)),
            "queue_age_s": depth.oldest_age_s,
            "update_s": wall,
            "idle_s": self._idle_s,
            "unsettled": float(len(self._unsettled)),
        }

    def _show(self, done: FinishedUpdate) -> None:
        metrics.UPDATES.labels("critic" if done.stats.critic_only else "policy").inc()
        metrics.UPDATE.set(self._update)
        metrics.UNSETTLED.set(len(self._unsettled))
        metrics.UNSETTLED_BYTES.set(self._unsettled_bytes)
        for taken in done.taken:
            metrics.count_trained(taken.trajectory)
        metrics.show_update(done.numbers)
        log.info(
            "update done",
            update=self._update,
            critic_only=done.stats.critic_only,
            version=self._version,
            reward=done.numbers.get("reward_mean"),
            lag=done.numbers.get("lag_max"),
        )

    # --- the stream -----------------------------------------------------------------------------------------

    async def _take(self) -> list[Taken] | Refused | None:
        """`Batcher.next`, riding out an unavailable store: what was in flight is delivered again and re-judged."""
        consumer = self._parts.consumer
        position = Position(self._version, self._update)
        try:
            return await self._parts.batcher.next(position, block_ms=POLL_MS)
        except StreamUnavailableError as error:
            log.warning("stream store unavailable, rewinding", reason=str(error))
            await ride_out(consumer.open)
            return None

    async def _require_epoch(self) -> None:
        """FencedError when a newer trainer has started, StoreEmptiedError when the store has forgotten this one.

        An older file of this epoch shows in the facts: whatever was written before them is there when they are.
        """
        epoch, newest = self._parts.epoch, await ride_out(self._parts.board.epoch)
        if newest > epoch:
            raise FencedError(fenced_message(epoch, newest))
        if newest < epoch:
            msg = (
                f"trainer epoch {epoch}: the store knows {newest or 'none'}, so it was restarted without its file or "
                "with an older one; this process ends, and its next start restores what the run's folder knows"
            )
            raise StoreEmptiedError(msg)
        facts = await ride_out(self._parts.board.trainer)
        if facts != self._told and (facts is None or facts.epoch <= epoch):
            found = f"update {facts.update} of epoch {facts.epoch}" if facts is not None else "none"
            msg = (
                f"trainer epoch {epoch}: the store's facts of it are {found}, expected update {self._update}: it was "
                "restarted with an older file; this process ends, its next start restores what the run's folder knows"
            )
            raise StoreEmptiedError(msg)

    def _note_idle(self, seconds: float) -> None:
        self._idle_s += seconds
        metrics.IDLE_SECONDS.inc(seconds)

    # --- versions, checkpoints, board -----------------------------------------------------------------------

    async def _publish_beginning(self) -> None:
        """The state this process begins with, before it consumes; while publishing is held, what was published before.

        Held or not, engines need a version: where the board or the store has lost it, the state is published.
        ArithmeticError when that is not finite.
        """
        parts = self._parts
        known = self._version in await ride_out(parts.board.versions)
        if self._holding.reasons and known and self._version in parts.publisher.store.names():
            return
        if not await self._publish(starting=True):
            msg = f"the weights at update {self._update} are not finite: restore an older checkpoint"
            raise ArithmeticError(msg)

    async def _publish(self, *, starting: bool = False) -> str:
        """The new version's name, or nothing when the weights are not finite (engines keep the last good ones)."""
        parts = self._parts
        parent = await self._known_ancestor() if starting else self._version
        began_ns = time.time_ns()
        try:
            with _busy("publish"):
                state = parts.ranks.policy_state()
                record = await parts.publisher.publish(
                    state, parts.ranks.logprobs, update=self._update, parent=parent, preference=self._preference
                )
        except NonFiniteWeightsError as error:
            metrics.PUBLISH_HELD.inc()
            log.error("version not published", reason=str(error))  # noqa: TRY400
            return ""
        metrics.PUBLISHED.inc()
        self._version = record.name
        self._cadence.published(self._update, self._clock())
        parts.consumer.know(record)
        note_version(parts.tracer, self._config.run.name, record, began_ns)
        return record.name

    async def _known_ancestor(self) -> str | None:
        """The version on the board that this state descends from.

        Without a checkpoint that is the run's first version: a trainer that died before its first checkpoint
        published the same initial weights, and work is waiting that was sampled from them.
        """
        versions = await ride_out(self._parts.board.versions)
        if self._version:
            if self._version in versions:
                return self._version
            log.warning("the restored version is not on the board: lag starts anew", version=self._version)
            return None
        roots = [name for name, record in versions.items() if record.parent is None and record.update == 0]
        return min(roots, default=None)

    def _checkpoint_reason(self) -> str:
        checkpoint = self._config.checkpoint
        if self._steps_since_checkpoint >= checkpoint.every_updates:
            return "due"
        if self._unsettled_bytes > checkpoint.unacked_mb_max << 20:
            return "unacked_bytes"
        return ""

    @property
    def _unsettled_bytes(self) -> int:
        return sum(taken.size for taken in self._unsettled)

    async def _checkpoint(self, reason: str) -> None:
        """Make every finished update durable, then settle the entries it was made of."""
        parts = self._parts
        with _busy("checkpoint"):
            parts.checkpoints.save(self.progress(), parts.ranks.save)
        metrics.CHECKPOINTS.labels(reason).inc()
        self._steps_since_checkpoint = 0
        ids = [taken.trajectory.id for taken in self._unsettled]
        settled = await ride_out(lambda: parts.consumer.settle(ids))
        self._unsettled.clear()
        log.info("checkpoint", reason=reason, update=self._update, settled=settled)

    def progress(self) -> Progress:
        """What a checkpoint of this moment says."""
        return Progress(
            run=self._config.run.name,
            update=self._update,
            critic_only=self._critic_only,
            consumed=self._consumed,
            unsettled_ids=[*self._parts.consumer.restored, *(taken.trajectory.id for taken in self._unsettled)],
            version=self._version,
            trainer_epoch=self._parts.epoch,
            dropped=dict(self._parts.consumer.dropped),
            stretches=self._restored.stretches_to(self._parts.epoch, self._update, self._critic_only),
            forgone_ids=self._parts.consumer.forgone,
            done=self._parts.consumer.done.ranges,
            algorithm=self._config.trainer.algorithm,
            baseline=self._parts.batcher.state(),
            pretraining=self._pretraining,
        )

    async def _tell(self, state: TrainerState) -> None:
        facts = TrainerFacts(
            epoch=self._parts.epoch,
            update=self._update,
            version=self._version,
            consumed=self._consumed,
            state=state,
        )
        await ride_out(lambda: self._parts.board.write_trainer(facts))
        self._told = facts
