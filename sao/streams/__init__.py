"""Durable hand-over between services; base.py is the contract."""

from __future__ import annotations

from sao.config.schema import RunConfig
from sao.streams.base import TrajectoryStreams


def connect(config: RunConfig) -> TrajectoryStreams:
    """The run's streams in its Redis; nothing is sent before the first call."""
    from sao.streams.redis import RedisStreams

    return RedisStreams.connect(config)


__all__ = ["TrajectoryStreams", "connect"]
