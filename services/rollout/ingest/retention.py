"""Forgets dead letters that are over their time, in the store and in the store's own files."""

from __future__ import annotations

from sao.config.schema import RedisSection
from sao.retention import Pass
from sao.store_files import StoreFilesError, write_anew
from sao.streams.base import StreamError, TrajectoryStreams

FILES_TIMEOUT_S = 300.0


class DeadLetterRetention:
    """Of one ingest process; several on one store take each letter once."""

    def __init__(self, streams: TrajectoryStreams, settings: RedisSection) -> None:
        self._streams = streams
        self._settings = settings
        self._written = False
        """Whether the server's files are younger than the last letter that this process, or one before it, took."""

    async def erase(self, before_ms: int) -> Pass:
        """Those that were buried before this Unix time; then have the server write its files without them."""
        forgotten, written, self._written = 0, self._written, False
        try:
            forgotten = await self._streams.forget_dead_before(before_ms)
            if forgotten or not written:
                await write_anew(self._settings, timeout_s=FILES_TIMEOUT_S)
            self._written = True
        except (StoreFilesError, StreamError) as error:
            return Pass(forgotten, str(error))
        return Pass(forgotten)
