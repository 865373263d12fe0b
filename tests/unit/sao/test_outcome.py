"""Re-weighting is scoring anew, or it says what is missing."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.outcome import OUTCOME, Scored
from sao.preference import MissingComponentError, PreferenceDocument

TASK, JUDGED = ("quality", "style"), ("humour", "taste")
NAMES = st.sampled_from([*TASK, *JUDGED])
RUBRICS = st.sampled_from([None, "Puns are funny.", "Puns are not funny."])


@st.composite
def documents(draw: st.DrawFn) -> PreferenceDocument:
    return PreferenceDocument(
        name="p",
        weights=draw(st.dictionaries(NAMES, st.floats(-2, 2), min_size=1)),
        offset=draw(st.floats(-1, 1)),
        gates=draw(st.lists(NAMES, max_size=2)),
        thresholds=draw(st.dictionaries(NAMES, st.floats(0, 1), max_size=2)),
        rubric=draw(RUBRICS),
    )


def raw(seed: int, document: PreferenceDocument) -> dict[str, float]:
    """What every scorer gives for one trajectory: judges read the rubric, the task does not."""
    task = {name: ((seed * 7 + i * 3) % 11) / 10 for i, name in enumerate(TASK)}
    judged = {name: (zlib.crc32(f"{seed}/{name}/{document.rubric}".encode()) % 1000) / 1000 for name in JUDGED}
    return task | judged


def scored(seed: int, document: PreferenceDocument, version: int) -> Scored:
    """As the reward service scores: the task's components, and the judge's if the document reads one of them."""
    everything = raw(seed, document)
    judge = bool(document.components & set(JUDGED))
    components = {name: value for name, value in everything.items() if judge or name in TASK}
    return Scored(
        components=components,
        value=document.value(components),
        scored_under=version,
        scoring_started_s=1.0,
        judged=dict.fromkeys(JUDGED, document.rubric_id) if judge else {},
    )


@given(seed=st.integers(0, 1000), before=documents(), after=documents())
def test_under_any_document_it_is_what_scoring_anew_gives_or_missing(
    seed: int, before: PreferenceDocument, after: PreferenceDocument
) -> None:
    outcome = OUTCOME.validate_json(OUTCOME.dump_json(scored(seed, before, 1)))
    assert isinstance(outcome, Scored)
    assert outcome.value_under(before) == outcome.value
    fresh = scored(seed, after, 2)
    wanted = after.components & set(JUDGED)
    if not wanted or (before.components & set(JUDGED) and before.rubric == after.rubric):
        assert outcome.value_under(after) == fresh.value
        return
    with pytest.raises(MissingComponentError) as caught:
        outcome.value_under(after)
    assert set(caught.value.missing) == wanted


def test_a_component_of_another_rubric_is_missing_and_not_reused() -> None:
    outcome = Scored(
        components={"quality": 1.0, "humour": 0.9},
        value=0.9,
        scored_under=1,
        scoring_started_s=1.0,
        judged={"humour": PreferenceDocument(name="a", weights={"humour": 1.0}, rubric="Puns are funny.").rubric_id},
    )
    stern = PreferenceDocument(name="b", weights={"humour": 1.0}, rubric="Puns are not funny.")
    with pytest.raises(MissingComponentError, match="humour"):
        outcome.value_under(stern)
    plain = PreferenceDocument(name="c", weights={"quality": 0.5}, rubric="Puns are not funny.")
    assert outcome.value_under(plain) == 0.5


def test_an_outcome_of_before_there_were_judges_is_read() -> None:
    text = '{"kind": "scored", "components": {"a": 1.0}, "value": 1.0, "scored_under": 1, "scoring_started_s": 1.0}'
    outcome = OUTCOME.validate_json(text)
    assert isinstance(outcome, Scored)
    assert outcome.judged == {}
