"""The spool: whole files or none, one process at a time, and a disk that may refuse."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from sao.config import load_run_config
from sao.v1.ingest_pb2 import PublishRequest
from services.rollout import metrics
from services.rollout.app import make_spool
from services.rollout.folder import TrajectoryFolder
from services.rollout.spool import Spool, SpoolInUseError
from tests.support.rollout_worker import open_spool
from tests.support.trajectories import good

REQUESTS = [PublishRequest(trajectory=good(random.Random(n)), routed_experts=bytes([n])) for n in range(3)]
FIRST, SECOND, THIRD = (request.trajectory.id for request in REQUESTS)


def errors(operation: str, error: str) -> float:
    value: float = metrics.SPOOL_ERRORS.labels(operation, error)._value.get()
    return value


def test_alerts_are_told_how_much_a_spool_may_hold(tmp_path: Path) -> None:
    make_spool(load_run_config(None, [f'run.dir="{tmp_path}"', "rollout.spool_mb=3"], env={}))
    assert REGISTRY.get_sample_value("sao_rollout_spool_limit_bytes") == 3 * 2**20
    assert (REGISTRY.get_sample_value("sao_process_disk_used_ratio", {"folder": "spool"}) or 0) > 0


async def test_the_next_process_finds_what_was_put_and_not_removed(tmp_path: Path) -> None:
    spool = await open_spool(tmp_path)
    for request in REQUESTS:
        assert await spool.put(request)
        assert await spool.put(request), "a repeat changes nothing"
    await spool.remove(SECOND)
    await spool.remove(SECOND)
    spool.close()

    spool = await open_spool(tmp_path)
    assert spool.ids() == sorted([FIRST, THIRD])
    assert await spool.get(THIRD) == REQUESTS[2]


async def test_a_second_process_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = await open_spool(tmp_path)
    with pytest.raises(SpoolInUseError, match=r"spool is in use by another process.*rollout\.worker_id"):
        await open_spool(tmp_path)
    await first.open()
    first.close()
    await open_spool(tmp_path)


async def test_a_write_that_a_crash_cut_short_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await open_spool(tmp_path)
    folder = tmp_path / "spool"

    class PowerFailureError(Exception):
        """Nothing after this happens, no clean-up either."""

    def cut(descriptor: int) -> None:
        os.ftruncate(descriptor, 20)
        raise PowerFailureError

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(PowerFailureError):
        await spool.put(REQUESTS[0])
    monkeypatch.undo()
    spool.close()

    spool = await open_spool(tmp_path)
    assert spool.ids() == []
    assert (folder / f"{FIRST}.torn").stat().st_size == 20
    assert await spool.put(REQUESTS[0]), "another attempt may bring the same id"
    assert await spool.get(FIRST) == REQUESTS[0]


@pytest.mark.parametrize("length", [0, 1, 40, -1])
async def test_a_file_that_the_disk_damaged_is_set_aside(tmp_path: Path, length: int) -> None:
    spool = await open_spool(tmp_path)
    await spool.put(REQUESTS[0])
    file = tmp_path / "spool" / f"{FIRST}.pb"
    file.write_bytes(file.read_bytes()[:length])
    assert await spool.get(FIRST) is None
    assert spool.ids() == []
    assert file.with_suffix(".torn").exists()


async def test_a_file_under_another_ones_name_is_set_aside(tmp_path: Path) -> None:
    TrajectoryFolder(tmp_path / "spool").put(REQUESTS[0]).rename(tmp_path / "spool" / f"{SECOND}.pb")
    spool = await open_spool(tmp_path)
    assert await spool.get(SECOND) is None
    assert spool.ids() == []


async def test_a_full_disk_is_counted_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await open_spool(tmp_path)
    before = errors("write", "ENOSPC")

    def refuse(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert not await spool.put(REQUESTS[0])
    assert errors("write", "ENOSPC") == before + 1
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


async def test_a_folder_that_cannot_be_had_is_counted_and_taken_later_with_what_is_in_it(tmp_path: Path) -> None:
    TrajectoryFolder(tmp_path / "elsewhere").put(REQUESTS[0])
    (tmp_path / "spool").touch()
    before = errors("open", "EEXIST")
    spool = await open_spool(tmp_path)
    assert not await spool.put(REQUESTS[1])
    assert errors("open", "EEXIST") == before + 1

    (tmp_path / "spool").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "spool")
    await spool.open()
    assert spool.ids() == [FIRST]
    assert await spool.put(REQUESTS[1])


async def test_it_is_full_at_its_bound_and_no_longer_when_something_went(tmp_path: Path) -> None:
    size = REQUESTS[0].ByteSize()
    spool = await open_spool(tmp_path, max_bytes=size)
    full = [spool.full]
    await spool.put(REQUESTS[0])
    full.append(spool.full)
    spool.close()
    spool = await open_spool(tmp_path, max_bytes=size)
    full.append(spool.full)
    await spool.remove(FIRST)
    full.append(spool.full)
    assert full == [False, True, True, False], "what an earlier process left counts too"


class SlowDisk:
    """An fsync that waits to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.waiting = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, _descriptor: int) -> None:
        self._loop.call_soon_threadsafe(self.waiting.set)
        assert self.let_go.wait(10), "nobody could let the disk go: the event loop stood still"


async def test_a_slow_disk_does_not_stop_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await open_spool(tmp_path)
    disk = SlowDisk(monkeypatch)
    put = asyncio.create_task(spool.put(REQUESTS[0]))
    await disk.waiting.wait()
    assert not put.done()
    disk.let_go.set()
    assert await put


async def test_a_write_that_has_begun_is_finished_for_a_caller_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await open_spool(tmp_path)
    disk = SlowDisk(monkeypatch)
    put = asyncio.create_task(spool.put(REQUESTS[0]))
    await disk.waiting.wait()
    put.cancel()
    await asyncio.sleep(0)
    assert not put.done()
    disk.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert TrajectoryFolder(tmp_path / "spool").get(FIRST) == REQUESTS[0]


async def test_the_dead_folder_gets_the_trajectory_and_the_reason(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", dead=TrajectoryFolder(tmp_path / "dead"), max_bytes=1)
    await spool.open()
    await spool.put(REQUESTS[0])
    await spool.bury(REQUESTS[0], "INVALID_ARGUMENT: no")
    assert spool.ids() == TrajectoryFolder(tmp_path / "spool").ids() == []
    assert TrajectoryFolder(tmp_path / "dead").get(FIRST) == REQUESTS[0]
    assert (tmp_path / "dead" / f"{FIRST}.txt").read_text() == "INVALID_ARGUMENT: no\n"


async def test_a_file_that_somebody_erased_is_let_go_without_a_complaint(tmp_path: Path) -> None:
    spool, before = await open_spool(tmp_path), errors("read", "ENOENT")
    await spool.put(REQUESTS[0])
    TrajectoryFolder(tmp_path / "spool").remove(FIRST)
    assert await spool.get(FIRST) is None
    assert spool.ids() == []
    assert errors("read", "ENOENT") == before
