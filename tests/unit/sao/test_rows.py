"""`updates.jsonl` read from its end: the same rows as from its beginning, whatever lies at the edge of a block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sao.rows
from sao.rows import UpdateRow, find_row, read_rows, read_rows_back
from tests.support.update_rows import rows_of, trained_row, update_row


def write(path: Path, rows: list[UpdateRow], torn: bytes = b"") -> None:
    path.write_bytes(b"".join(row.model_dump_json().encode() + b"\n" for row in rows) + torn)


@given(st.integers(0, 9), st.integers(1, 3000), st.binary(max_size=40).filter(lambda torn: b"\n" not in torn))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_backwards_is_forwards_reversed_at_every_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, block: int, torn: bytes
) -> None:
    path = tmp_path / "updates.jsonl"
    write(path, rows_of([0.5] * count, per_update=2), torn)
    with monkeypatch.context() as patched:
        patched.setattr(sao.rows, "_BLOCK", block)
        back = list(read_rows_back(path))

    forward = list(read_rows(path))
    assert [(row, after) for row, _, after in reversed(back)] == forward
    assert [start for _, start, _ in reversed(back)] == [0, *(after for _, after in forward)][: len(forward)]


def test_it_can_begin_at_the_end_of_any_line(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    write(path, rows_of([0.5] * 12), b'{"torn')
    ends = [after for _, after in read_rows(path)]

    for number, end in enumerate(ends, start=1):
        assert [row.update for row, _, _ in read_rows_back(path, end)] == list(range(number, 0, -1))


def test_the_newest_row_of_a_trajectory_is_found_and_no_other_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    first = update_row(1, [trained_row(1, 0.1, id_="twice")])
    again = update_row(1, [trained_row(1, 0.9, id_="twice")], epoch=2)
    path.write_bytes(b"".join([first.model_dump_json().encode(), b"\n", again.model_dump_json().encode(), b"\n{}\n"]))

    assert find_row(path, "twice") == again
    assert find_row(path, "never") is None
    assert find_row(tmp_path / "none", "twice") is None


def test_a_row_of_an_earlier_release_has_no_components(tmp_path: Path) -> None:
    old = json.loads(update_row(1, [trained_row(1, 0.1)]).model_dump_json())
    del old["trajectories"][0]["components"]
    (tmp_path / "rows").write_text(json.dumps(old) + "\n")

    ((row, _),) = read_rows(tmp_path / "rows")
    assert row.trajectories[0].components == {}
