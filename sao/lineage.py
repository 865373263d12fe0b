"""How far apart two weight versions are, in updates along the tree of versions.

After a crash or a rollback two branches may both hold an "update 12"; subtracting numbers would make work of
the abandoned branch look fresh. So the distance goes up from one version to the common ancestor and down to
the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from sao.board.base import VersionRecord


class UnknownVersionError(KeyError):
    """A version is not on the board, or shares no ancestor with the one it is compared to."""


class Lineage:
    """The tree of versions that the board knows; a version's parent is the one its weights descend from."""

    def __init__(self, records: Mapping[str, VersionRecord]) -> None:
        self._records = records

    def lag(self, version: str, current: str, current_update: int) -> int:
        """Updates between the weights of `version` and a trainer at `current_update` that last published `current`.

        (current_update - a.update) + (version.update - a.update), where a is their nearest common ancestor.
        Raises UnknownVersionError, a KeyError; ValueError when `current_update` lies before `current`.
        """
        published = self._record(current).update
        if current_update < published:
            msg = f"the trainer's update {current_update} lies before {published}, that of its own version {current!r}"
            raise ValueError(msg)
        ancestor = self._record(self.common_ancestor(version, current)).update
        return (current_update - ancestor) + (self._record(version).update - ancestor)

    def common_ancestor(self, one: str, other: str) -> str:
        """The nearest version that both descend from; a version descends from itself."""
        if one == other:
            return one
        # Both climb in step, so the first version that both have visited is the nearest, and the cost is the
        # distance, not the length of the run.
        seen: tuple[set[str], set[str]] = ({one}, {other})
        climbers: list[str | None] = [one, other]
        while climbers != [None, None]:
            for side in (0, 1):
                name = climbers[side]
                if name is None:
                    continue
                parent = self._record(name).parent
                climbers[side] = parent
                if parent is None:
                    continue
                if parent in seen[side]:
                    msg = f"version {parent!r} is its own ancestor: the board's records are damaged"
                    raise UnknownVersionError(msg)
                seen[side].add(parent)
                if parent in seen[1 - side]:
                    return parent
        msg = f"versions {one!r} and {other!r} have no common ancestor: they belong to different runs"
        raise UnknownVersionError(msg)

    def _record(self, name: str) -> VersionRecord:
        record = self._records.get(name)
        if record is None:
            msg = f"version {name!r} is not among the {len(self._records)} that the board knows"
            raise UnknownVersionError(msg)
        return record
