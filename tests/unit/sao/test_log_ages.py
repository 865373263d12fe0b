from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.log_ages import erase_lines_before, time_of
from sao.supervisor import log_retention
from sao.supervisor.folder import RunFolder
from sao.supervisor.log_retention import LogRetention
from tests.support.processes import wait_until

BASE_S = 1_700_000_000


def ours(at_s: float) -> bytes:
    moment = datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": "what was written", "exception": "2001-01-01T00:00:00", "time": moment}).encode()


def of_an_engine(at_s: float) -> bytes:
    return f"[{datetime.fromtimestamp(at_s).strftime('%Y-%m-%d %H:%M:%S')}] INFO: what was written".encode()  # noqa: DTZ006


def of_valkey(at_s: float) -> bytes:
    return f"7:M {datetime.fromtimestamp(at_s).strftime('%d %b %Y %H:%M:%S')}.004 * what was written".encode()  # noqa: DTZ006


UNDATED = [b"  File 'x.py', line 3: what was written", b"", b"{ no json", b'{"time": 3}', b"at 2001-01-01 00:00:00 it"]
NESTED = b'{"said": ' + b"[" * 100_000


@pytest.mark.parametrize("line", [ours, of_an_engine, of_valkey])
def test_a_line_says_when_it_was_written(line: object) -> None:
    assert callable(line)
    assert time_of(line(BASE_S)) == BASE_S


@pytest.mark.parametrize("line", [*UNDATED, pytest.param(NESTED, id="nested")])
def test_a_line_that_says_nothing_has_no_time(line: bytes) -> None:
    assert time_of(line) is None


lines = st.lists(st.tuples(st.sampled_from([ours, of_an_engine, of_valkey, *UNDATED]), st.integers(0, 2)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(written=lines, before=st.integers(0, 26), last=st.integers(0, 26), unfinished=st.booleans())
def test_the_beginning_that_is_over_its_time_goes_and_nothing_else(
    tmp_path: Path, written: list[tuple[object, int]], before: int, last: int, unfinished: bool
) -> None:
    path, at = tmp_path / "some.log", BASE_S
    texts: list[tuple[bytes, float | None]] = []
    for kind, later in written:
        at += later
        texts.append((kind(at), at) if callable(kind) else (kind, None))  # type: ignore[arg-type]
    data = b"\n".join(text for text, _ in texts) + (b"" if unfinished else b"\n")
    path.write_bytes(data)
    os.utime(path, (BASE_S + last, BASE_S + last))

    # Each line is as old as the first dated one from it on, or as the file.
    written_s, ages = float(BASE_S + last), list[float]()
    for _, own in reversed(texts):
        written_s = written_s if own is None else own
        ages.insert(0, written_s)
    young = next((n for n, age in enumerate(ages) if age >= BASE_S + before), len(texts))
    expected = [b" " * len(text) if n < young else text for n, (text, _) in enumerate(texts)]

    erased = erase_lines_before(path, BASE_S + before)

    assert path.read_bytes() == b"\n".join(expected) + (b"" if unfinished else b"\n")
    assert erased == sum(bool(text.strip()) for text, _ in texts[:young])
    assert path.stat().st_mtime == BASE_S + last
    assert erase_lines_before(path, BASE_S + before) == 0


def test_whoever_appends_goes_on_undisturbed(tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    with path.open("ab") as writer:
        writer.write(ours(BASE_S) + b"\n" + b"half a li")
        writer.flush()
        assert erase_lines_before(path, BASE_S + 1) == 1
        writer.write(b"ne\n")
    assert path.read_bytes().splitlines()[1] == b"half a line"
    assert path.stat().st_mtime > BASE_S + 1


def looked(logs: LogRetention) -> str:
    """What one pass says in the end."""
    assert logs.look() == ""
    wait_until(lambda: not logs.at_work, timeout_s=10, what="the pass to end")
    return logs.look()


def test_the_supervisor_goes_on_while_a_large_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, go_on, begun = RunFolder(tmp_path), threading.Event(), list[Path]()
    folder.logs.mkdir()
    (folder.logs / "trainer.log").touch()

    def slow(path: Path, _: float) -> int:
        begun.append(path)
        assert go_on.wait(60)
        return 3

    monkeypatch.setattr(log_retention, "erase_lines_before", slow)
    logs = LogRetention(folder, 1.0)
    assert [logs.look(), logs.look()] == ["", ""]
    wait_until(lambda: bool(begun), timeout_s=10, what="the pass to begin")
    assert (logs.at_work, len(begun)) == (True, 1)
    go_on.set()
    wait_until(lambda: not logs.at_work, timeout_s=10, what="the pass to end")
    assert logs.look() == ""
    assert "3 lines" in folder.timeline()[-1].detail


def test_the_supervisor_looks_at_every_log_when_it_is_due(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for name in ("trainer.log", "engine-0.log.1"):
        (folder.logs / name).write_bytes(ours(BASE_S) + b"\n")
    (folder.logs / "notes.txt").write_bytes(ours(BASE_S) + b"\n")
    forever = LogRetention(folder, "forever")
    assert (forever.look(), forever.at_work) == ("", False)
    assert folder.timeline() == []

    logs = LogRetention(folder, 1.0)
    assert looked(logs) == ""
    assert [(event.event, event.detail) for event in folder.timeline()] == [
        ("erased", "2 lines of logs, over retention.logs_h")
    ]
    assert b"written" in (folder.logs / "notes.txt").read_bytes()
    (folder.logs / "trainer.log").write_bytes(ours(BASE_S) + b"\n")
    assert looked(logs) == ""
    assert b"written" in (folder.logs / "trainer.log").read_bytes(), "not due before a tenth of the time"


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.logs / "strange.log").mkdir(parents=True)
    later = folder.logs / "trainer.log"
    later.write_bytes(ours(BASE_S) + b"\n")
    said = looked(LogRetention(folder, 1.0))
    assert not later.read_bytes().strip(), "the others are done all the same"
    assert "1 lines" in folder.timeline()[-1].detail
    assert "lines over retention.logs_h are left" in said
    assert "strange.log: Is a directory" in said
