"""What the errors of the board say, the same in every implementation."""

from __future__ import annotations

from sao.board.base import VersionRecord
from sao.preference_changes import MAX_SCHEDULED


def fenced_message(epoch: int, newest: int) -> str:
    """What every FencedError says."""
    return f"trainer epoch {epoch} is fenced: epoch {newest} has started since; this process must stop"


def fenced_weights_message(epoch: int, newest: int, owner: str) -> str:
    """What a FencedError says to a weights service."""
    return (
        f"weights service epoch {epoch} is fenced: epoch {newest} ({owner or 'unknown'}) has started since and keeps "
        "the engines; this process must stop. A run has one weights service: stop the other one to have this one"
    )


def conflicting_version_message(known: VersionRecord, record: VersionRecord) -> str:
    """What `announce_version` says about a name that is taken."""
    return f"version {record.name} is announced as {known.model_dump_json()}, refused: {record.model_dump_json()}"


def conflicting_preference_message(expected: int, current: int) -> str:
    """What `change_preferences` says when another writer was first."""
    return f"the preference is at version {current}, expected {expected}: read it again, then repeat the change"


def refused_switch_message(expected: int, current: int) -> str:
    """What the record of a switch says whose version is gone."""
    return f"version {current} is current, it was to follow version {expected}"


def full_schedule_message() -> str:
    """What `change_preferences` says when no further switch may wait."""
    return f"{MAX_SCHEDULED} switches wait already: cancel one, or wait for one to take effect"


def unknown_switch_message(switch: int | None) -> str:
    """What `change_preferences` says about a switch that does not wait."""
    return f"no switch {switch} waits: it took effect, was refused or cancelled, or never was"


def behind_message(found: int, known: int) -> str:
    """What `change_preferences` says when the board has lost records."""
    return f"the board has {found} records of preference changes, {known} were made: restore them, then repeat"
