"""Trainer checkpoints: complete or invisible, never pickled, the newest whole one found again after any crash.

    <run>/checkpoints/update-00000025/            (update-00000000-critic-0007 while only the critic trains)
        backend/...         what the backend wrote (safetensors, JSON)
        progress.json       `Progress`: counters, consumed ids, the current version
        MANIFEST.json       size and SHA-256 of every other file; written last, before the rename

Everything is written into a hidden sibling, fsynced, and renamed. A folder whose manifest does not match is
skipped, with the reason logged, for the one before it. The first one saved after such a fall-back replaces those it
fell back over: they belong to a future that is no longer made, and must not come back as the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sao.telemetry.logs import get_logger
from services.trainer.schedule import Gate, Pretraining

log = get_logger(__name__)

_NAME = re.compile(r"^update-(\d{8})(?:-critic-(\d{4,}))?$")
_BLOCK = 1 << 20


class CheckpointError(Exception):
    """A checkpoint cannot be written or does not match its manifest; says which file, found and expected."""


class Stretch(BaseModel):
    """Consecutive steps that one trainer process made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trainer_epoch: int
    update: int
    critic_only: int
    """With `update`, the last step of the stretch; it begins where the one before ends."""


class Progress(BaseModel):
    """Where the run stands: all that is not tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    update: int
    """Policy updates made."""
    critic_only: int
    """Critic-only updates made, pre-training and warm-up."""
    consumed: int
    """Trajectories trained on since the run began."""
    unsettled_ids: list[str]
    """Ids this state has trained on whose stream entries may still exist: never train them again."""
    version: str
    """Newest published version at the time; empty when none was."""
    trainer_epoch: int
    dropped: dict[str, int]
    stretches: list[Stretch] = []
    """The steps that made this state, oldest first; the same update may have been made in other epochs too, which a
    fall-back has abandoned. Empty before the first step, and where an earlier release began the run."""
    forgone_ids: list[str] = []
    """Ids in archived steps without effect that were dropped or buried since: not to be offered again."""
    done: list[tuple[int, int]] = []
    """Slots (sao.streams.dispatch) of the trajectories that were trained on or dropped, as half-open ranges."""
    algorithm: str = ""
    """That made this state; empty: an earlier release, which had only sao."""
    baseline: dict[str, list[float]] = {}
    """What the algorithm's baseline of rewards remembers, by prompt id."""
    pretraining: Pretraining = Pretraining(gate=Gate.NONE)
    """Of the critic; an earlier release, which says nothing here, had none."""

    def holds(self, trainer_epoch: int, update: int, critic_only: int) -> bool:
        """Whether the step that this epoch ended at this position is among those that made this state."""
        position = (update, critic_only)
        if not self.stretches:
            return position <= (self.update, self.critic_only) and trainer_epoch <= self.trainer_epoch
        for stretch in self.stretches:
            if position <= (stretch.update, stretch.critic_only):
                return trainer_epoch == stretch.trainer_epoch
        return False

    def stretches_to(self, trainer_epoch: int, update: int, critic_only: int) -> list[Stretch]:
        """`stretches` of the state that this epoch, having begun at this one, has brought to that position."""
        begin = (self.update, self.critic_only)
        unknown = not self.stretches and begin > (0, 0)
        if unknown or (update, critic_only) == begin:
            return self.stretches
        return [*self.stretches, Stretch(trainer_epoch=trainer_epoch, update=update, critic_only=critic_only)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size: int
    sha256: str


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    run: str
    files: list[_File]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    progress: Progress

    @property
    def backend_dir(self) -> Path:
        return self.path / "backend"


@dataclass(frozen=True)
class CheckpointStore:
    """All checkpoints of one run, and which of them stay."""

    root: Path
    run: str
    keep_last: int
    keep_every: int
    min_free_bytes: int

    def save(self, progress: Progress, write_backend: Callable[[Path], None]) -> Checkpoint:
        """Make this state durable; returns at once when a checkpoint of this very state exists.

        Raises CheckpointError when the disk has less than `min_free_bytes` left.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / _name(progress)
        existing = self._load(target) if target.exists() else None
        if existing is not None and existing.progress.stretches == progress.stretches:
            return existing
        self._remove_unfinished()
        self._require_space()
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=self.root))
        try:
            (work / "backend").mkdir()
            write_backend(work / "backend")
            (work / "progress.json").write_text(progress.model_dump_json())
            self._seal(work)
            shutil.rmtree(target, ignore_errors=True)
            work.rename(target)
            _fsync_directory(self.root)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._collect(target)
        return Checkpoint(target, progress)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[Checkpoint]:
        """Every whole checkpoint, newest first, read as it is asked for; damaged ones are skipped and logged."""
        for path in reversed(self._paths()):
            if (found := self._load(path)) is not None:
                yield found

    def oldest_progress(self) -> Progress | None:
        """Where the oldest checkpoint stands that is kept and whole as far as this; its tensors are not verified.

        OSError where one cannot be read now: a later start may.
        """
        for path in self._paths():
            # Gone meanwhile, or damaged: no start goes back to it.
            with contextlib.suppress(FileNotFoundError, ValidationError):
                return Progress.model_validate_json((path / "progress.json").read_bytes())
        return None

    def updates(self) -> list[int]:
        """Update numbers of the checkpoints on disk, whole or not, oldest first."""
        return [_order(path)[0] for path in self._paths()]

    def _load(self, path: Path) -> Checkpoint | None:
        try:
            return Checkpoint(path, self._verified(path))
        except (CheckpointError, OSError, ValidationError) as error:
            log.error("checkpoint is damaged, trying the one before", checkpoint=str(path), reason=str(error))  # noqa: TRY400
            return None

    def _verified(self, path: Path) -> Progress:
        manifest = _Manifest.model_validate_json((path / "MANIFEST.json").read_bytes())
        if manifest.run != self.run:
            msg = f"{path}: belongs to run {manifest.run!r}, expected {self.run!r}"
            raise CheckpointError(msg)
        for file in manifest.files:
            found = _describe(path, path / file.name)
            if found != file:
                msg = f"{path / file.name} is {found}, the manifest says {file}"
                raise CheckpointError(msg)
        strangers = _files(path) - {path / file.name for file in manifest.files} - {path / "MANIFEST.json"}
        if strangers:
            msg = f"{path}: {sorted(strangers)[0].name} is not in its manifest"
            raise CheckpointError(msg)
        return Progress.model_validate_json((path / "progress.json").read_bytes())

    def _seal(self, work: Path) -> None:
        files = sorted(_files(work))
        for path in files:
            _fsync_file(path)
        manifest = _Manifest(run=self.run, files=[_describe(work, path) for path in files])
        (work / "MANIFEST.json").write_text(manifest.model_dump_json())
        _fsync_file(work / "MANIFEST.json")
        for folder in [work, *(path for path in work.rglob("*") if path.is_dir())]:
            _fsync_directory(folder)

    def _require_space(self) -> None:
        free = shutil.disk_usage(self.root).free
        if free < self.min_free_bytes:
            msg = (
                f"{self.root}: {free >> 20} MiB free, checkpoint.free_space_mb asks for {self.min_free_bytes >> 20}: "
                "free some space or move run.dir"
            )
            raise CheckpointError(msg)

    def _remove_unfinished(self) -> None:
        """What a process that died while it saved has left."""
        for path in self.root.glob(".update-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _collect(self, saved: Path) -> None:
        made = [path for path in self._paths() if _order(path) <= _order(saved)]
        for path in self._paths()[len(made) :]:
            log.warning("removed a checkpoint of a future that was abandoned", checkpoint=str(path))
            shutil.rmtree(path)
        for path in made[: -self.keep_last]:
            if path not in self._kept_for_ever(made):
                shutil.rmtree(path)

    def _kept_for_ever(self, made: Sequence[Path]) -> Collection[Path]:
        """The first one of every `keep_every` updates: few lie at a multiple, warm-up and lulls shift them."""
        firsts: dict[int, Path] = {}
        for path in made if self.keep_every > 0 else []:
            firsts.setdefault(_order(path)[0] // self.keep_every, path)
        firsts.pop(0, None)
        return firsts.values()

    def _paths(self) -> list[Path]:
        if not self.root.exists():
            return []
        return sorted((path for path in self.root.iterdir() if _NAME.match(path.name)), key=_order)


_POLICY_MOVED = 2**62
"""Sorts a plain name after every critic-only name of its update."""


def _name(progress: Progress) -> str:
    if progress.update == 0 and progress.critic_only > 0:
        return f"update-{progress.update:08d}-critic-{progress.critic_only:04d}"
    return f"update-{progress.update:08d}"


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.match(path.name)
    if match is None:
        msg = f"{path} is not a checkpoint folder"
        raise ValueError(msg)
    return int(match[1]), int(match[2]) if match[2] else (0 if int(match[1]) == 0 else _POLICY_MOVED)


def _files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def _describe(root: Path, path: Path) -> _File:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return _File(name=path.relative_to(root).as_posix(), size=path.stat().st_size, sha256=digest.hexdigest())


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_fsync_directory = _fsync_file
