"""The real services as processes of their own, without a trainer or an engine behind them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

import sao.board
from sao.config import RunConfig
from sao.config.dump import secret_environment
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import build_tokenizer_json
from sao.weights.filesystem import FileSystemVersionStore
from tests.support.ingest import VOCAB, announce
from tests.support.processes import server
from tests.support.trajectories import ROUTING, VERSIONS
from tests.support.versions import publish_checkpoint, write_toy_checkpoint


async def first_version(config: RunConfig, folder: Path) -> Path:
    """Publish a toy model, whose config.json names VOCAB ids and ROUTING, and announce VERSIONS; its directory."""
    checkpoint = write_toy_checkpoint(folder / "checkpoint", 0)
    model = {"num_hidden_layers": ROUTING.layers, "num_experts": ROUTING.experts}
    model |= {"num_experts_per_tok": ROUTING.per_token, "vocab_size": VOCAB}
    (checkpoint / "config.json").write_text(json.dumps(model))
    (checkpoint / "tokenizer.json").write_text(build_tokenizer_json(Calculator()))
    store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
    publish_checkpoint(store, checkpoint, lambda _, ids: [0.0] * (len(ids) - 1))
    board = sao.board.connect(config)
    await board.new_trainer_epoch()
    await announce(board, *VERSIONS)
    await board.close()
    return checkpoint


@contextlib.contextmanager
def service(module: str, port: int, config: RunConfig, run_file: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m MODULE --config RUN.toml`, from ready (on `port`) until the block ends; killed then."""

    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    command = [sys.executable, "-m", module, "--config", str(run_file)]
    with server(command, log=log, ready=ready, timeout_s=60, env=secret_environment(config)) as process:
        yield process
