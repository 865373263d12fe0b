"""Preferences outlive the board: kept beside it, given back, counted on."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from sao.board.memory import MemoryBoard
from sao.preference import Preference, PreferenceDocument
from sao.tasks.writing import Writing
from services.reward.preference_folder import Keeper, PreferenceFolder, reconcile
from tests.unit.services.reward.test_preferences import URL, client_of

CUTE, CLASSICAL = (Writing().preferences[name] for name in ("cute", "classical"))


def renamed(number: int) -> PreferenceDocument:
    return CUTE.model_copy(update={"name": f"p{number}"})


async def test_what_the_board_has_is_kept_and_what_it_has_lost_comes_back(tmp_path: Path) -> None:
    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    await reconcile(board, folder)
    assert folder.newest() == 0
    stored = [await board.put_preference(renamed(number)) for number in range(3)]
    await reconcile(board, folder)
    assert folder.read_all() == stored

    emptied = MemoryBoard()
    await reconcile(emptied, folder)
    assert [await emptied.preference(one.version) for one in stored] == stored
    assert await emptied.preference() == stored[-1]


async def test_a_put_is_in_the_folder_before_it_is_answered(tmp_path: Path) -> None:
    board = MemoryBoard()
    async with client_of(board, tmp_path) as client:
        for number in (1, 2):
            answer = await client.put(URL, content=renamed(number).model_dump_json())
            assert PreferenceFolder(tmp_path).read_all()[-1] == Preference.model_validate_json(answer.content)


async def test_a_put_to_a_board_that_was_emptied_counts_on(tmp_path: Path) -> None:
    before = MemoryBoard()
    for number in (1, 2, 3):
        await before.put_preference(renamed(number))
    await reconcile(before, PreferenceFolder(tmp_path))
    async with client_of(MemoryBoard(), tmp_path) as client:
        answer = await client.put(URL, content=CLASSICAL.model_dump_json(), headers={"If-Match": '"3"'})
        assert (answer.status_code, answer.json()["version"]) == (200, 4)
        names = [(await client.get(f"{URL}/{number}")).json()["document"]["name"] for number in (1, 3, 4)]
        assert names == ["p1", "p3", CLASSICAL.name]


async def test_a_put_that_the_store_loses_at_once_is_not_answered_as_stored(tmp_path: Path) -> None:
    class EmptiedBefore(MemoryBoard):
        async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
            self._preferences.clear()
            return await super().put_preference(document, if_version=if_version)

    before = MemoryBoard()
    for number in (1, 2):
        await before.put_preference(renamed(number))
    await reconcile(before, PreferenceFolder(tmp_path))
    board = EmptiedBefore()
    async with client_of(board, tmp_path) as client:
        answer = await client.put(URL, content=CLASSICAL.model_dump_json())
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "lost version 1" in answer.json()["detail"]
    assert await board.preference() == Preference(version=2, document=renamed(2))


async def test_a_folder_that_refuses_stops_nobody_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    board, folder = MemoryBoard(), PreferenceFolder(tmp_path)
    keeper = Keeper(board, folder)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        async with client_of(board, tmp_path) as client:
            assert (await client.put(URL, content=CUTE.model_dump_json())).status_code == httpx.codes.OK
        await keeper.once()
        assert folder.newest() == 0
    await keeper.once()
    assert folder.read_all() == [await board.preference()]


async def test_two_services_that_keep_one_version_at_once_are_both_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = await MemoryBoard().put_preference(renamed(1))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        monkeypatch.undo()
        PreferenceFolder(tmp_path).keep(stored)
        real(descriptor)

    (tmp_path / "preferences").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    PreferenceFolder(tmp_path).keep(stored)
    assert PreferenceFolder(tmp_path).read_all() == [stored]
    assert [path.name for path in (tmp_path / "preferences").iterdir()] == ["00000001.json"]
