"""The board contract (sao/board/base.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import asyncio

import pytest

from sao.board.base import (
    Board,
    EngineFacts,
    EngineState,
    PreferenceConflictError,
    TrainerFacts,
    TrainerState,
    VersionRecord,
)
from sao.preference import Preference, PreferenceDocument
from sao.streams.base import FencedError
from tests.support.stores import Stores


@pytest.fixture
def board(stores: Stores) -> Board:
    return stores.board


def facts(epoch: int, update: int = 0) -> TrainerFacts:
    return TrainerFacts(epoch=epoch, update=update, version="v00000001", consumed=3, state=TrainerState.TRAINING)


def document(name: str) -> PreferenceDocument:
    return PreferenceDocument(name=name, weights={"quality": 1.0}, gates=["valid"], thresholds={"quality": 0.25})


async def test_a_fresh_board_is_empty(board: Board) -> None:
    assert await board.trainer() is None
    assert await board.versions() == {}
    assert await board.engines() == {}
    assert await board.preference() is None
    assert await board.preference(1) is None


async def test_epochs_rise_also_when_claimed_at_once(board: Board) -> None:
    before = await board.epoch()
    claimed = sorted(await asyncio.gather(*(board.new_trainer_epoch() for _ in range(5))))
    assert claimed == list(range(before + 1, before + 6))
    assert await board.epoch() == claimed[-1]


async def test_an_epoch_is_claimed_only_from_a_store_that_is_as_it_was_found(board: Board) -> None:
    found = await board.new_trainer_epoch()
    await board.announce_version(VersionRecord(name="v00000001", update=0, parent=None, epoch=found))
    assert await board.new_trainer_epoch(found=found - 1, version="v00000001") == 0
    assert await board.new_trainer_epoch(found=found, version="v00000002") == 0
    assert await board.epoch() == found
    assert await board.new_trainer_epoch(above=found + 5, found=found, version="v00000001") == found + 6
    assert await board.new_trainer_epoch(above=1) == found + 7


async def test_trainer_facts_come_back_as_written(board: Board) -> None:
    epoch = await board.new_trainer_epoch()
    for update in (1, 2):
        await board.write_trainer(facts(epoch, update))
        assert await board.trainer() == facts(epoch, update)


async def test_a_fenced_trainer_writes_nothing(board: Board) -> None:
    old, new = await board.new_trainer_epoch(), await board.new_trainer_epoch()
    await board.write_trainer(facts(new, 7))
    record = VersionRecord(name="v00000009", update=9, parent=None, epoch=old)

    with pytest.raises(FencedError, match=f"epoch {old} is fenced: epoch {new}"):
        await board.write_trainer(facts(old, 8))
    with pytest.raises(FencedError, match=f"epoch {old} is fenced: epoch {new}"):
        await board.announce_version(record)

    assert await board.trainer() == facts(new, 7)
    assert await board.versions() == {}


async def test_a_version_is_announced_once(board: Board) -> None:
    epoch = await board.new_trainer_epoch()
    first = VersionRecord(name="v00000001", update=0, parent=None, epoch=epoch)
    second = VersionRecord(name="v00000002", update=1, parent="v00000001", epoch=epoch)
    for record in (first, second, first):
        await board.announce_version(record)

    with pytest.raises(ValueError, match=r"version v00000001 is announced as .*refused"):
        await board.announce_version(first.model_copy(update={"update": 5}))

    assert await board.versions() == {"v00000001": first, "v00000002": second}


async def test_engine_facts_are_kept_by_engine(board: Board) -> None:
    serving = EngineFacts(
        engine_id="engine-0", url="http://a", state=EngineState.SERVING, version="v1", verified=["v1"], since_s=1.5
    )
    loading = EngineFacts(engine_id="engine-1", url="http://b", state=EngineState.LOADING, version="v2", since_s=2.0)
    for engine in (loading, serving.model_copy(update={"state": EngineState.STARTING}), serving):
        await board.write_engine(engine)
    assert await board.engines() == {"engine-0": serving, "engine-1": loading}


async def test_an_engine_that_left_is_forgotten(board: Board) -> None:
    stays, leaves = (
        EngineFacts(engine_id=name, url="http://a", state=EngineState.SERVING, version="v1", since_s=1.5)
        for name in ("engine-0", "engine-10-0-0-5")
    )
    for engine in (stays, leaves):
        await board.write_engine(engine)
    for name in (leaves.engine_id, "nobody"):
        await board.remove_engine(name)
    assert await board.engines() == {"engine-0": stays}


def engine(epoch: int, version: str = "v1") -> EngineFacts:
    return EngineFacts(
        engine_id="engine-0", url="http://a", state=EngineState.SERVING, version=version, since_s=1.5, epoch=epoch
    )


async def test_a_weights_service_that_starts_later_fences_the_earlier_one(board: Board) -> None:
    old = await board.new_weights_epoch("host-a, process 1")
    await board.write_engine(engine(old))
    new = await board.new_weights_epoch("host-b, process 2")
    assert new > old
    refused = (
        board.write_engine(engine(old, "v2")),
        board.remove_engine("engine-0", epoch=old),
        board.hold_weights_epoch(old, "host-a, process 1"),
    )
    for call in refused:
        with pytest.raises(FencedError, match=rf"epoch {old} is fenced: epoch {new} \(host-b, process 2\)"):
            await call
    assert await board.engines() == {"engine-0": engine(old)}
    await board.hold_weights_epoch(new, "host-b, process 2")
    await board.write_engine(engine(new, "v2"))
    assert await board.engines() == {"engine-0": engine(new, "v2")}
    await board.remove_engine("engine-0", epoch=new)
    assert await board.engines() == {}


async def test_a_board_that_forgot_who_keeps_the_engines_is_told_again(board: Board) -> None:
    """As after the loss of the store's file: the one that still serves says so, and fences as before."""
    await board.hold_weights_epoch(7, "host-b, process 2")
    with pytest.raises(FencedError, match=r"epoch 6 is fenced: epoch 7 \(host-b"):
        await board.hold_weights_epoch(6, "host-a, process 1")
    assert await board.new_weights_epoch("host-c, process 3", above=41) == 42


async def test_preferences_count_from_one_and_stay_readable(board: Board) -> None:
    for version, name in enumerate(("cute", "classical"), start=1):
        stored = await board.put_preference(document(name))
        assert (stored.version, stored.document) == (version, document(name))
        assert await board.preference() == stored
    old = await board.preference(1)
    assert old is not None
    assert old.document == document("cute")
    assert [await board.preference(number) for number in (0, 3)] == [None, None]


async def test_a_preference_is_replaced_only_at_the_version_its_writer_had_read(board: Board) -> None:
    await board.put_preference(document("first"), if_version=0)
    with pytest.raises(PreferenceConflictError, match="at version 1, expected 0"):
        await board.put_preference(document("second"), if_version=0)
    await board.put_preference(document("third"), if_version=1)
    current = await board.preference()
    assert current is not None
    assert (current.version, current.document.name) == (2, "third")


async def test_of_concurrent_conditional_writers_one_wins(board: Board) -> None:
    writes = (board.put_preference(document(f"p{i}"), if_version=0) for i in range(8))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert sum(isinstance(result, PreferenceConflictError) for result in results) == 7
    current = await board.preference()
    assert current is not None
    assert current.version == 1


async def test_lost_preferences_come_back_under_their_numbers(board: Board) -> None:
    kept = [Preference(version=number, document=document(f"p{number}")) for number in (1, 2, 3)]
    assert await board.restore_preferences(kept)
    assert [await board.preference(one.version) for one in kept] == kept
    assert await board.preference() == kept[-1]
    assert (await board.put_preference(document("next"), if_version=3)).version == 4


async def test_a_board_that_is_not_behind_keeps_its_preferences(board: Board) -> None:
    stored = [await board.put_preference(document(name)) for name in ("first", "second")]
    older = [Preference(version=number, document=document(f"p{number}")) for number in (1, 2)]
    assert not await board.restore_preferences(older)
    assert [await board.preference(one.version) for one in stored] == stored

    newer = Preference(version=5, document=document("newer"))
    assert await board.restore_preferences([newer])
    assert await board.preference() == newer
