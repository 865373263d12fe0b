"""The real weights service, steered by a file: when it comes to a point, it kills itself (SIGKILL) or stays there.

`STEER=FILE python -m tests.support.steered_weights --config RUN.toml`. The file holds `kill after loading`, or
`hold after loading`, or nothing: an ordinary service. Where it is held, it says `held after loading` there, and goes on
when that has changed. HALF names a directory with half a checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

from sao.atomic import write_file
from sao.board.base import EngineFacts, EngineState
from sao.board.redis import RedisBoard
from sao.process import run_service
from services.weights import app
from services.weights.engines.base import EngineRefusedError
from services.weights.engines.sglang import SGLangEngine

STEER, HALF = "STEER", "HALF"
IN_FLIGHT = "with a load on its way"
UNFLUSHED = "with the weights loaded and the cache not flushed"
HALF_LOADED = "with half of the weights loaded"

_file = Path(os.environ.get(STEER, os.devnull))
_real_write = RedisBoard.write_engine
_real_load = SGLangEngine.load
_real_score = SGLangEngine.score


def before(state: EngineState) -> str:
    """The point at which nobody knows of the state yet."""
    return f"before {state.value}"


def after(state: EngineState) -> str:
    """The point at which the board says it, and nothing was done in it."""
    return f"after {state.value}"


def _order() -> str:
    return _file.read_text()


async def _come_to(point: str) -> None:
    order = _order()
    if order == f"kill {point}":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == f"hold {point}":
        held = f"held {point}"
        write_file(_file, held.encode())
        while _order() == held:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.01)


async def _write_engine(board: RedisBoard, facts: EngineFacts) -> None:
    await _come_to(before(facts.state))
    await _real_write(board, facts)
    await _come_to(after(facts.state))


async def _load(engine: SGLangEngine, path: Path, version: str) -> None:
    request = {"model_path": str(path), "weight_version": version, "flush_cache": True, "abort_all_requests": False}
    order = _order()
    if order == f"kill {IN_FLIGHT}":
        await _only_send(engine.url, "/update_weights_from_disk", json.dumps(request).encode())
    if order == f"kill {UNFLUSHED}":
        unflushed = {**request, "flush_cache": False}
        await engine._send("load", "POST", "/update_weights_from_disk", json=unflushed, headers={})
    if order == f"kill {HALF_LOADED}":
        await _real_load(engine, Path(os.environ[HALF]), version)
    for point in (IN_FLIGHT, UNFLUSHED, HALF_LOADED):
        await _come_to(point)
    await _real_load(engine, path, version)


async def _only_send(url: str, path: str, body: bytes) -> None:
    """Give the kernel a whole request, which outlives this process, and read no answer."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def _score(engine: SGLangEngine, sequences: list[list[int]]) -> list[list[float]]:
    """Refused while the order is about the state that only a failure leads to."""
    if _order().endswith(EngineState.QUARANTINED.value):
        raise EngineRefusedError(engine.engine_id, "score", 400, "refused by the test")
    return await _real_score(engine, sequences)


if __name__ == "__main__":
    for kind, name, steered in (
        (RedisBoard, "write_engine", _write_engine),
        (SGLangEngine, "load", _load),
        (SGLangEngine, "score", _score),
    ):
        setattr(kind, name, steered)
    run_service("weights", app.main)
