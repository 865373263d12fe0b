"""What the consumer lets train, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sao.board.base import VersionRecord
from sao.invariants import Limits
from sao.outcome import Scored, TimedOut
from sao.preference import PreferenceDocument
from sao.routing import RoutingShape
from sao.streams.base import Delivery, RequeueStatus, StreamName, StreamUnavailableError, TrajectoryStreams
from sao.streams.memory import MemoryStreams
from sao.trajectory import Trajectory
from services.trainer.consumer import CONSUMER, Archived, Consumer, Position, Refused, Taken
from services.trainer.drops import Drops
from tests.support.training import PREFERENCE, PowerFailureError, World, random_trajectory
from tests.support.trajectories import MUTATIONS, ROUTING, bad, routed_experts
from tests.unit.services.trainer.conftest import NewWorld

HERE = Position("v00000006", 5)


async def consumer_of(world: World, routing: RoutingShape | None = None) -> Consumer:
    """A consumer at update 5, on a line of versions v1 .. v6 (updates 0 .. 5)."""
    await world.board.put_preference(PREFERENCE)
    epoch = await world.board.new_trainer_epoch()
    parent = None
    for update in range(6):
        name = f"v{update + 1:08d}"
        await world.board.announce_version(VersionRecord(name=name, update=update, parent=parent, epoch=epoch))
        parent = name
    limits = Limits("unit", 32, 512, 2**20, 1e-5, routing=routing)
    consumer = Consumer(world.streams, world.board, world.config.trainer, limits, epoch=epoch)
    await consumer.open()
    return consumer


async def take(consumer: Consumer) -> Taken | Refused | None:
    return await consumer.take(HERE, block_ms=0)


async def test_tokens_older_than_tau_are_masked_by_their_lag_and_the_rest_trains(new_world: NewWorld) -> None:
    world = new_world("trainer.max_lag=2")
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit", version="v00000001")
    message.segments[2].versions[0].version = "v00000006"
    await world.deliver(message)

    taken = await take(consumer)

    assert isinstance(taken, Taken)
    assert taken.lag == 5
    first, second = (len(message.segments[i].token_ids) for i in (0, 2))
    assert taken.tensors.lag_T[taken.tensors.action_mask_T].tolist() == [5] * first + [0] * second
    assert await world.streams.unconsumed() == 0
    assert await world.streams.payload(message.id) is not None


@pytest.mark.parametrize(
    ("stale_policy", "versions", "trains"),
    [
        ("mask_tokens", ("v00000001", "v00000001"), False),
        ("mask_tokens", ("v00000001", "v00000006"), True),
        ("drop", ("v00000001", "v00000006"), False),
        ("drop", ("v00000004", "v00000006"), True),
    ],
)
async def test_the_stale_policy_decides_what_an_old_trajectory_may_teach(
    new_world: NewWorld, stale_policy: str, versions: tuple[str, str], trains: bool
) -> None:
    world = new_world("trainer.max_lag=2", f"trainer.stale_policy={stale_policy}")
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit")
    for segment, version in zip((message.segments[0], message.segments[2]), versions, strict=True):
        segment.versions[0].version = version
    await world.deliver(message)

    found = await take(consumer)

    assert isinstance(found, Taken) is trains
    if not trains:
        assert found == Refused(message.id, "stale")
        assert consumer.dropped == {"stale": 1}
        assert await world.settled([message.id]) == [message.id]
    assert await world.streams.unconsumed() == 0


async def test_lag_goes_through_the_common_ancestor(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    branch = VersionRecord(name="v00000009", update=4, parent="v00000002", epoch=1)
    await world.board.announce_version(branch)
    await world.deliver(random_trajectory(world.rng, "unit", version=branch.name))
    taken = await take(consumer)
    assert isinstance(taken, Taken)
    assert taken.lag == (5 - 1) + (4 - 1)


async def test_a_version_of_another_tree_trains_nothing(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    await world.board.announce_version(VersionRecord(name="v00000009", update=5, parent=None, epoch=1))
    message = random_trajectory(world.rng, "unit", version="v00000009")
    await world.deliver(message)
    assert await take(consumer) == Refused(message.id, "lineage")


async def test_an_update_pins_its_preference_and_reweights_the_rest_to_it(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    await world.deliver_many(3)
    await world.board.put_preference(PreferenceDocument(name="wrong", weights={"right": -1.0}, offset=1.0))

    consumer.begin_update()
    first = await take(consumer)
    await world.board.put_preference(PREFERENCE)
    second = await take(consumer)
    consumer.begin_update()
    third = await take(consumer)

    found = [t for t in (first, second, third) if isinstance(t, Taken)]
    assert [(t.outcome.value, t.reward, t.trained_under) for t in found] == [
        (0.0, 1.0, 2),
        (1.0, 0.0, 2),
        (0.0, 0.0, 3),
    ]


@pytest.mark.parametrize(("policy", "trained_under"), [("keep", 1), ("rescore", 2), ("drop", None)])
async def test_the_preference_policy_decides_about_other_scores(
    new_world: NewWorld, policy: str, trained_under: int | None
) -> None:
    world = new_world(f"trainer.preference_policy={policy}")
    consumer = await consumer_of(world)
    trajectory_id = await world.deliver()
    await world.board.put_preference(PREFERENCE)
    found = await take(consumer)
    if trained_under is None:
        assert found == Refused(trajectory_id, "preference")
    else:
        assert isinstance(found, Taken)
        assert found.trained_under == trained_under


async def test_a_missing_component_sends_a_trajectory_back_twice_at_most(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    trajectory_id = await world.deliver()
    await world.board.put_preference(PreferenceDocument(name="new", weights={"unheard_of": 1.0}))

    for rescores in ("1", "2"):
        assert await take(consumer) == Refused(trajectory_id, "rescore")
        assert await world.streams.unconsumed() == 1
        (back,) = await world.streams.read(StreamName.TRAJECTORIES, "reward", count=1, block_ms=0)
        assert (back.fields["rescores"], "outcome" in back.fields) == (rescores, False)
        outcome = Scored(components={"right": 1.0}, value=1.0, scored_under=1, scoring_started_s=2.0)
        fields = {**back.fields, "outcome": outcome.model_dump_json()}
        assert await world.streams.move(back, "reward", StreamName.SCORED, fields)

    assert await take(consumer) == Refused(trajectory_id, "preference")
    assert await world.streams.unconsumed() == 0


async def test_what_was_judged_under_another_rubric_is_sent_back_and_never_reused(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    kind = PreferenceDocument(name="kind", weights={"humour": 1.0}, rubric="Puns are funny.")
    stern = PreferenceDocument(name="stern", weights={"humour": 0.5}, rubric="Puns are not funny.")
    judged = {"humour": kind.rubric_id}
    outcome = Scored(
        components={"right": 1.0, "humour": 0.75}, value=0.75, scored_under=1, scoring_started_s=1.0, judged=judged
    )
    await world.board.put_preference(stern)
    first = await world.deliver(outcome=outcome)
    assert await take(consumer) == Refused(first, "rescore")
    # Under the same rubric other weights are arithmetic, and so is a preference that reads no judge.
    await world.board.put_preference(kind.model_copy(update={"weights": {"humour": 0.5}}))
    await world.streams.open_consumer(StreamName.TRAJECTORIES, "reward")
    (back,) = await world.streams.read(StreamName.TRAJECTORIES, "reward", count=1, block_ms=0)
    fields = {**back.fields, "outcome": outcome.model_dump_json()}
    assert await world.streams.move(back, "reward", StreamName.SCORED, fields)
    again = await take(consumer)
    assert isinstance(again, Taken)
    assert (again.reward, again.trained_under) == (0.375, 3)
    consumer.begin_update()
    await world.board.put_preference(PREFERENCE.model_copy(update={"rubric": "Puns are not funny."}))
    await world.deliver(outcome=outcome)
    plain = await take(consumer)
    assert isinstance(plain, Taken)
    assert (plain.reward, plain.trained_under) == (1.0, 4)


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"", None])
async def test_a_damaged_payload_is_buried_and_the_next_trains(new_world: NewWorld, payload: bytes | None) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    trajectory_id = await world.deliver(payload=payload or b"")
    if payload is None:
        assert isinstance(world.streams, MemoryStreams)
        world.streams._payloads.pop(trajectory_id)
    await world.deliver()

    refused = await take(consumer)

    assert isinstance(refused, Refused)
    assert refused.reason == ("payload_missing" if payload is None else "payload_damaged")
    (letter,) = await world.streams.dead_letters(count=5)
    assert letter.trajectory_id == trajectory_id
    assert isinstance(await take(consumer), Taken)


@pytest.mark.parametrize("mutation", sorted(MUTATIONS.keys() - {"id_of_another_kind", "negative_ordinal"}))
async def test_nothing_that_violates_an_invariant_reaches_the_weights(new_world: NewWorld, mutation: str) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    limits = Limits("unit", 32, 512, 2**20, 1e-5)
    message, _ = bad(mutation, world.rng, limits)
    await world.deliver(message)
    refused = await take(consumer)
    assert isinstance(refused, Refused)
    assert refused.reason == "payload_damaged"


async def test_routes_come_with_the_tensors_while_they_are_replayed(new_world: NewWorld) -> None:
    world = new_world()
    replaying = await consumer_of(world, ROUTING)
    message = random_trajectory(world.rng, "unit")
    record = routed_experts(world.rng, message, ROUTING)
    await world.deliver(message, routed_experts=record)
    await world.deliver(random_trajectory(world.rng, "unit"))  # made before replay was switched on
    routed, plain = await take(replaying), await take(replaying)
    assert isinstance(routed, Taken)
    assert isinstance(plain, Taken)
    routes_TLK = routed.tensors.routes_TLK
    assert routes_TLK is not None
    assert routes_TLK.shape == (len(routed.tensors.tokens_T) - 1, 2, 2)
    assert routes_TLK.numpy().tobytes() == record
    assert routed.size == message.ByteSize() + len(record)
    assert plain.tensors.routes_TLK is None

    other = new_world()
    await other.deliver(message, routed_experts=record)
    ignored = await take(await consumer_of(other))
    assert isinstance(ignored, Taken)
    assert ignored.tensors.routes_TLK is None


@pytest.mark.parametrize(("record", "reason"), [(b"\0\1", "payload_damaged"), (b"", "payload_missing")])
async def test_routes_that_are_gone_or_damaged_bury_their_trajectory(
    new_world: NewWorld, record: bytes, reason: str
) -> None:
    world = new_world()
    consumer = await consumer_of(world, ROUTING)
    trajectory_id = await world.deliver(routed_experts=b"\0\1")
    if not record:
        assert isinstance(world.streams, MemoryStreams)
        world.streams._routed_experts.clear()
    assert await take(consumer) == Refused(trajectory_id, reason)


async def test_only_a_scored_outcome_trains(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    trajectory_id = await world.deliver(outcome=TimedOut(component="judge", after_s=1.0))
    assert await take(consumer) == Refused(trajectory_id, "not_scored")


async def test_a_rewind_after_an_outage_neither_trains_twice_nor_loses_the_right_to_settle(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    ids = await world.deliver_many(2)
    assert isinstance(await take(consumer), Taken)

    payload = world.streams.payload

    async def unavailable(trajectory_id: str) -> bytes | None:
        raise StreamUnavailableError

    world.streams.payload = unavailable  # type: ignore[method-assign]
    with pytest.raises(StreamUnavailableError):
        await take(consumer)
    world.streams.payload = payload  # type: ignore[method-assign]
    await consumer.open()

    assert await take(consumer) == Refused(ids[0], "in_hand")
    second = await take(consumer)
    assert isinstance(second, Taken)
    assert second.trajectory.id == ids[1]
    assert await consumer.settle(ids) == 2
    assert await world.settled(ids) == ids
    assert CONSUMER == "trainer"


async def test_a_drop_is_named_before_it_goes_and_counted_once_over_an_outage(new_world: NewWorld) -> None:
    world = new_world("trainer.max_lag=2")
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit", version="v00000001")
    await world.deliver(message)
    settle = world.streams.settle

    async def unavailable(deliveries: Sequence[Delivery], consumer: str, *, epoch: int) -> int:
        raise StreamUnavailableError

    world.streams.settle = unavailable  # type: ignore[method-assign]
    with capture_logs() as logs, pytest.raises(StreamUnavailableError):
        await take(consumer)
    assert [(line["trajectory"], line["reason"]) for line in logs if line["event"] == "dropped"] == [
        (message.id, "stale")
    ]
    world.streams.settle = settle  # type: ignore[method-assign]
    await consumer.open()

    assert await take(consumer) == Refused(message.id, "stale")
    assert consumer.dropped == {"stale": 1}
    assert await world.settled([message.id]) == [message.id]


async def test_a_drop_that_could_not_be_settled_is_finished_when_it_comes_again_and_counted_once(
    new_world: NewWorld,
) -> None:
    world = new_world("trainer.max_lag=2")
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit", version="v00000001")
    await world.deliver(message)
    read = world.streams.read

    async def read_and_lose(stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        found = await read(stream, consumer, count=count, block_ms=block_ms)
        lose_the_group(world.streams)
        return found

    world.streams.read = read_and_lose  # type: ignore[method-assign]
    assert await take(consumer) == Refused(message.id, "stale")
    assert await world.settled([message.id]) == []
    world.streams.read = read  # type: ignore[method-assign]

    assert await take(consumer) == Refused(message.id, "stale")
    assert consumer.dropped == {"stale": 1}
    assert await world.settled([message.id]) == [message.id]


async def test_a_burial_is_counted_once_over_an_outage_and_again_when_a_requeued_letter_is_buried(
    new_world: NewWorld,
) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    spoilt = await world.deliver(payload=b"\xff")
    bury = world.streams.bury

    async def unavailable(delivery: Delivery, consumer: str, reason: str) -> bool:
        raise StreamUnavailableError

    world.streams.bury = unavailable  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StreamUnavailableError):
            await take(consumer)
        await consumer.open()
    world.streams.bury = bury  # type: ignore[method-assign]

    assert await take(consumer) == Refused(spoilt, "payload_damaged")
    assert consumer.dropped == {"payload_damaged": 1}

    (letter,) = await world.streams.dead_letters(count=2)
    assert await world.streams.requeue_dead(letter) is RequeueStatus.REQUEUED
    assert await take(consumer) == Refused(spoilt, "payload_damaged")
    assert consumer.dropped == {"payload_damaged": 2}


async def test_a_drop_that_a_crash_interrupted_is_finished_as_it_was_decided_and_counted_once(
    new_world: NewWorld, tmp_path: Path
) -> None:
    world = new_world("trainer.max_lag=2")
    await consumer_of(world)
    message = random_trajectory(world.rng, "unit", version="v00000001")
    await world.deliver(message)
    limits = Limits("unit", 32, 512, 2**20, 1e-5)

    async def life() -> Consumer:
        epoch = await world.board.new_trainer_epoch()
        drops = Drops.of(tmp_path, epoch, {})
        consumer = Consumer(world.streams, world.board, world.config.trainer, limits, epoch=epoch, drops=drops)
        await consumer.open()
        return consumer

    killed = await life()
    mark_consumed = world.streams.mark_consumed

    async def power_failure(trajectory_ids: Sequence[str]) -> None:
        raise PowerFailureError

    world.streams.mark_consumed = power_failure  # type: ignore[method-assign]
    with pytest.raises(PowerFailureError):
        await take(killed)
    world.streams.mark_consumed = mark_consumed  # type: ignore[method-assign]

    # It would be fresh enough now, where the successor has fallen back to.
    successor = await life()
    assert await successor.take(Position("v00000002", 1), block_ms=0) == Refused(message.id, "stale")
    assert successor.dropped == (await life()).dropped == {"stale": 1}
    assert await world.settled([message.id]) == [message.id]
    assert await world.streams.unconsumed() == 0


@pytest.mark.parametrize("spoilt", [False, True])
async def test_what_an_undone_step_trained_on_is_not_offered_again_once_it_was_let_go(
    new_world: NewWorld, *, spoilt: bool
) -> None:
    world = new_world("trainer.max_lag=2")
    await consumer_of(world)
    message = random_trajectory(world.rng, "unit", version="v00000001")
    await world.deliver(message, payload=b"\xff" if spoilt else None)
    limits = Limits("unit", 32, 512, 2**20, 1e-5)
    consumer = Consumer(world.streams, world.board, world.config.trainer, limits, epoch=2, undone={message.id, "other"})
    await consumer.open()

    assert await take(consumer) == Refused(message.id, "payload_damaged" if spoilt else "stale")
    assert consumer.forgone == [message.id]


def lose_the_group(streams: TrajectoryStreams) -> None:
    """As after a fail-over that lost the consumer group: what is on the stream is delivered anew."""
    assert isinstance(streams, MemoryStreams)
    for item in streams._streams[StreamName.SCORED].items.values():
        item.consumer, item.attempt = None, 0


async def test_what_could_not_be_settled_is_not_trained_again(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    ids = await world.deliver_many(2)
    for _ in ids:
        assert isinstance(await take(consumer), Taken)

    lose_the_group(world.streams)
    assert await consumer.settle(ids) == 0
    assert consumer.restored == sorted(ids)  # what the next checkpoint says

    for trajectory_id in ids:
        assert await take(consumer) == Refused(trajectory_id, "already_trained")
    assert await world.settled(ids) == ids
    assert consumer.restored == []


async def test_a_restored_id_stays_known_until_its_entry_is_gone(new_world: NewWorld) -> None:
    world = new_world()
    trajectory_id = await world.deliver()
    await consumer_of(world)
    limits = Limits("unit", 32, 512, 2**20, 1e-5)
    consumer = Consumer(
        world.streams, world.board, world.config.trainer, limits, epoch=2, restored=[trajectory_id], forgone=["x"]
    )
    await consumer.open()
    settle = world.streams.settle

    async def too_late(deliveries: Sequence[Delivery], consumer: str, *, epoch: int) -> int:
        lose_the_group(world.streams)
        return await settle(deliveries, consumer, epoch=epoch)

    world.streams.settle = too_late  # type: ignore[method-assign]
    assert await take(consumer) == Refused(trajectory_id, "already_trained")
    assert consumer.restored == [trajectory_id]
    world.streams.settle = settle  # type: ignore[method-assign]
    assert await take(consumer) == Refused(trajectory_id, "already_trained")
    assert (consumer.restored, consumer.forgone) == ([], ["x"])


@pytest.mark.parametrize("policy", ["rescore", "drop"])
async def test_only_a_trajectory_that_is_taken_pins_the_preference(new_world: NewWorld, policy: str) -> None:
    world = new_world(f"trainer.preference_policy={policy}")
    consumer = await consumer_of(world)
    await world.deliver()
    await world.board.put_preference(PreferenceDocument(name="new", weights={"unheard_of": 1.0}))
    consumer.begin_update()
    assert isinstance(await take(consumer), Refused)
    assert pinned(consumer) is None

    await world.board.put_preference(PREFERENCE)
    await world.deliver(scored_under=3)
    taken = await take(consumer)

    assert isinstance(taken, Taken)
    assert (taken.trained_under, pinned(consumer)) == (3, 3)


def pinned(consumer: Consumer) -> int | None:
    """The version of the update's preference."""
    return consumer.preference.version if consumer.preference is not None else None


async def test_what_was_forgotten_before_it_could_train_is_dropped_once_by_that_name(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit")
    await world.deliver(message)
    await world.streams.erase(message.id, {"task": message.task, "ordinal": str(message.ordinal), "sample": "0"})
    assert await take(consumer) == Refused(message.id, "forgotten")
    assert consumer.slot(Trajectory(message)) in consumer.done
    assert consumer.dropped == {"forgotten": 1}
    assert await take(consumer) is None
    assert await world.streams.unconsumed() == 0


async def test_of_forgotten_damaged_bytes_no_rollout_is_noted_as_done(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit")
    await world.deliver(message)
    await world.streams.erase(message.id, {})
    assert await take(consumer) == Refused(message.id, "forgotten")
    assert (consumer.dropped, list(consumer.done.ranges)) == ({"forgotten": 1}, [])


async def test_what_is_forgotten_in_the_trainers_hands_trains_and_is_settled(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit")
    await world.deliver(message)
    taken = await take(consumer)
    assert isinstance(taken, Taken)
    await world.streams.erase(message.id, {"ordinal": str(message.ordinal)})
    assert await take(consumer) == Refused(message.id, "in_hand")
    consumer.trained([taken])
    assert await consumer.settle([message.id]) == 1
    assert consumer.dropped == {}
    assert await take(consumer) is None


async def test_work_of_the_archive_that_was_forgotten_is_dropped_and_its_mark_not_counted_again(
    new_world: NewWorld,
) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    message = random_trajectory(world.rng, "unit")
    await world.deliver(message)
    await world.streams.erase(message.id, {"ordinal": str(message.ordinal)})
    outcome = Scored(components={"right": 1.0}, value=1.0, scored_under=1, scoring_started_s=1.0)
    consumer.requeue([Archived(Trajectory(message), outcome, forgotten=True)])
    assert await take(consumer) == Refused(message.id, "forgotten")
    assert await take(consumer) == Refused(message.id, "already_done")
    assert consumer.dropped == {"forgotten": 1}
    assert consumer.forgone == [message.id]
