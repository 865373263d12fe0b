"""The reward service as `services.reward.app` wires it, over whatever board and streams a test has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from sao.board.base import Board
from sao.board.memory import MemoryBoard
from sao.config import RunConfig
from sao.config.schema import AuthSection, RewardSection, RunSection
from sao.streams.base import TrajectoryStreams
from sao.streams.memory import MemoryStreams
from sao.tasks.base import Task
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.telemetry.health import Health
from sao.tokenizer import Tokenizer
from services.reward.app import RewardService, wire
from services.reward.scorers.base import ComponentScorer


def wired(
    task: Task,
    run_dir: Path,
    *,
    board: Board | None = None,
    streams: TrajectoryStreams | None = None,
    token: SecretStr | None = None,
    settings: Mapping[str, Any] | None = None,
    scorers: Sequence[ComponentScorer] = (),
    tokenizer: Tokenizer | None = None,
) -> RewardService:
    """One replica; `settings` are those of [reward], without board and streams it has some in memory."""
    config = RunConfig(
        run=RunSection(dir=run_dir),
        auth=AuthSection(token=token),
        reward=RewardSection.model_validate(dict(settings or {})),
    )
    memory = MemoryBoard(claimed=True)
    return wire(
        config,
        task,
        tokenizer or tokenizer_of_run(None, task),
        board=board if board is not None else memory,
        streams=streams if streams is not None else MemoryStreams(memory),
        health=Health(60.0),
        scorers=scorers,
    )
