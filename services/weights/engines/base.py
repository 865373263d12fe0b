"""The engine boundary of the weights service: what a round may ask of an inference server.

- Every call ends within the implementation's deadline, with an answer or with an EngineError.
- An answer without error means only that the engine said yes. It proves nothing about what it now serves:
  real servers answer 200 to half a checkpoint, to unknown tensor names and to NaNs. `checksums`, `score` and
  `generate_one` are the proof.
- While paused, `score` and `generate_one` do not return (they end at the deadline); the rest answers.

tests/contract/test_engine_control.py runs on every implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol


class EngineError(Exception):
    """Base of what this boundary raises; carries the engine's id and the step."""

    def __init__(self, engine: str, step: str, detail: str) -> None:
        super().__init__(f"{engine}, {step}: {detail}")
        self.engine = engine
        self.step = step
        self.detail = detail


class EngineUnreachableError(EngineError):
    """No answer within the deadline, or no connection; what the engine did meanwhile is unknown."""


class EngineRefusedError(EngineError):
    """The engine answered with an error."""

    def __init__(self, engine: str, step: str, status: int, text: str) -> None:
        super().__init__(engine, step, f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class UpdatedButNotFlushedError(EngineRefusedError):
    """The new weights are live, but the prefix cache still holds the old ones' keys and values: flush."""


class UnusableAnswerError(EngineError):
    """The answer lacks what was asked for; a null log-prob is what NaN weights give."""


@dataclass(frozen=True)
class ModelInfo:
    """What the engine says it serves; a label, not a proof."""

    weight_version: str
    model_path: str


@dataclass(frozen=True)
class GeneratedToken:
    """One greedy token after a prompt.

    `logprob` is at temperature 1; `cached_tokens` of the prompt came from the prefix cache; `version` as attributed
    by the engine's scheduler.
    """

    token_id: int
    logprob: float
    cached_tokens: int
    version: str


class PauseMode(Enum):
    """What a pause does to the requests that run."""

    RETRACT = "retract"
    """They go back into the queue and are computed again, under the new weights, when the engine resumes."""
    ABORT = "abort"
    """They end now, with what they have."""
    IN_PLACE = "in_place"
    """They keep their keys and values and go on under the new weights; so nothing can be flushed."""


class EngineControl(Protocol):
    @property
    def engine_id(self) -> str: ...

    @property
    def url(self) -> str: ...

    async def model_info(self) -> ModelInfo: ...

    async def server_release(self) -> str:
        """The server's release, such as 0.5.23; empty when it does not say (releases.py judges it)."""

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        """Hold new requests and do with running ones as `mode` says; on return no forward pass runs."""

    async def load(self, path: Path, version: str, *, flush: bool = True) -> None:
        """Load a checkpoint directory and label it; flushes the prefix cache when it can, unless told not to."""

    async def flush(self) -> None:
        """Drop the prefix cache; EngineRefusedError when requests hold it."""

    async def checksums(self) -> Mapping[str, str]:
        """Checksum by engine parameter; keys and values compare only among engines of one layout."""

    async def resume(self) -> None:
        """Let held requests go on; no error when not paused."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence the log-prob of ids[i+1] given ids[:i+1]: len(ids) - 1 values, without the prefix cache.

        All in one call: four sequences one by one cost three times as much on the CPU server.
        """

    async def generate_one(self, token_ids: Sequence[int], *, salt: str = "") -> GeneratedToken:
        """One greedy token after the prompt, through the prefix cache, which keeps the prompt for the next call.

        What is cached under another `salt` is not read.
        """

    async def close(self) -> None: ...
