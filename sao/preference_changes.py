"""What happens to preferences: every accepted change is one record, and the records tell all there is to know.

A record is made by the board in the step that makes the change, is numbered without a gap, and never changes. The same
text is one line of `<run.dir>/preferences/audit.jsonl`. Versions, what is scheduled and whether changes are held all
follow from the records (`Kept`), so a board that lost them gets everything back from the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sao.preference import Finite, Origin, Preference, PreferenceDocument

MAX_SCHEDULED = 32
"""Switches that may wait at once."""

MAX_FOLLOWED = 64
"""Records before a new one that come with it."""

Version = Annotated[int, Field(ge=1)]
Author = Annotated[str, Field(max_length=64)]
Reason = Annotated[str, Field(max_length=500)]
What = Literal["initial", "put", "rollback", "schedule", "cancel", "apply", "refuse", "hold", "resume"]
"""`apply` and `refuse` are what becomes of a scheduled switch; the others are asked for."""

ORIGINS: dict[What, Origin] = {"initial": "initial", "put": "put", "rollback": "rollback", "apply": "schedule"}
"""The changes that make a version."""


class Asked(BaseModel):
    """What somebody asks for, and who and why; a record repeats it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    author: Author = ""
    reason: Reason = ""
    client: str = ""
    """Address of whoever asked; empty where nobody did."""
    document: PreferenceDocument | None = None
    restores: Version | None = None
    if_version: Annotated[int, Field(ge=0)] | None = None
    """The version that must be current when it takes effect; 0: none."""
    at_s: Finite | None = None
    """A scheduled switch takes effect at this Unix time, by the store's clock, ..."""
    at_update: Annotated[int, Field(ge=0)] | None = None
    """... or as soon as the trainer has made this update."""

    def body(self) -> str:
        """These members as a JSON object: what every record of it ends with."""
        return self.model_dump_json(include=set(Asked.model_fields), exclude_none=True)


class ChangeRequest(Asked):
    """A change that somebody asks the board for; `apply` asks for the earliest scheduled one that is due."""

    what: Literal["initial", "put", "rollback", "schedule", "cancel", "apply", "hold", "resume"]
    switch: Version | None = None
    """The scheduled switch to cancel."""


class PreferenceChange(Asked):
    """One accepted change."""

    seq: Version
    """Counts from 1 without a gap."""
    when_s: float
    """Unix seconds by the store's clock."""
    what: What
    version: Version | None = None
    """The version that it made."""
    switch: Version | None = None
    """The scheduled switch that it is about: the `seq` under which that was accepted."""
    detail: str | None = None
    """Why a switch was refused."""

    def line(self) -> str:
        """Itself as one line of JSON, what happened first."""
        head = self.model_dump_json(exclude=set(Asked.model_fields), exclude_none=True)
        return f"{head[:-1]},{self.body()[1:]}"

    @property
    def preference(self) -> Preference | None:
        """The version that it made."""
        if self.version is None or self.document is None:
            return None
        return Preference(
            version=self.version,
            document=self.document,
            stored_s=self.when_s,
            author=self.author,
            reason=self.reason,
            client=self.client,
            origin=ORIGINS[self.what],
            restores=self.restores,
        )


def stored_by(change: PreferenceChange | None) -> Preference:
    """The version that a change made which was to make one."""
    preference = change.preference if change is not None else None
    assert preference is not None, change
    return preference


class ScheduledPreference(BaseModel):
    """A switch that waits for its time or update."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: Version
    document: PreferenceDocument
    at_s: float | None = None
    """Unix seconds, or ..."""
    at_update: int | None = None
    """... the update that the trainer must have made."""
    if_version: int | None = None
    """Takes effect only if this version is still current then."""
    author: str = ""
    reason: str = ""
    client: str = ""
    scheduled_s: float

    @classmethod
    def of(cls, change: PreferenceChange) -> ScheduledPreference:
        """What a `schedule` record says."""
        assert change.document is not None
        return cls(
            id=change.seq,
            document=change.document,
            at_s=change.at_s,
            at_update=change.at_update,
            if_version=change.if_version,
            author=change.author,
            reason=change.reason,
            client=change.client,
            scheduled_s=change.when_s,
        )


class Hold(BaseModel):
    """Whether changes are held, and since when by whom."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    held: bool
    author: str = ""
    reason: str = ""
    client: str = ""
    since_s: float | None = None

    @classmethod
    def of(cls, change: PreferenceChange | None) -> Hold:
        """What the record of the present hold says."""
        if change is None:
            return cls(held=False)
        return cls(held=True, author=change.author, reason=change.reason, client=change.client, since_s=change.when_s)


@dataclass
class Kept:
    """All that follows from the records of a run, in their order."""

    changes: list[PreferenceChange] = field(default_factory=list)
    versions: dict[int, Preference] = field(default_factory=dict)
    scheduled: dict[int, PreferenceChange] = field(default_factory=dict)
    hold: PreferenceChange | None = None

    @classmethod
    def of(cls, changes: Iterable[PreferenceChange], *, older: Iterable[Preference] = ()) -> Kept:
        """`older`: versions from before there were records."""
        kept = cls(versions={preference.version: preference for preference in older})
        for change in changes:
            kept.add(change)
        return kept

    def add(self, change: PreferenceChange) -> None:
        """Take in the next record."""
        self.changes.append(change)
        if (preference := change.preference) is not None:
            self.versions[preference.version] = preference
        if change.what == "schedule":
            self.scheduled[change.seq] = change
        elif change.switch is not None:
            self.scheduled.pop(change.switch, None)
        elif change.what in {"hold", "resume"}:
            self.hold = change if change.what == "hold" else None

    @property
    def seq(self) -> int:
        """Of the newest record; 0: none."""
        return self.changes[-1].seq if self.changes else 0

    @property
    def version(self) -> int:
        """The newest; 0: none."""
        return max(self.versions, default=0)

    @property
    def stored_s(self) -> float:
        """When the newest version was asked for; 0: never."""
        return max((change.when_s for change in self.changes if change.version and change.what != "initial"), default=0)
