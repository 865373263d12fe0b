"""Scorers beside the task's own: a user's code, a service over HTTP, a language model as judge."""

from __future__ import annotations

from sao.config import RunConfig
from sao.config.schema import HttpScorerSection, JudgeScorerSection, PythonScorerSection
from services.reward.scorers.base import ComponentScorer
from services.reward.scorers.http import HttpScorer
from services.reward.scorers.judge import JudgeScorer
from services.reward.scorers.python import PythonScorer


def connect(config: RunConfig) -> list[ComponentScorer]:
    """The scorers of the run file; ConfigError with the key of one that cannot work."""
    return [_connected(name, section) for name, section in config.reward.scorers.items()]


def _connected(name: str, section: PythonScorerSection | HttpScorerSection | JudgeScorerSection) -> ComponentScorer:
    match section:
        case PythonScorerSection():
            return PythonScorer(name, section)
        case HttpScorerSection():
            return HttpScorer(name, section)
        case JudgeScorerSection():
            return JudgeScorer(name, section)
