"""What ingest and worker read of a weight version: how many ids its model knows, and its tokenizer.

The vocabulary is `vocab_size` of config.json, the row count of the embedding, not the size of the tokenizer: models
are padded (so a sampled id may have no token), and the embedding is what an id outside would break.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from sao.board.base import Board
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStore

log = get_logger(__name__)

TOKENIZER_FILE = "tokenizer.json"


def vocabulary_size(checkpoint: Path) -> int:
    """Ids the model of this Hugging Face checkpoint directory takes; ValueError when its config.json doesn't say."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    for section in (config, config.get("text_config") or {}):
        size = section.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    msg = f"{path} has no positive vocab_size, expected the embedding's row count"
    raise ValueError(msg)


async def first_checkpoint(
    store: VersionStore, board: Board, stop: asyncio.Event, *, poll_s: float = 0.1
) -> Path | None:
    """The newest version's directory, once the board and the store have one; None when `stop` came first.

    There is no other limit: until the trainer has published, a service has nothing to do and says so by not being
    ready.
    """
    while not stop.is_set():
        try:
            announced = await board.versions()
        except StreamUnavailableError as error:
            log.warning("board does not answer", error=str(error))
            announced = {}
        names = [name for name in store.names() if name in announced]
        if names:
            return store.path(names[-1])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), poll_s)
    return None
