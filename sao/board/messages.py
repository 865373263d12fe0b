"""What the errors of the board say, the same in every implementation."""

from __future__ import annotations

from sao.board.base import VersionRecord


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
    """What `put_preference` says when another writer was first."""
    return f"the preference is at version {current}, expected {expected}: read it again, then repeat the change"
