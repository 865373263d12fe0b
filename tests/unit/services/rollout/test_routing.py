"""Whose routes stay on record: those of the forward that sampled a token, or the first that read it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sao.routing import NO_RECORD
from services.rollout.engines.base import Span
from services.rollout.routing import completed, extended

ROW = 2


def rows(*values: int) -> bytes:
    """One row for each value."""
    return bytes(value for value in values for _ in range(ROW))


def test_a_turn_adds_its_rows_after_those_that_are_known() -> None:
    first = extended(b"", rows(0, 1, 2, 3), 3, [Span("v1", 0, 2)], ROW)
    assert first == rows(0, 1, 2, 3)
    # Two tokens of observation, so a prompt of 7; the last action token, never forwarded before, is read now.
    second = extended(first, rows(4, 5, 6, 7), 7, [Span("v2", 0, 2)], ROW)
    assert second == rows(0, 1, 2, 3, 4, 5, 6, 7)


def test_rows_that_sampled_before_a_change_of_weights_within_the_turn_are_lost() -> None:
    spans = [Span("v1", 0, 2), Span("v2", 2, 3), Span("v3", 3, 5)]
    found = extended(rows(9), rows(0, 1, 2, 3, 4, 5, 6), 4, spans, ROW)
    # The prompt's last row (the fourth) sampled the first token; three tokens are of earlier versions.
    assert found == rows(9, 0, 1, NO_RECORD, NO_RECORD, NO_RECORD, 5, 6)


def test_a_last_observation_has_no_record() -> None:
    assert completed(rows(0, 1, 2), 6, ROW) == rows(0, 1, 2, NO_RECORD, NO_RECORD)
    assert completed(rows(0, 1, 2), 4, ROW) == rows(0, 1, 2)
    assert completed(b"", 6, 0) == b"", "no routes are recorded"


@given(
    st.integers(1, 5), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4), st.booleans()
)
def test_every_action_token_keeps_the_row_of_the_turn_that_sampled_it(
    prompt: int, turns: list[tuple[int, int]], ends_in_observation: bool
) -> None:
    """A row that turn n computed says n."""
    tokens, known = prompt, b""
    sampled_by: dict[int, int] = {}
    for turn, (action, observation) in enumerate(turns):
        total = tokens + action
        known = extended(known, rows(turn) * (total - 1 - len(known) // ROW), tokens, [Span("v", 0, action)], ROW)
        sampled_by |= dict.fromkeys(range(tokens, total), turn)
        tokens = total + observation
    if not ends_in_observation:
        tokens -= turns[-1][1]
    record = completed(known, tokens, ROW)
    assert len(record) == (tokens - 1) * ROW
    assert {token: record[(token - 1) * ROW] for token in sampled_by} == sampled_by
    assert all(value == NO_RECORD for value in record[len(known) :])
