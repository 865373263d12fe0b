"""The log beside the store: every whole line of every process, nothing of a torn one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sao.accepted import FOLDER, AcceptedLog, accepted
from sao.ids import uuid7


def test_lines_of_several_processes_come_back(tmp_path: Path) -> None:
    logs = [AcceptedLog(tmp_path), AcceptedLog(tmp_path)]
    noted = [(uuid7(), slot) for slot in range(6)]
    for i, (trajectory_id, slot) in enumerate(noted):
        logs[i % 2].note(trajectory_id, slot)
    assert sorted(accepted(tmp_path)) == sorted(noted)
    for log in logs:
        log.close()
    assert sorted(accepted(tmp_path)) == sorted(noted)


def test_a_run_that_has_accepted_nothing_has_no_file(tmp_path: Path) -> None:
    AcceptedLog(tmp_path).close()
    assert list(accepted(tmp_path)) == []
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("kept", [9, 36, 37, 39, 41])
def test_a_torn_line_is_left_out_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Nor is half a slot's number read as another slot."""
    log, real = AcceptedLog(tmp_path), os.write
    first, torn, last = uuid7(), uuid7(), uuid7()
    log.note(first, 1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:kept]))
        with pytest.raises(OSError, match=f"{kept} of 42 bytes of a line were written: is the disk full"):
            log.note(torn, 2345)
    log.note(last, 3)
    assert list(accepted(tmp_path)) == [(first, 1), (last, 3)]
    log.close()


def test_what_a_crash_left_at_the_end_is_left_out(tmp_path: Path) -> None:
    log, whole = AcceptedLog(tmp_path), uuid7()
    log.note(whole, 4)
    log.close()
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(path.read_bytes() + f"{uuid7()} 1".encode())
    assert list(accepted(tmp_path)) == [(whole, 4)]


def test_a_disk_that_refused_the_file_is_asked_again(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    log, trajectory_id = AcceptedLog(tmp_path), uuid7()
    with pytest.raises(FileExistsError):
        log.note(trajectory_id, 0)
    (tmp_path / FOLDER).unlink()
    log.note(trajectory_id, 0)
    assert list(accepted(tmp_path)) == [(trajectory_id, 0)]
    log.close()
