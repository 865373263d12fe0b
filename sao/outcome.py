"""What scoring a trajectory came to. Failure is a type, never a number: only `Scored` trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Outcome(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scored(_Outcome):
    """Every component was computed; `value` is their reward under preference `scored_under`."""

    kind: Literal["scored"] = "scored"
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    value: Annotated[float, Field(allow_inf_nan=False)]
    scored_under: Annotated[int, Field(ge=1)]
    scoring_started_s: float
    """Unix seconds; the preference was read after this moment."""


class TimedOut(_Outcome):
    """A component passed its deadline; the delivery is tried again."""

    kind: Literal["timeout"] = "timeout"
    component: str
    after_s: float


class InfraFailed(_Outcome):
    """Scoring broke for a reason outside the trajectory; the delivery is tried again."""

    kind: Literal["infra_failed"] = "infra_failed"
    component: str
    reason: str


class Invalid(_Outcome):
    """A trajectory that can never be scored; it goes to the dead letters."""

    kind: Literal["invalid"] = "invalid"
    reason: str


RewardOutcome = Annotated[Scored | TimedOut | InfraFailed | Invalid, Field(discriminator="kind")]
OUTCOME: TypeAdapter[RewardOutcome] = TypeAdapter(RewardOutcome)
