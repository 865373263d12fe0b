"""The run's notice board: small facts that services read of each other; base.py is the contract."""

from __future__ import annotations

from sao.board.base import Board
from sao.config.schema import RunConfig


def connect(config: RunConfig) -> Board:
    """The run's board in its Redis; nothing is sent before the first call."""
    from sao.board.redis import RedisBoard

    return RedisBoard.connect(config)


__all__ = ["Board", "connect"]
