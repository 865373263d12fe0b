"""The board contract (sao/board/base.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sao.board.base import (
    Board,
    BoardBehindError,
    EngineFacts,
    EngineState,
    PreferenceConflictError,
    PreferenceLimitError,
    PreferencesHeldError,
    ScheduleFullError,
    TrainerFacts,
    TrainerState,
    UnknownSwitchError,
    VersionRecord,
)
from sao.board.memory import MemoryBoard
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import (
    MAX_FOLLOWED,
    MAX_SCHEDULED,
    ChangeRequest,
    Hold,
    Kept,
    PreferenceChange,
    ScheduledPreference,
)
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


async def asked(board: Board, what: str, **more: Any) -> PreferenceChange:
    """A change that is accepted; `above` and `min_seconds` beside its members."""
    beside = {key: more.pop(key) for key in ("above", "min_seconds") if key in more}
    change = await board.change_preferences(ChangeRequest(what=what, **more), **beside)
    assert change is not None
    return change


async def apply(board: Board, min_seconds: float = 0.0) -> PreferenceChange | None:
    return await board.change_preferences(ChangeRequest(what="apply"), min_seconds=min_seconds)


async def current(board: Board) -> Preference:
    found = await board.preference()
    assert found is not None
    return found


async def test_a_version_says_when_by_whom_why_and_how_it_came_about(board: Board) -> None:
    who = {"author": "Ann", "reason": 'too "cute"\n♥', "client": "10.0.0.1"}
    before_s = time.time()
    await asked(board, "initial", document=document("p1"), if_version=0)
    await asked(board, "put", document=document("p2"), **who)
    change = await asked(board, "rollback", document=document("p1"), restores=1)
    first, second, third = (await board.preferences(limit=9))[::-1]
    assert (first.origin, first.author, first.restores) == ("initial", "", None)
    assert (second.origin, second.author, second.reason, second.client) == ("put", *who.values())
    assert (third.origin, third.restores, third.document) == ("rollback", 1, first.document)
    assert third == change.preference == await board.preference()
    assert before_s - 1 <= first.stored_s <= second.stored_s <= third.stored_s <= time.time() + 1


async def test_history_is_read_backwards_page_by_page(board: Board) -> None:
    for number in range(1, 6):
        await board.put_preference(document(f"p{number}"))
    assert [one.version for one in await board.preferences(limit=2)] == [5, 4]
    assert [one.version for one in await board.preferences(before=4, limit=2)] == [3, 2]
    assert [one.version for one in await board.preferences(before=2, limit=2)] == [1]
    assert await board.preferences(before=1, limit=2) == []
    assert [one.version for one in await board.preferences(before=99, limit=1)] == [5]


async def test_every_change_has_a_record_numbered_without_a_gap(board: Board) -> None:
    assert await board.preference_changes(0) == []
    made = [
        await asked(board, "initial", document=document("p1")),
        await asked(board, "schedule", document=document("p2"), at_s=0.5, author="Ann"),
        await asked(board, "hold", reason="look"),
        await asked(board, "resume"),
        await apply(board),
        await asked(board, "schedule", document=document("p3"), at_update=7),
        await asked(board, "cancel", switch=6, author="Bob"),
    ]
    assert await board.preference_changes(0) == made
    assert await board.preference_changes(5) == made[5:]
    assert [(one.seq, one.what) for one in made if one] == list(
        enumerate(["initial", "schedule", "hold", "resume", "apply", "schedule", "cancel"], start=1)
    )


async def test_records_are_read_past_what_one_call_reads(board: Board) -> None:
    for number in range(130):
        await asked(board, "hold", reason=str(number))
    assert [one.seq for one in await board.preference_changes(1)] == list(range(2, 131))


async def test_a_board_that_lost_records_changes_nothing(board: Board) -> None:
    await board.put_preference(document("p1"))
    for what in ("put", "schedule", "hold", "resume", "apply"):
        with pytest.raises(BoardBehindError, match="has 1 records"):
            await asked(board, what, document=document("p2"), at_s=0.5, above=2)
    assert (await asked(board, "put", document=document("p2"), above=1)).version == 2
    assert len(await board.preference_changes(0)) == 2


async def test_while_held_nothing_changes_but_the_hold_and_what_is_cancelled(board: Board) -> None:
    await board.put_preference(document("p1"))
    waits = await asked(board, "schedule", document=document("p2"), at_s=0.5)
    assert not (await board.preference_hold()).held
    held = await asked(board, "hold", author="Ann", reason="incident 7")
    assert await board.preference_hold() == Hold.of(held)
    for what in ("put", "rollback", "schedule"):
        with pytest.raises(PreferencesHeldError, match="held by Ann: incident 7"):
            await asked(board, what, document=document("p2"), at_s=1.0)
    assert await apply(board) is None
    assert (await current(board)).version == 1
    assert (await asked(board, "cancel", switch=waits.seq)).switch == waits.seq
    await asked(board, "resume")
    assert await board.change_preferences(ChangeRequest(what="resume")) is None
    assert not (await board.preference_hold()).held
    assert (await board.put_preference(document("p3"))).version == 2


async def test_versions_are_as_far_apart_as_asked_for(board: Board) -> None:
    await asked(board, "initial", document=document("p1"), min_seconds=1000.0)
    await asked(board, "put", document=document("p2"), min_seconds=1000.0)
    with pytest.raises(PreferenceLimitError, match="the next change may come in") as refused:
        await asked(board, "rollback", document=document("p1"), min_seconds=1000.0)
    assert 900 < refused.value.wait_s <= 1000
    with pytest.raises(PreferenceConflictError):
        await asked(board, "put", document=document("p3"), min_seconds=1000.0, if_version=1)
    await asked(board, "schedule", document=document("p3"), at_s=0.5)
    assert await apply(board, min_seconds=1000.0) is None
    assert [one.version for one in await board.preferences(limit=9)] == [2, 1]
    assert await apply(board) is not None


async def test_a_switch_takes_effect_once_when_its_time_has_come(board: Board) -> None:
    await board.put_preference(document("p1"))
    later = await asked(board, "schedule", document=document("never"), at_s=time.time() + 1000)
    due = await asked(board, "schedule", document=document("p2"), at_s=time.time() - 0.5, author="Ann")
    assert await board.scheduled_preferences() == [ScheduledPreference.of(one) for one in (later, due)]
    applied = [one for one in await asyncio.gather(*(apply(board) for _ in range(8))) if one is not None]
    assert [(one.what, one.switch, one.version, one.author) for one in applied] == [("apply", due.seq, 2, "Ann")]
    found = await current(board)
    assert (found.version, found.document.name, found.origin) == (2, "p2", "schedule")
    assert [one.id for one in await board.scheduled_preferences()] == [later.seq]


async def test_a_switch_at_an_update_waits_for_the_trainer(board: Board) -> None:
    await board.put_preference(document("p1"))
    await asked(board, "schedule", document=document("p2"), at_update=3)
    assert await apply(board) is None
    epoch = await board.new_trainer_epoch()
    for update, applied in ((2, None), (3, 2), (4, None)):
        await board.write_trainer(facts(epoch, update))
        change = await apply(board)
        assert (change.version if change else None) == applied


async def test_switches_that_are_due_together_end_with_the_one_that_was_meant_last(board: Board) -> None:
    await board.write_trainer(facts(await board.new_trainer_epoch(), 5))
    whens: list[dict[str, Any]] = [{"at_s": 20.5}, {"at_s": 3.0}, {"at_update": 5}, {"at_update": 1}, {"at_s": 3.0}]
    ids = [(await asked(board, "schedule", document=document("p"), **when)).seq for when in whens]
    order = [change.switch async for change in until_nothing_is_due(board)]
    assert order == [ids[number] for number in (3, 2, 1, 4, 0)]


async def until_nothing_is_due(board: Board) -> AsyncIterator[PreferenceChange]:
    while (change := await apply(board)) is not None:
        yield change


async def test_a_switch_whose_version_is_gone_is_refused_and_forgotten(board: Board) -> None:
    await board.put_preference(document("p1"))
    with pytest.raises(PreferenceConflictError):
        await asked(board, "schedule", document=document("p2"), at_s=0.5, if_version=9)
    switch = await asked(board, "schedule", document=document("p2"), at_s=0.5, if_version=1)
    await board.put_preference(document("between"))
    refused = await apply(board)
    assert refused is not None
    assert (refused.what, refused.switch, refused.version) == ("refuse", switch.seq, None)
    assert refused.detail == "version 2 is current, it was to follow version 1"
    assert (await current(board)).version == 2
    assert await board.scheduled_preferences() == []
    assert await apply(board) is None


async def test_only_so_many_switches_wait_and_only_those_are_cancelled(board: Board) -> None:
    for _ in range(MAX_SCHEDULED):
        first = await asked(board, "schedule", document=document("p"), at_update=9)
    with pytest.raises(ScheduleFullError, match=f"{MAX_SCHEDULED} switches wait"):
        await asked(board, "schedule", document=document("p"), at_update=9)
    await asked(board, "cancel", switch=first.seq)
    with pytest.raises(UnknownSwitchError, match=f"no switch {first.seq} waits"):
        await asked(board, "cancel", switch=first.seq)
    assert len(await board.scheduled_preferences()) == MAX_SCHEDULED - 1


async def test_what_a_board_lost_comes_back_from_the_records(board: Board) -> None:
    before = MemoryBoard()
    for change in (
        ChangeRequest(what="initial", document=document("p1")),
        ChangeRequest(what="put", document=document("p2"), author="Ann"),
        ChangeRequest(what="schedule", document=document("gone"), at_s=0.5),
        ChangeRequest(what="cancel", switch=3),
        ChangeRequest(what="schedule", document=document("p3"), at_s=0.5, reason="because"),
        ChangeRequest(what="hold", author="Bob"),
    ):
        await before.change_preferences(change)
    kept = Kept.of(await before.preference_changes(0))
    assert await board.restore_preferences(kept)
    assert await board.preference_changes(0) == kept.changes
    assert await board.preferences(limit=9) == await before.preferences(limit=9)
    assert await board.preference() == await before.preference()
    assert await board.scheduled_preferences() == await before.scheduled_preferences()
    assert await board.preference_hold() == Hold.of(kept.hold)
    assert not await board.restore_preferences(kept)

    await asked(board, "resume", above=6)
    with pytest.raises(PreferenceLimitError):
        await asked(board, "put", document=document("early"), min_seconds=1000.0)
    applied = await apply(board)
    assert applied is not None
    assert (applied.seq, applied.version, applied.reason) == (8, 3, "because")
    assert await apply(board) is None


async def test_versions_from_before_there_were_records_come_back_too(board: Board) -> None:
    older = [Preference(version=number, document=document(f"p{number}")) for number in (1, 2, 3)]
    assert await board.restore_preferences(Kept.of([], older=older))
    assert await board.preferences(limit=9) == older[::-1]
    assert (await board.put_preference(document("next"), if_version=3)).version == 4
    assert not await board.restore_preferences(Kept.of([], older=older))
    assert (await current(board)).version == 4


async def test_a_page_of_versions_is_full_across_a_gap(board: Board) -> None:
    older = [Preference(version=number, document=document(f"p{number}")) for number in (1, 2, 9, 10)]
    assert await board.restore_preferences(Kept.of([], older=older))
    assert [one.version for one in await board.preferences(limit=3)] == [10, 9, 2]
    assert [one.version for one in await board.preferences(before=9, limit=1)] == [2]
    assert [one.version for one in await board.preferences(before=2, limit=9)] == [1]
    assert await board.preferences(before=1, limit=9) == []


async def test_a_change_comes_with_the_records_that_its_asker_lacks(board: Board) -> None:
    made = [await asked(board, "put", document=document(f"p{number}")) for number in range(3)]
    put = ChangeRequest(what="put", document=document("next"))
    made += await board.change_and_follow(put, above=3)
    assert await board.change_and_follow(put, above=1) == [*made[1:], *(await board.preference_changes(4))]
    assert await board.change_and_follow(ChangeRequest(what="apply"), above=0) == []
    with pytest.raises(BoardBehindError):
        await board.change_and_follow(put, above=6)
    for _ in range(MAX_FOLLOWED - 5):
        await asked(board, "put", document=document("many"))
    assert [one.seq for one in await board.change_and_follow(put, above=0)] == list(range(1, MAX_FOLLOWED + 2))
    assert [one.seq for one in await board.change_and_follow(put, above=0)] == [MAX_FOLLOWED + 2]


async def test_a_board_with_an_older_file_is_brought_up_to_the_records(board: Board) -> None:
    before = MemoryBoard()
    for number in (1, 2, 3):
        await before.put_preference(document(f"p{number}"))
    await asked(board, "put", document=document("p1"))
    await asked(board, "schedule", document=document("applied since"), at_s=0.5)
    assert await board.restore_preferences(Kept.of(await before.preference_changes(0)))
    assert (await current(board)) == await before.preference()
    assert await board.scheduled_preferences() == []
