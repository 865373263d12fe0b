"""How `sao dead` shows dead letters to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from pydantic import ValidationError

from sao.config import RunConfig
from sao.dead_letters import age_s
from sao.outcome import OUTCOME, Scored
from sao.streams.base import DeadEvent, DeadLetter, DeadTotals
from sao.tokenizer import FileTokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from sao.weights.filesystem import FileSystemVersionStore

_MIB = 2**20
_LONGEST_TEXT = 2000


def letters_lines(letters: Sequence[DeadLetter]) -> Iterator[str]:
    """A heading and one line a letter, however wide the terminal is: the reason comes last, and may run on."""
    rows = [("trajectory", "from", "deliveries", "age", "task", "why")]
    for letter in letters:
        task = letter.fields.get("task", "-")
        once = " ".join(letter.reason.split())
        rows.append((letter.trajectory_id, letter.stream.value, str(letter.attempt), age(age_s(letter)), task, once))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, why in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), why])


def totals_lines(totals: DeadTotals, bound_mb: int) -> Iterator[str]:
    """How much room they take, and what became of those of the whole run, by kind of reason."""
    yield f"all dead letters take {totals.size / _MIB:.2f} MiB; beyond {bound_mb} (redis.dead_letters_mb) the oldest go"
    for event in DeadEvent:
        if kinds := totals.counts.get(event):
            yield f"{event.value:<10} {sum(kinds.values()):>6}  {by_kind(kinds)}"


def by_kind(counts: Mapping[str, int]) -> str:
    """Counts in one line."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))


def age(seconds: float) -> str:
    """In the largest unit that gives at least one."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def letter_rows(letter: DeadLetter) -> Iterator[tuple[str, str]]:
    """What the letter itself says."""
    buried = datetime.fromtimestamp(letter.buried_ms / 1000, UTC)
    yield "trajectory", letter.trajectory_id
    yield "died", f"{buried:%Y-%m-%d %H:%M:%S} UTC, {age(age_s(letter))} ago"
    yield "on", f"stream {letter.stream.value}, delivery {letter.attempt}"
    yield "why", letter.reason
    yield "outcome", _outcome(letter)


def _outcome(letter: DeadLetter) -> str:
    text = letter.fields.get("outcome")
    if text is None:
        return "none: it was never scored"
    try:
        outcome = OUTCOME.validate_json(text)
    except ValidationError:
        return f"unreadable: {text}"
    if not isinstance(outcome, Scored):
        return text
    components = ", ".join(f"{name} {value:g}" for name, value in sorted(outcome.components.items()))
    return f"reward {outcome.value:g} under preference {outcome.scored_under} ({components})"


def trajectory_rows(trajectory: Trajectory, config: RunConfig) -> Iterator[tuple[str, str]]:
    """What the trajectory is; its text where a weight version of the run has the tokenizer."""
    message = trajectory.message
    finish = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    versions = sorted({name for name in trajectory.versions if name})
    yield "task", f"{message.task}, prompt {message.prompt_id}"
    yield "place", f"ordinal {message.ordinal}, sample {message.sample}, attempt {message.attempt}"
    yield "episode", f"{trajectory.turns} turns, {len(trajectory.token_ids)} tokens, {trajectory.action_count} sampled"
    yield "finish", finish
    yield "sampled by", f"{', '.join(versions)} on {message.engine_id}, worker {message.worker_id}"
    yield "payload", message.task_payload_json[:_LONGEST_TEXT]
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        yield "text", f"no tokenizer under {config.versions_dir}; --json has the token ids"
        return
    yield "prompt", tokenizer.decode(message.prompt_token_ids)[:_LONGEST_TEXT]
    for segment in message.segments:
        kind = pb.SegmentKind.Name(segment.kind).removeprefix("SEGMENT_KIND_").lower()
        yield kind, tokenizer.decode(segment.token_ids)[:_LONGEST_TEXT]


def _tokenizer(config: RunConfig) -> FileTokenizer | None:
    if not config.versions_dir.is_dir():
        return None
    store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
    files = [store.path(name) / "tokenizer.json" for name in store.names()]
    return next((FileTokenizer(file) for file in reversed(files) if file.is_file()), None)
