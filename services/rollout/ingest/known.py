"""The versions that the board knows, cached: a version once announced stays known."""

from __future__ import annotations

import asyncio

from sao.board.base import Board


class KnownVersions:
    """Version names seen on the board so far."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._names: frozenset[str] = frozenset()
        self._lock = asyncio.Lock()

    @property
    def names(self) -> frozenset[str]:
        return self._names

    async def complete(self) -> bool:
        """Whether a refresh that begins now gives all names; not while a board that lost them is being restored."""
        return await self._board.epoch() > 0

    async def refresh(self) -> frozenset[str]:
        """Names as of a board read that began after this call; concurrent callers read one after the other."""
        async with self._lock:
            self._names |= (await self._board.versions()).keys()
            return self._names
