"""What the store says, board and streams, for people: a quick look that never stops the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import sao.board
import sao.streams
from sao.board.base import EngineFacts, TrainerFacts
from sao.config import RunConfig
from sao.preference import Preference
from sao.store_memory import StoreUse, read_use
from sao.streams.base import StreamError

T = TypeVar("T")
TIMEOUT_S = 2.0


class _Closes(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)


class BoardView:
    """Reads board and streams from a program without an event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._runner = asyncio.Runner()
        self._board = _Connection(self._runner, lambda: sao.board.connect(config))
        self._streams = _Connection(self._runner, lambda: sao.streams.connect(config))

    def engines(self) -> dict[str, EngineFacts]:
        """Every engine by id; none while the board cannot be read."""
        return self._board.ask(lambda board: board.engines()) or {}

    def trainer(self) -> TrainerFacts | None:
        """The trainer's facts, if there are any and the board can be read."""
        return self._board.ask(lambda board: board.trainer())

    def preference(self) -> Preference | None:
        """The current preference, if there is one and the board can be read."""
        return self._board.ask(lambda board: board.preference())

    def store_use(self) -> StoreUse | None:
        """How full the store is and what fills it; None while it does not answer."""
        return self._streams.ask(read_use)

    def close(self) -> None:
        """Let the connections go."""
        self._board.forget()
        self._streams.forget()
        self._runner.close()


class _Connection(Generic[C]):
    """Opened by the first question, and anew after one that got no answer."""

    def __init__(self, runner: asyncio.Runner, connect: Callable[[], C]) -> None:
        self._runner = runner
        self._connect = connect
        self._open: C | None = None

    def ask(self, question: Callable[[C], Awaitable[T]]) -> T | None:
        """The answer; None when there is none in time."""

        async def ask() -> T:
            if self._open is None:
                self._open = self._connect()
            async with asyncio.timeout(TIMEOUT_S):
                return await question(self._open)

        try:
            return self._runner.run(ask())
        except (StreamError, OSError, TimeoutError):
            self.forget()
            return None

    def forget(self) -> None:
        """Close it."""
        last, self._open = self._open, None
        if last is not None:
            self._runner.run(_closed(last))


async def _closed(last: _Closes) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await last.close()
    except (StreamError, OSError, TimeoutError):
        return
