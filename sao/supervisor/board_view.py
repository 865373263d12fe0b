"""What the board says, for people: a quick look that never stops the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sao.board import connect
from sao.board.base import Board, EngineFacts, TrainerFacts
from sao.config import RunConfig
from sao.preference import Preference
from sao.streams.base import StreamError

T = TypeVar("T")
TIMEOUT_S = 2.0


class BoardView:
    """Reads the board from a program without an event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self._board: Board | None = None

    def engines(self) -> dict[str, EngineFacts]:
        """Every engine by id; none while the board cannot be read."""
        return self._ask(lambda board: board.engines()) or {}

    def trainer(self) -> TrainerFacts | None:
        """The trainer's facts, if there are any and the board can be read."""
        return self._ask(lambda board: board.trainer())

    def preference(self) -> Preference | None:
        """The current preference, if there is one and the board can be read."""
        return self._ask(lambda board: board.preference())

    def close(self) -> None:
        """Let the connection go."""
        self._forget()
        self._runner.close()

    def _ask(self, question: Callable[[Board], Awaitable[T]]) -> T | None:
        async def ask() -> T:
            if self._board is None:
                self._board = connect(self._config)
            async with asyncio.timeout(TIMEOUT_S):
                return await question(self._board)

        try:
            return self._runner.run(ask())
        except (StreamError, OSError, TimeoutError):
            self._forget()
            return None

    def _forget(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            self._runner.run(_closed(board))


async def _closed(board: Board) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await board.close()
    except (StreamError, OSError, TimeoutError):
        return
