"""Which lines people get about store, dead letters and spools, and that they get none while all is well."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sao.config import RunConfig, load_run_config
from sao.streams.base import DeadEvent, DeadTotals
from sao.streams.room import RoomUse
from sao.supervisor.board_view import BoardView
from sao.supervisor.storage import (
    WAITS_S,
    SpoolFiles,
    look_into,
    lost_notices,
    spool_notices,
    storage_notices,
    store_notices,
)
from tests.support.processes import free_port
from tests.unit.sao.test_store_memory import use_of

NOW_S = 1_800_000_000.0


@pytest.fixture
def config() -> RunConfig:
    return load_run_config(None, ['redis.url="redis://:secret@store:6379/0"'], env={})


def told(config: RunConfig, share: float) -> list[str]:
    return store_notices(use_of(waiting=2, scored=40, share=share), config, Path("runs/my run"))


def test_a_store_with_room_is_no_matter(config: RunConfig) -> None:
    assert told(config, 0.79) == []


def test_at_the_mark_and_when_full_the_line_says_how_full_what_fills_it_and_what_to_do(config: RunConfig) -> None:
    (marked,), (full,) = told(config, 0.83), told(config, 1.02)
    assert marked.startswith("STORE AT 83% of its memory, the mark is 80%: ingest refuses")
    assert full.startswith("STORE FULL, 102% of its memory")
    for line in (marked, full):
        assert "40 scored ones" in line
        assert "the trainer does not keep up" in line
        assert "redis.maxmemory_mb" in line


def test_a_store_that_does_not_answer_is_named_without_its_password(config: RunConfig) -> None:
    (line,) = store_notices(None, config, Path("run"))
    assert line.startswith("STORE DOES NOT ANSWER at redis://store:6379/0:")
    assert "secret" not in line


def test_dead_letters_are_counted_by_kind_with_the_command_that_shows_them(config: RunConfig) -> None:
    dead = DeadTotals(100, {DeadEvent.BURIED: {"invalid": 2, "timeout": 3}, DeadEvent.DROPPED: {"timeout": 1}})
    (line,) = store_notices(replace(use_of(share=0.1), dead=dead), config, Path("runs/my run"))
    assert line.startswith("4 dead letters wait for a decision: invalid 2, timeout 2")
    assert "`sao dead list 'runs/my run'`" in line


def test_what_waits_for_feedback_is_told_with_its_age(config: RunConfig) -> None:
    waits = replace(use_of(share=0.1), feedback=RoomUse(3, int((time.time() - 90) * 1000)))
    (line,) = store_notices(waits, config, Path("r"))
    assert re.fullmatch(r"3 trajectories wait for feedback, the oldest for 9\d s \(docs/feedback\.md\)", line)


def test_only_what_waits_in_a_spool_or_is_damaged_is_counted(tmp_path: Path) -> None:
    ages = {"worker-0/a.pb": 3.0, "worker-0/b.pb": WAITS_S, "worker-1/c.pb": 95.0, "worker-1/d.torn": 1.0}
    for name, age in ages.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
        os.utime(file, (NOW_S - age, NOW_S - age))
    (tmp_path / "worker-0" / "lock").touch()

    found = look_into(tmp_path, NOW_S)

    assert found == SpoolFiles(waiting=2, oldest_s=95.0, damaged=1)
    waiting, damaged = spool_notices(found, tmp_path)
    assert waiting.startswith(f"2 finished trajectories wait for ingest in {tmp_path}, the oldest for 95 s")
    assert damaged.startswith(f"1 damaged files (.torn) in {tmp_path}")


def test_spools_in_order_or_not_there_are_no_matter(tmp_path: Path) -> None:
    assert look_into(tmp_path / "none", NOW_S) == SpoolFiles()
    assert spool_notices(SpoolFiles(), tmp_path) == []


def test_what_a_store_has_lost_is_counted_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "lost.jsonl"
    assert lost_notices(file) == []
    file.write_text("{}\n{}\n")
    (line,) = lost_notices(file)
    assert line.startswith(f"2 accepted trajectories were lost with the store: {file} names them")


def test_everything_is_read_at_once_and_a_store_that_is_away_hides_no_spool(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    config = load_run_config(None, [f'redis.url="{url}"', f'run.dir="{tmp_path}"'], env={})
    torn = tmp_path / "spool" / "worker-0" / "x.torn"
    torn.parent.mkdir(parents=True)
    torn.touch()
    view = BoardView(config)

    store, spool = storage_notices(config, tmp_path, view)

    view.close()
    assert store.startswith(f"STORE DOES NOT ANSWER at {url}")
    assert spool.startswith("1 damaged files")
