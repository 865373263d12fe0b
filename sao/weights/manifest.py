"""A weight version's manifest: what is in it, where it comes from, and how to prove that an engine serves it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
VersionName = Annotated[str, Field(pattern=r"^v[0-9]{8}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorEntry(_Part):
    """One tensor by its checkpoint name (per-expert names for MoE layers)."""

    name: str
    shape: list[int]
    dtype: str
    sha256: Sha256


class FileEntry(_Part):
    name: str
    size: int
    sha256: Sha256


class CanarySequence(_Part):
    """Token ids and the trainer's own log-prob of ids[i+1] given ids[:i+1]; len(logprobs) == len(ids) - 1.

    Non-finite log-probs are refused: they are what a policy of NaNs says, and such a version must not be published.
    """

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
    logprobs: list[Annotated[float, Field(allow_inf_nan=False)]]

    @model_validator(mode="after")
    def _one_logprob_per_predicted_token(self) -> CanarySequence:
        if len(self.logprobs) != len(self.token_ids) - 1:
            msg = f"{len(self.logprobs)} log-probs for {len(self.token_ids)} token ids; expected one fewer than ids"
            raise ValueError(msg)
        return self


class Manifest(_Part):
    """Written last: a version directory without one is incomplete and invisible."""

    format: int = 1
    run: str
    version: VersionName
    update: Annotated[int, Field(ge=0)]
    parent: str | None
    """Version whose weights these descend from; none for the run's first."""
    trainer_epoch: int
    created_s: float
    preference: Annotated[int, Field(ge=0)] = 0
    """The newest preference version that an update in it was trained under; 0: not known."""
    dtype: str
    tensors: Annotated[list[TensorEntry], Field(min_length=1)]
    files: Annotated[list[FileEntry], Field(min_length=1)]
    canary: Annotated[list[CanarySequence], Field(min_length=1)]

    def same_weights(self, other: Manifest) -> bool:
        """Whether both hold bit-identical tensors."""
        return sorted((t.name, t.sha256) for t in self.tensors) == sorted((t.name, t.sha256) for t in other.tensors)
