"""Trajectories of a run for people: the newest ones, and one with the numbers of every token.

The console of the reward service and `sao trajectories` read through this module: `updates.jsonl` backwards from its
end, one archived step, and the streams for what is not trained yet. What is read is bounded by the page, never by the
length of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sao.archive import Archive, StepName
from sao.outcome import OUTCOME, Scored
from sao.preference import PreferenceDocument
from sao.rows import TrainedRow, UpdateRow, find_row, read_rows_back
from sao.run_history import RunHistory
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2, trajectory_pb2

MAX_TOKENS = 4096
"""Tokens of one trajectory in one answer."""
EVERYTHING = range(2**31)
MAX_PAYLOAD = 4000
"""Characters of a task's payload that are shown."""
MAX_STEPS = 4096
"""Archived steps of one update that are looked through."""
PLACE = r"^[0-9]{1,15}\.[0-9]{1,6}$"
"""What a place in the list looks like: a byte offset in updates.jsonl, and how many trajectories of the row before
it are still to come."""

_WHOLE = 999_999
"""More trajectories than any row has."""

State = Literal["waiting", "scored", "trained", "dead"]
Kind = Literal["prompt", "action", "observation"]


class PlaceError(ValueError):
    """A page was asked for at a place that no page has named."""


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TrajectorySummary(_View):
    """One line of a list; what is not known in its state is none."""

    id: str
    state: State
    """waiting (for its scoring), scored (waits for training), trained, or dead (a dead letter)."""
    ordinal: int | None
    update: int | None = None
    """The policy updates made after it was trained on."""
    critic_only: bool = False
    reward: float | None = None
    """As trained; of a scored one as it was scored."""
    components: dict[str, float] = {}
    scored_under: int | None = None
    trained_under: int | None = None
    consumed_s: float | None = None
    lag: int | None = None
    versions: int | None = None
    tokens: int | None = None
    turns: int | None = None
    finish_reason: str | None = None


class TrajectoryPage(_View):
    """Newest first."""

    trajectories: list[TrajectorySummary]
    next: str | None
    """Where the older ones begin; none: there are none."""


class TokenView(_View):
    """One token; the numbers are those that its update computed, none where it has none."""

    position: int
    """In the whole sequence, prompt included."""
    token_id: int
    text: str
    version: str | None = None
    logprob: float | None = None
    """Of the engine that sampled it, in nats."""
    value: float | None = None
    advantage: float | None = None
    ratio: float | None = None
    """Importance ratio before masking."""
    weight: float | None = None
    """What it carried of the gradient, f(r); 0: masked."""
    lag: int | None = None
    """Updates between its version and the trainer, at consumption."""
    masked: bool = False
    stale: bool = False
    """Masked because of its lag."""


class SegmentView(_View):
    kind: Kind
    turn: int
    """Of an action and of the observation after it, counting from 1; 0 for the prompt."""
    text: str
    """Of the tokens below."""
    tokens: list[TokenView]


class TrajectoryView(_View):
    """One trajectory, inspected."""

    summary: TrajectorySummary
    task: str
    prompt_id: str
    sample: int
    attempt: int
    engine_id: str
    worker_id: str
    payload: str
    """What the task needs to score it, as JSON; cut off after 4000 characters."""
    versions: list[str]
    """Weight versions that sampled it, in order of their first token."""
    trainer_epoch: int | None = None
    version_before: str | None = None
    """The weight version that its update was applied to."""
    preference: str | None = None
    """Name of the preference that it was trained under."""
    token_count: int
    first_token: int
    """Position of the first token below."""
    segments: list[SegmentView]
    largest_advantage: float | None = None
    """Of all its tokens, by absolute value."""
    note: str
    """Why something is missing, in words; else empty."""


def place_at(end: int) -> str:
    """The place in the list at which the rows before byte `end`, the end of a line, begin."""
    return f"{end}.{_WHOLE}"


class TrajectoryReader:
    """Reads one run's folder; nothing of it is written. Calls block: give them a thread of their own."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer | None, *, max_lag: int) -> None:
        """`max_lag`: trainer.max_lag, beyond which a token was stale."""
        self._rows = run_dir / "updates.jsonl"
        self._archive = run_dir / "archive"
        self._tokenizer = tokenizer
        self._max_lag = max_lag

    def page(self, before: str | None, limit: int, history: RunHistory) -> TrajectoryPage:
        """Up to `limit` trained ones, newest first, of the rows that count in `history`; PlaceError: no such place."""
        found: list[TrajectorySummary] = []
        end, keep = self._place(before)
        for row, start, after in read_rows_back(self._rows, end):
            if history.counts(row):
                here = row.trajectories[:keep]
                taken = here[max(len(here) - (limit - len(found)), 0) :]
                found += [summary_of(row, one) for one in reversed(taken)]
                left = len(here) - len(taken)
                if len(found) >= limit:
                    place = f"{after}.{left}" if left else place_at(start)
                    return TrajectoryPage(trajectories=found, next=place if left or start else None)
            keep = _WHOLE
        return TrajectoryPage(trajectories=found, next=None)

    def _place(self, before: str | None) -> tuple[int | None, int]:
        if before is None:
            return None, _WHOLE
        if re.fullmatch(PLACE, before) is None:
            msg = f"place {before!r}: give `next` of an earlier page"
            raise PlaceError(msg)
        end, keep = map(int, before.split("."))
        size = self._rows.stat().st_size if self._rows.exists() else 0
        if end > size or (end and self._byte(end - 1) != b"\n"):
            msg = f"place {before!r} is none of this run's: give `next` of an earlier page, or begin without one"
            raise PlaceError(msg)
        return end, keep

    def _byte(self, at: int) -> bytes:
        with self._rows.open("rb") as file:
            file.seek(at)
            return file.read(1)

    def trained(self, trajectory_id: str, window: range = EVERYTHING) -> TrajectoryView | None:
        """The newest training on it, with the tokens at these positions; none when it never was trained on.

        Raises sao.archive.ArchiveError for a damaged step.
        """
        row = find_row(self._rows, trajectory_id)
        if row is None:
            return None
        (one,) = [one for one in row.trajectories if one.id == trajectory_id]
        summary = summary_of(row, one)
        found = self._archived(row, trajectory_id)
        if found is None:
            note = f"the archive no longer has update {row.update}: its text and the numbers of its tokens are gone"
            return _view(trajectory_pb2.Trajectory(), summary, [], first=0, note=note)
        step, archived = found
        # What the archive says of components holds for rows of an earlier release too.
        outcome = OUTCOME.validate_json(archived.outcome_json)
        if isinstance(outcome, Scored):
            summary = summary.model_copy(update={"components": dict(outcome.components)})
        note = "its text was erased (`sao forget`)" if archived.forgotten else ""
        view = self._filled(archived.trajectory, summary, archived, window, note=note)
        largest = max((abs(value) for value in archived.advantages if math.isfinite(value)), default=None)
        update = {
            "trainer_epoch": step.trainer_epoch,
            "version_before": step.version_before,
            "preference": _name_of(step.preference_json),
            "largest_advantage": largest,
        }
        return view.model_copy(update=update)

    def untrained(
        self, payload: bytes, summary: TrajectorySummary, window: range = EVERYTHING, *, note: str = ""
    ) -> TrajectoryView:
        """One that the streams hold; google.protobuf.message.DecodeError when its payload is damaged."""
        trajectory = Trajectory.from_bytes(payload)
        facts = {
            "ordinal": trajectory.message.ordinal,
            "tokens": len(trajectory.token_ids),
            "turns": trajectory.turns,
            "versions": len({name for name in trajectory.versions if name}),
            "finish_reason": _finish(trajectory.message),
        }
        return self._filled(trajectory.message, summary.model_copy(update=facts), None, window, note=note)

    def _archived(
        self, row: UpdateRow, trajectory_id: str
    ) -> tuple[archive_pb2.ArchivedUpdate, archive_pb2.TrainedTrajectory] | None:
        if not self._archive.is_dir():
            return None
        archive = Archive(self._archive)
        for number in range(1, MAX_STEPS + 1):
            name = StepName(row.update, row.trainer_epoch, number)
            if not (self._archive / name.file_name).exists():
                return None
            step = archive.load(name)
            for archived in step.trajectories:
                if archived.trajectory.id == trajectory_id:
                    return step, archived
        return None

    def _filled(
        self,
        message: trajectory_pb2.Trajectory,
        summary: TrajectorySummary,
        archived: archive_pb2.TrainedTrajectory | None,
        window: range,
        *,
        note: str = "",
    ) -> TrajectoryView:
        numbers = _numbers(Trajectory(message), archived, self._max_lag)
        segments: list[SegmentView] = []
        start = 0
        for kind, turn, ids in _parts(message):
            low, high = max(window.start - start, 0), min(window.stop - start, len(ids))
            if low < high:
                tokens = [
                    TokenView(
                        position=start + at, token_id=ids[at], text=self._text(ids[at : at + 1]), **numbers[start + at]
                    )
                    for at in range(low, high)
                ]
                segments.append(SegmentView(kind=kind, turn=turn, text=self._text(ids[low:high]), tokens=tokens))
            start += len(ids)
        if self._tokenizer is None:
            note = "; ".join(filter(None, [note, "no tokenizer was found: token ids stand for the text"]))
        return _view(message, summary, segments, first=window.start, note=note)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if self._tokenizer is not None else " ".join(f"#{one}" for one in ids)


def summary_of(row: UpdateRow, one: TrainedRow) -> TrajectorySummary:
    """A trained trajectory, as its update's row has it."""
    return TrajectorySummary(
        id=one.id,
        state="trained",
        ordinal=one.ordinal,
        update=row.update,
        critic_only=row.critic_only,
        reward=one.reward,
        components=one.components,
        scored_under=one.scored_under,
        trained_under=one.trained_under,
        consumed_s=one.consumed_s,
        lag=one.lag,
        versions=one.versions,
        tokens=one.tokens,
        turns=one.turns,
        finish_reason=one.finish_reason,
    )


def summary_of_entry(trajectory_id: str, fields: Mapping[str, str], state: State) -> TrajectorySummary:
    """One on a stream or in the dead letters, as its entry has it."""
    ordinal = fields.get("ordinal", "")
    summary = TrajectorySummary(id=trajectory_id, state=state, ordinal=int(ordinal) if ordinal.isdecimal() else None)
    try:
        outcome = OUTCOME.validate_json(fields.get("outcome", ""))
    except ValidationError:
        return summary  # not scored yet
    if not isinstance(outcome, Scored):
        return summary
    facts = {
        "reward": outcome.value,
        "components": dict(outcome.components),
        "scored_under": outcome.scored_under,
    }
    return summary.model_copy(update=facts)


def _parts(message: trajectory_pb2.Trajectory) -> Iterator[tuple[Kind, int, Sequence[int]]]:
    """Prompt and segments in order: kind, turn, token ids."""
    yield "prompt", 0, list(message.prompt_token_ids)
    turn = 0
    for segment in message.segments:
        action = segment.kind == trajectory_pb2.SEGMENT_KIND_ACTION
        turn += action
        yield "action" if action else "observation", turn, list(segment.token_ids)


def _numbers(
    trajectory: Trajectory, archived: archive_pb2.TrainedTrajectory | None, max_lag: int
) -> list[dict[str, Any]]:
    """For each token what is known of it, under the names of TokenView; nothing for what was not sampled."""
    found: list[dict[str, Any]] = [{} for _ in trajectory.token_ids]
    actions = [position for position, sampled in enumerate(trajectory.action_mask) if sampled]
    columns = {
        name: getattr(archived, f"{name}s") if archived is not None else ()
        for name in ("value", "advantage", "ratio", "weight")
    }
    for at, position in enumerate(actions):
        version = trajectory.versions[position]
        facts = {name: _finite(column[at]) if at < len(column) else None for name, column in columns.items()}
        lag = archived.version_lags.get(version) if archived is not None else None
        masked = facts["weight"] == 0.0
        stale = masked and lag is not None and lag > max_lag
        logprob = _finite(trajectory.logprobs[position])
        found[position] = {
            **facts,
            "version": version,
            "logprob": logprob,
            "lag": lag,
            "masked": masked,
            "stale": stale,
        }
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name_of(preference_json: str) -> str | None:
    if not preference_json:
        return None
    return PreferenceDocument.model_validate_json(preference_json).name


def _finish(message: trajectory_pb2.Trajectory) -> str:
    return trajectory_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()


def _view(
    message: trajectory_pb2.Trajectory,
    summary: TrajectorySummary,
    segments: list[SegmentView],
    *,
    first: int,
    note: str,
) -> TrajectoryView:
    spans = [span.version for segment in message.segments for span in segment.versions]
    return TrajectoryView(
        summary=summary,
        task=message.task,
        prompt_id=message.prompt_id,
        sample=message.sample,
        attempt=message.attempt,
        engine_id=message.engine_id,
        worker_id=message.worker_id,
        payload=message.task_payload_json[:MAX_PAYLOAD],
        versions=list(dict.fromkeys(spans)),
        token_count=summary.tokens or 0,
        first_token=first,
        segments=segments,
        note=note,
    )
