"""Changes of the preferences outlive the board: each has its line, is given back, counted on."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sao.board.memory import MemoryBoard
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import ChangeRequest, Kept, PreferenceChange
from sao.tasks.writing import Writing
from services.reward.preferences import folder as preference_folder
from services.reward.preferences.folder import Keeper, PreferenceFolder
from tests.unit.services.reward.preferences.test_routes import URL, client_of

CUTE, CLASSICAL = (Writing().preferences[name] for name in ("cute", "classical"))


def renamed(number: int) -> PreferenceDocument:
    return CUTE.model_copy(update={"name": f"p{number}"})


async def reconcile(board: MemoryBoard, folder: PreferenceFolder) -> None:
    """What each reward service does at its start, and twice a second."""
    await Keeper(board, folder).once()


async def put(board: MemoryBoard, *numbers: int) -> list[Preference]:
    return [await board.put_preference(renamed(number)) for number in numbers]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The audit log as a person reads it."""
    return [json.loads(line) for line in (run_dir / "preferences" / "audit.jsonl").read_text().splitlines()]


async def test_what_the_board_has_is_kept_and_what_it_has_lost_comes_back(tmp_path: Path) -> None:
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    await reconcile(board, folder)
    assert folder.newest() == 0
    stored = await put(board, 1, 2, 3)
    await reconcile(board, folder)
    assert list(folder.read_all().versions.values()) == stored

    emptied = MemoryBoard()
    await reconcile(emptied, PreferenceFolder(tmp_path))
    assert [await emptied.preference(one.version) for one in stored] == stored
    assert await emptied.preference() == stored[-1]


async def test_a_hold_and_what_is_scheduled_come_back_and_what_took_effect_does_not(tmp_path: Path) -> None:
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    keeper = Keeper(board, folder)
    await put(board, 1)
    for asked in (
        ChangeRequest(what="schedule", document=renamed(2), at_s=1.0),
        ChangeRequest(what="schedule", document=renamed(3), at_update=9),
        ChangeRequest(what="apply"),
        ChangeRequest(what="hold", author="Ann"),
    ):
        await keeper.change(asked)
    emptied = MemoryBoard()
    await reconcile(emptied, PreferenceFolder(tmp_path))
    assert [one.id for one in await emptied.scheduled_preferences()] == [3]
    assert (await emptied.preference_hold()).author == "Ann"
    assert [one.document.name for one in await emptied.preferences(limit=9)] == ["p2", "p1"]


async def test_a_put_has_its_line_before_it_is_answered(tmp_path: Path) -> None:
    async with client_of(MemoryBoard(), tmp_path) as client:
        for number in (1, 2):
            who = {"author": "Ann", "reason": f"try {number}"}
            answer = await client.put(URL, content=renamed(number).model_dump_json(), params=who)
            assert list(PreferenceFolder(tmp_path).read_all().versions.values())[-1] == Preference.model_validate_json(
                answer.content
            )
            line = lines(tmp_path)[-1]
            assert [line[key] for key in ("seq", "what", "version", "author", "reason", "client")] == [
                *(number, "put", number, "Ann", f"try {number}", "127.0.0.1")
            ]
            assert list(line)[:3] == ["seq", "when_s", "what"]


async def test_what_was_accepted_by_a_process_that_died_before_its_line_gets_it_from_another(tmp_path: Path) -> None:
    board = MemoryBoard()
    other = PreferenceFolder(tmp_path)
    await put(board, 1)
    await reconcile(board, other)
    await put(board, 2)  # killed here
    await board.change_preferences(ChangeRequest(what="hold", author="Ann"))  # and here
    await reconcile(board, other)
    assert [(line["seq"], line["what"]) for line in lines(tmp_path)] == [(1, "put"), (2, "put"), (3, "hold")]


async def test_replicas_write_each_line_once(tmp_path: Path) -> None:
    board = MemoryBoard()
    keepers = [Keeper(board, PreferenceFolder(tmp_path)) for _ in range(3)]
    asked = [ChangeRequest(what="put", document=renamed(number)) for number in range(30)]
    await asyncio.gather(*(keepers[number % 3].change(one) for number, one in enumerate(asked)))
    assert [line["seq"] for line in lines(tmp_path)] == list(range(1, 31))
    assert [line["version"] for line in lines(tmp_path)] == list(range(1, 31))


async def test_many_changes_at_once_are_made_durable_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = MemoryBoard()
    keeper, syncs, real = Keeper(board, PreferenceFolder(tmp_path)), 0, os.fsync
    reads, read = 0, board.preference_changes

    async def preference_changes(after: int) -> list[PreferenceChange]:
        nonlocal reads
        reads += 1
        return await read(after)

    def fsync(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        real(descriptor)

    await keeper.change(ChangeRequest(what="put", document=renamed(0)))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(board, "preference_changes", preference_changes)
    await asyncio.gather(*(keeper.change(ChangeRequest(what="put", document=renamed(n))) for n in range(1, 21)))
    assert len(lines(tmp_path)) == 21
    assert 1 <= syncs <= 5
    assert reads == 0, "what a change comes with needs no second look at the board"


async def test_a_put_to_a_board_that_was_emptied_counts_on(tmp_path: Path) -> None:
    before = MemoryBoard()
    await put(before, 1, 2, 3)
    await reconcile(before, PreferenceFolder(tmp_path))
    async with client_of(MemoryBoard(), tmp_path) as client:
        answer = await client.put(URL, content=CLASSICAL.model_dump_json(), headers={"If-Match": '"3"'})
        assert (answer.status_code, answer.json()["version"]) == (200, 4)
        names = [(await client.get(f"{URL}/{number}")).json()["document"]["name"] for number in (1, 3, 4)]
        assert names == ["p1", "p3", CLASSICAL.name]


async def test_a_put_that_the_store_loses_at_once_is_kept_and_given_back(tmp_path: Path) -> None:
    class EmptiedAfter(MemoryBoard):
        async def change_preferences(self, *args: Any, **keywords: Any) -> PreferenceChange | None:
            change = await super().change_preferences(*args, **keywords)
            self._kept = Kept()
            return change

    board = EmptiedAfter()
    before = MemoryBoard()
    stored = await put(before, 1, 2)
    await reconcile(before, PreferenceFolder(tmp_path))
    await reconcile(board, PreferenceFolder(tmp_path))
    async with client_of(board, tmp_path) as client:
        answer = await client.put(URL, content=CLASSICAL.model_dump_json())
    assert answer.status_code == httpx.codes.OK
    assert await board.preference() is None
    await reconcile(board, PreferenceFolder(tmp_path))
    assert await board.preferences(limit=9) == [Preference.model_validate_json(answer.content), *reversed(stored)]


async def test_a_number_that_another_change_has_taken_since_is_not_answered_as_stored(tmp_path: Path) -> None:
    mine, other = MemoryBoard(), MemoryBoard()
    keeper = Keeper(mine, PreferenceFolder(tmp_path))
    real = mine.change_preferences

    async def overtaken(*args: Any, **keywords: Any) -> PreferenceChange | None:
        change = await real(*args, **keywords)
        await put(other, 7)
        await reconcile(other, PreferenceFolder(tmp_path))
        return change

    mine.change_preferences = overtaken  # type: ignore[method-assign]
    with pytest.raises(preference_folder.LostChangeError, match="lost change 1"):
        await keeper.change(ChangeRequest(what="put", document=renamed(1)))
    assert [line["document"]["name"] for line in lines(tmp_path)] == ["p7"]


async def test_a_folder_that_refuses_stops_nobody_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    keeper = Keeper(board, folder)
    with monkeypatch.context() as disk:
        disk.setattr(preference_folder, "_write", full)
        async with client_of(board, tmp_path) as client:
            assert (await client.put(URL, content=CUTE.model_dump_json())).status_code == httpx.codes.OK
        await keeper.once()
        assert folder.newest() == 0
    await keeper.once()
    assert list(folder.read_all().versions.values()) == [await board.preference()]


async def test_changes_that_wait_for_a_folder_that_refuses_share_its_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def full(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    board = MemoryBoard()
    keeper = Keeper(board, PreferenceFolder(tmp_path))
    await keeper.change(ChangeRequest(what="put", document=renamed(0)))
    with monkeypatch.context() as disk:
        disk.setattr(preference_folder, "_write", full)
        await asyncio.gather(*(keeper.change(ChangeRequest(what="put", document=renamed(n))) for n in range(1, 21)))
    assert 1 <= tries <= 4, "twenty changes wait for as many deadlines of the disk"
    await keeper.change(ChangeRequest(what="put", document=renamed(21)))
    assert [line["version"] for line in lines(tmp_path)] == list(range(1, 23))


async def test_a_change_is_kept_while_dry_runs_take_every_thread_of_asyncio(tmp_path: Path) -> None:
    release, taken = threading.Event(), asyncio.get_running_loop()
    taken.set_default_executor(ThreadPoolExecutor(1))
    blocked = taken.run_in_executor(None, release.wait, 20)
    try:
        keeper = Keeper(MemoryBoard(), PreferenceFolder(tmp_path))
        change = keeper.change(ChangeRequest(what="put", document=renamed(1)))
        assert await asyncio.wait_for(change, 10) is not None
    finally:
        release.set()
        await blocked
    assert len(lines(tmp_path)) == 1


async def test_a_line_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    await put(board, 1, 2)
    await reconcile(board, folder)
    file = tmp_path / "preferences" / "audit.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    await reconcile(board, PreferenceFolder(tmp_path))
    assert file.read_bytes() == whole
    await put(board, 3)
    file.write_bytes(whole + b'{"seq":3,"wh')
    await reconcile(board, folder)
    assert [line["seq"] for line in lines(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("left", [None, 0, 1])
async def test_a_log_that_was_removed_or_cut_is_written_anew(tmp_path: Path, left: int | None) -> None:
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    await put(board, 1, 2)
    await reconcile(board, folder)
    file = tmp_path / "preferences" / "audit.jsonl"
    if left is None:
        file.unlink()
    else:
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:left]))
    await reconcile(board, folder)
    assert [line["seq"] for line in lines(tmp_path)] == [1, 2]


async def test_a_damaged_line_is_left_out_and_the_others_come_back(tmp_path: Path) -> None:
    before = MemoryBoard()
    stored = await put(before, 1, 2, 3)
    await reconcile(before, PreferenceFolder(tmp_path))
    file = tmp_path / "preferences" / "audit.jsonl"
    first, _, third = file.read_text().splitlines()
    file.write_text(f"{first}\ntorn\n{third}\n")

    emptied = MemoryBoard()
    await reconcile(emptied, PreferenceFolder(tmp_path))
    assert [await emptied.preference(number) for number in (1, 2, 3)] == [stored[0], None, stored[2]]
    assert (await emptied.put_preference(renamed(4))).version == 4

    file.write_text("torn\n")
    await reconcile(MemoryBoard(), PreferenceFolder(tmp_path))


async def test_versions_that_an_earlier_release_kept_a_file_each_come_back(tmp_path: Path) -> None:
    (tmp_path / "preferences").mkdir()
    older = {n: json.dumps({"version": n, "document": CUTE.model_dump(mode="json")}) for n in (1, 3)}
    for number, text in {**older, 2: "torn"}.items():
        (tmp_path / "preferences" / f"{number:08d}.json").write_text(text)
    board = MemoryBoard()
    async with client_of(board, tmp_path) as client:
        await reconcile(board, PreferenceFolder(tmp_path))
        assert (await client.get(URL)).json()["version"] == 3
        assert (await client.put(URL, content=CLASSICAL.model_dump_json())).json()["version"] == 4
    emptied = MemoryBoard()
    await reconcile(emptied, PreferenceFolder(tmp_path))
    assert [one.version for one in await emptied.preferences(limit=9)] == [4, 3, 1]


async def test_a_lock_that_is_never_given_back_counts_as_a_folder_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preference_folder, "LOCK_WITHIN_S", 0.01)
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    await put(board, 1)
    await reconcile(board, folder)
    await put(board, 2)
    with (tmp_path / "preferences" / "audit.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="held the lock"):
            folder.keep(await board.preference_changes(1))
        await reconcile(board, folder)
    assert len(lines(tmp_path)) == 1


async def test_due_switches_take_effect_one_after_the_other_on_one_of_the_replicas(tmp_path: Path) -> None:
    board = MemoryBoard()
    keepers: Sequence[Keeper] = [Keeper(board, PreferenceFolder(tmp_path)) for _ in range(2)]
    await put(board, 1)
    for number, if_version in ((2, None), (3, 1), (4, None)):
        asked = ChangeRequest(what="schedule", document=renamed(number), at_s=float(number), if_version=if_version)
        await keepers[0].change(asked)
    await asyncio.gather(*(keeper.apply() for keeper in keepers))
    assert [one.document.name for one in await board.preferences(limit=9)] == ["p4", "p2", "p1"]
    told = [(line["what"], line.get("switch")) for line in lines(tmp_path)[4:]]
    assert told == [("apply", 2), ("refuse", 3), ("apply", 4)]
