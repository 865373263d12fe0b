"""What scoring a trajectory came to. Failure is a type, never a number: only `Scored` trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sao.preference import PreferenceDocument


def known_to(
    document: PreferenceDocument, components: Mapping[str, float], judged: Mapping[str, str]
) -> dict[str, float]:
    """Those of the components that hold under this document: not the ones judged under another rubric."""
    foreign = {name for name, rubric_id in judged.items() if rubric_id != document.rubric_id}
    return {name: value for name, value in components.items() if name not in foreign}


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
    judged: dict[str, str] = {}
    """Of each component that a judge gave: the `rubric_id` of the preference it was judged under."""

    def value_under(self, document: PreferenceDocument) -> float:
        """The reward under this document: what scoring anew under it would give.

        Raises MissingComponentError when it reads a component that was not computed, or was judged under another
        rubric, and ValueError when the result is not finite.
        """
        return document.value(known_to(document, self.components, self.judged))


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
