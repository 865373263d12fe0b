"""Erase the text of trajectories from every place of a run; ids and numbers stay.

| place | holds text in |
|---|---|
| store | payloads, routed experts, entries, the waiting room, feedback, dead letters; then the server's own files |
| archive | prompt, token ids, task payload and routed experts of each step that trained on it |
| spool | what workers have not handed over, also what was set aside |
| dead | what ingest will never take |
| logs | lines that name the trajectory and say more than numbers of it, or that repeat its text |

The services may be at work. Whoever holds a trajectory in memory is turned away by the store (its entry is gone, its
id is known) or erases it from what it writes (sao.archive). Every step may be repeated; what is erased is not found.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from sao import streams as trajectory_streams
from sao.archive import Archive, ArchiveError
from sao.config import RunConfig
from sao.store_files import StoreFilesError, write_anew
from sao.streams.base import StreamError, TrajectoryStreams
from sao.tokenizer import Tokenizer
from sao.v1 import ingest_pb2, trajectory_pb2

SHORTEST_TEXT = 6
"""Shorter texts are not looked for in logs: they are everywhere."""
STORE_FILES_TIMEOUT_S = 300.0

_SAFE_KEYS = frozenset(
    {
        "event",
        "level",
        "logger",
        "time",
        "service",
        "run",
        "trajectory",
        "task",
        "kind",
        "component",
        "worker",
        "engine",
    }
)
"""Of a log line: what is written there is the program's own words, or a name."""
_MARK = "forgotten"


class Place(Enum):
    """Where a run keeps text."""

    STORE = "store"
    ARCHIVE = "archive"
    SPOOL = "spool"
    DEAD = "dead"
    LOGS = "logs"


@dataclass
class Finding:
    """What was in one place."""

    place: Place
    where: str
    erased: dict[str, int] = field(default_factory=dict)
    """Kind of thing -> how many were there."""
    problem: str = ""
    """Why text may be left there, and what to do; empty: none is."""

    def note(self, what: str, count: int) -> None:
        if count:
            self.erased[what] = self.erased.get(what, 0) + count


class Texts:
    """What was written in one trajectory, to be looked for where it was repeated."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._parts: set[str] = set()
        self.undecoded = False
        """Text was there, and no tokenizer to read it with."""

    def add(self, message: trajectory_pb2.Trajectory) -> None:
        """Take in prompt, segments and task payload."""
        for ids in (message.prompt_token_ids, *(segment.token_ids for segment in message.segments)):
            if len(ids) >= SHORTEST_TEXT:
                self._parts.add(", ".join(map(str, ids)))
            if ids and self._tokenizer is None:
                self.undecoded = True
            elif ids and self._tokenizer is not None:
                self._take(self._tokenizer.decode(list(ids)))
        for text in _leaves(message.task_payload_json):
            self._take(text)

    def _take(self, text: str) -> None:
        for line in text.splitlines():
            stripped = line.strip()
            if len(stripped) >= SHORTEST_TEXT:
                self._parts |= {stripped, json.dumps(stripped)[1:-1]}

    def encoded(self) -> list[bytes]:
        """As log files have them."""
        return [part.encode() for part in sorted(self._parts)]


def _leaves(payload_json: str) -> Iterator[str]:
    """Every string in a JSON document; the document itself where it is none."""
    try:
        todo = [json.loads(payload_json or "{}")]
    except ValueError:
        yield payload_json
        return
    while todo:
        found = todo.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            todo += found.values()
        elif isinstance(found, list):
            todo += found


async def forget(
    config: RunConfig, ids: Sequence[str], places: Iterable[Place], tokenizer: Tokenizer | None
) -> list[Finding]:
    """Erase these trajectories from the places named, all in this order; what was there.

    A place that cannot be reached has a problem in its finding, and the others are dealt with all the same.
    """
    wanted = [place for place in Place if place in set(places)]
    texts = {one: Texts(tokenizer) for one in ids}
    findings = {place: Finding(place, _where(config, place)) for place in wanted}
    for place in wanted:
        await _guarded(findings[place], partial(_read, config, place, texts))
    # Logs first and last: the texts to look for are only known until the other places are done.
    if Place.LOGS in findings:
        await _guarded(findings[Place.LOGS], partial(_erase_logs, config, texts))
    for place in wanted:
        if not findings[place].problem:
            await _guarded(findings[place], partial(_ERASE[place], config, texts))
    return list(findings.values())


def _where(config: RunConfig, place: Place) -> str:
    folder = config.run.dir
    match place:
        case Place.STORE:
            return without_password(config.redis.url)
        case Place.ARCHIVE:
            return str(folder / "archive")
        case Place.SPOOL:
            return str(spool_root(config))
        case Place.DEAD:
            return str(folder / "dead")
        case Place.LOGS:
            return str(folder / "logs")


def spool_root(config: RunConfig) -> Path:
    """The folder in which every worker has its spool."""
    return config.rollout.spool_dir or config.run.dir / "spool"


def without_password(url: str) -> str:
    """An address to show."""
    return re.sub(r"//[^/@]*@", "//", url)


class _UnreachableError(Exception):
    pass


async def _guarded(finding: Finding, work: Callable[[Finding], object]) -> None:
    try:
        done = work(finding)
        if hasattr(done, "__await__"):
            await done
    except (ArchiveError, OSError, StoreFilesError, StreamError, _UnreachableError) as error:
        finding.problem = str(error)


async def _read(config: RunConfig, place: Place, texts: Mapping[str, Texts], _: Finding) -> None:
    """Take in what is written in this place, before it goes."""
    for one, its in texts.items():
        if place is Place.STORE:
            await _with_streams(config, partial(_read_payload, one, its))
            continue
        for message in _on_disk(config, place, one):
            its.add(message)


async def _read_payload(trajectory_id: str, texts: Texts, streams: TrajectoryStreams) -> None:
    if (message := _decoded(await streams.payload(trajectory_id))) is not None:
        texts.add(message)


def _decoded(payload: bytes | None) -> trajectory_pb2.Trajectory | None:
    try:
        return trajectory_pb2.Trajectory.FromString(payload) if payload is not None else None
    except DecodeError:
        return None


def _on_disk(config: RunConfig, place: Place, trajectory_id: str) -> Iterator[trajectory_pb2.Trajectory]:
    if place is Place.ARCHIVE and (config.run.dir / "archive").is_dir():
        yield from (one.trajectory for one in Archive(config.run.dir / "archive").trained(trajectory_id))
    for path in _files(config, place, trajectory_id):
        try:
            yield ingest_pb2.PublishRequest.FromString(path.read_bytes()).trajectory
        except (DecodeError, FileNotFoundError):
            continue  # torn, a reason, or handed over meanwhile


def _files(config: RunConfig, place: Place, trajectory_id: str) -> list[Path]:
    """Files of the spool or the dead folder that are named after it, half-written ones too."""
    if place is Place.SPOOL:
        return sorted(spool_root(config).glob(f"*/*{trajectory_id}*"))
    return sorted((config.run.dir / "dead").glob(f"*{trajectory_id}*")) if place is Place.DEAD else []


async def _erase_store(config: RunConfig, texts: Mapping[str, Texts], finding: Finding) -> None:
    async def erase(streams: TrajectoryStreams) -> None:
        for one in texts:
            message = _decoded(await streams.payload(one))
            mark = (
                {"task": message.task, "ordinal": str(message.ordinal), "sample": str(message.sample)}
                if message is not None and message.id == one
                else {}
            )
            for what, count in asdict(await streams.erase(one, mark)).items():
                finding.note(what.replace("_", " "), count)

    await _with_streams(config, erase)
    await write_anew(config.redis, timeout_s=STORE_FILES_TIMEOUT_S)


async def _with_streams(config: RunConfig, work: Callable[[TrajectoryStreams], object]) -> None:
    streams = trajectory_streams.connect(config)
    try:
        await work(streams)  # type: ignore[misc]  # an awaitable
    finally:
        await streams.close()


def _erase_archive(config: RunConfig, texts: Mapping[str, Texts], finding: Finding) -> None:
    _require_folder(config.run.dir)
    archive = Archive(config.run.dir / "archive")
    for one in texts:
        finding.note("steps", archive.forget(one))


def _erase_files(config: RunConfig, texts: Mapping[str, Texts], finding: Finding) -> None:
    _require_folder(config.run.dir if config.rollout.spool_dir is None else spool_root(config))
    for one in texts:
        for path in _files(config, finding.place, one):
            path.unlink(missing_ok=True)
            finding.note("files", 1)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        msg = f"{folder} is not on this machine: run this command where it is mounted, with --place for what is there"
        raise _UnreachableError(msg)


def _erase_logs(config: RunConfig, texts: Mapping[str, Texts], finding: Finding) -> None:
    _require_folder(config.run.dir)
    for path in sorted((config.run.dir / "logs").glob("*.log*")):
        for one, its in texts.items():
            finding.note("lines", erase_lines(path, one, its.encoded()))
    if unread := sorted(one for one, its in texts.items() if its.undecoded):
        lines = f"lines that only repeat the text of {', '.join(unread)} were not looked for"
        msg = f"no tokenizer was found, so {lines}: put model.path back, or remove the logs"
        raise _UnreachableError(msg)


def erase_lines(path: Path, trajectory_id: str, texts: Sequence[bytes]) -> int:
    """Overwrite, in place, every line of a log that tells more than numbers of a trajectory; how many there were.

    The file keeps its length, so whoever writes to it goes on undisturbed.
    """
    erased = 0
    with path.open("r+b") as file:
        start = 0
        for line in file:
            body = line.rstrip(b"\n")
            if _tells(body, trajectory_id, texts):
                os.pwrite(file.fileno(), _filler(len(body), trajectory_id), start)
                erased += 1
            start += len(line)
        os.fsync(file.fileno())
    return erased


def _tells(line: bytes, trajectory_id: str, texts: Sequence[bytes]) -> bool:
    if any(text in line for text in texts):
        return True
    if trajectory_id.encode() not in line:
        return False
    try:
        event = json.loads(line)
    except ValueError:
        return True
    if not isinstance(event, dict) or event.get("event") == _MARK:
        return not isinstance(event, dict)
    more = {key: value for key, value in event.items() if key not in _SAFE_KEYS}
    return any(not isinstance(value, bool | int | float) and value != _MARK for value in more.values())


def _filler(length: int, trajectory_id: str) -> bytes:
    """A line of this length that says what happened, or as much of it as fits."""
    said = json.dumps({"event": _MARK, "trajectory": trajectory_id}).encode()
    return said.ljust(length) if len(said) <= length else b" " * length


_ERASE: Mapping[Place, Callable[[RunConfig, Mapping[str, Texts], Finding], object]] = {
    Place.STORE: _erase_store,
    Place.ARCHIVE: _erase_archive,
    Place.SPOOL: _erase_files,
    Place.DEAD: _erase_files,
    Place.LOGS: _erase_logs,
}
