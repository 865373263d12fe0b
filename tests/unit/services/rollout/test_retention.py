from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.config import load_run_config
from sao.ids import uuid7, uuid7_unix_ms
from sao.v1 import ingest_pb2 as pb
from services.rollout import app, metrics
from services.rollout.folder import TrajectoryFolder
from services.rollout.retention import erase_files
from tests.support.trajectories import good

ENDINGS = (".pb", ".txt", ".torn")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    ages=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ENDINGS), st.booleans()), max_size=8),
    before=st.integers(0, 10),
)
def test_files_of_trajectories_that_are_over_their_time_go_and_no_others(
    tmp_path: Path, ages: list[tuple[int, str, bool]], before: int
) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    made = [f"{'.' if torn else ''}{uuid7(began)}{ending}{'.tmp' if torn else ''}" for began, ending, torn in ages]
    for name in (*made, "lock", "notes of mine.pb"):
        (tmp_path / name).write_text("what was written")

    done = erase_files(tmp_path, "*", before)

    stay = {name for name, (began, _, _) in zip(made, ages, strict=True) if began >= before}
    assert {path.name for path in tmp_path.iterdir()} == stay | {"lock", "notes of mine.pb"}
    assert (done.erased, done.problem) == (len(made) - len(stay), "")
    assert erase_files(tmp_path, "*", before).erased == 0


def test_a_folder_that_is_not_there_holds_nothing_and_one_that_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert erase_files(tmp_path / "nowhere", "*", 5).erased == 0
    path = tmp_path / f"{uuid7(1)}.pb"
    path.write_text("x")
    monkeypatch.setattr(Path, "unlink", partial(_refuse, OSError(30, "Read-only file system")))
    assert f"{path} cannot be removed: Read-only file system" in erase_files(tmp_path, "*", 5).problem
    monkeypatch.setattr(Path, "unlink", partial(_refuse, FileNotFoundError(2, "gone")))
    assert erase_files(tmp_path, "*", 5).erased == 0, "another worker was faster, and has counted it"


def test_a_file_that_cannot_be_removed_holds_up_no_other(tmp_path: Path) -> None:
    for began in (1, 2, 3):
        (tmp_path / f"{uuid7(began)}.pb").write_text("x")
    stuck = tmp_path / f"{uuid7(0)}.pb"
    stuck.mkdir()
    done = erase_files(tmp_path, "*", 5)
    assert done.erased == 3
    assert str(stuck) in done.problem
    assert list(tmp_path.iterdir()) == [stuck]


def _refuse(error: OSError, *_: object, **__: object) -> None:
    raise error


async def test_a_worker_clears_the_dead_folder_and_what_was_set_aside_in_any_spool(tmp_path: Path) -> None:
    config = load_run_config(None, [f'run.dir="{tmp_path}"', "retention.set_aside_h=1.0"], env={})
    message = good(random.Random(1))
    long_ago = uuid7_unix_ms(message.id) - 1000 * 3600 * 1000
    old, young, hour = uuid7(long_ago), message.id, uuid7(uuid7_unix_ms(message.id) - 2 * 3600 * 1000)
    dead = TrajectoryFolder(tmp_path / "dead")
    for one in (old, young, hour):
        message.id = one
        dead.put(pb.PublishRequest(trajectory=message), "INVALID_ARGUMENT: what was written")
        for worker in ("worker-0", "one-that-is-gone"):
            spool = TrajectoryFolder(tmp_path / "spool" / worker)
            spool.put(pb.PublishRequest(trajectory=message)).with_suffix(".torn").write_bytes(b"half")

    before = {name: metrics.RETENTION_ERASED.labels(name)._value.get() for name in ("dead_folder", "set_aside")}
    await app.retention_of(config).once()

    assert dead.ids() == sorted([young, hour]), "720 hours by default"
    for worker in ("worker-0", "one-that-is-gone"):
        folder = tmp_path / "spool" / worker
        assert TrajectoryFolder(folder).ids() == sorted([old, young, hour]), "what waits is ingest's to take"
        assert [path.stem for path in folder.glob("*.torn")] == [young]
    after = {name: metrics.RETENTION_ERASED.labels(name)._value.get() - count for name, count in before.items()}
    assert after == {"dead_folder": 2, "set_aside": 4}
