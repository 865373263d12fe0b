"""The one set of components that a run has: the task's, those of the run file's scorers, and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from sao.config import ConfigError
from sao.config.schema import FeedbackSection, RewardSection
from sao.preference import PreferenceDocument
from sao.tasks.base import SeparatelyScored, Task
from services.reward.scorers.base import ComponentScorer

TASK_KIND = "task"
FEEDBACK_KIND = "feedback"


class Computes(Protocol):
    """What a preference is checked against; a task and a catalogue both are."""

    @property
    def name(self) -> str: ...

    @property
    def components(self) -> frozenset[str]: ...

    @property
    def default_preference(self) -> PreferenceDocument: ...


class Component(BaseModel):
    """One component, for people and for `GET /v1/components`."""

    model_config = ConfigDict(frozen=True)

    name: str
    scorer: str
    """Who computes it; the name in errors and metrics."""
    kind: str
    """task | python | http | judge | feedback"""
    description: str
    deadline_s: float
    """Longest time its scorer may take for one trajectory, or that one waits for feedback."""
    low: float | None
    """The least it can be, where that is declared."""
    high: float | None


class Catalogue:
    """What the task computes, what the scorers add to it, and what people or products supply."""

    def __init__(self, task: Task, settings: RewardSection, scorers: Sequence[ComponentScorer] = ()) -> None:
        """ConfigError with the scorer's key when a name is taken by the task."""
        own = set(task.scorers) if isinstance(task, SeparatelyScored) else {"score"}
        for scorer in scorers:
            if scorer.name in own:
                reason = f"task {task.name} has a scorer {scorer.name!r} of its own; choose another name"
                raise ConfigError(key=f"reward.scorers.{scorer.name}", message=reason)
            if twice := sorted(task.components & scorer.components.keys()):
                reason = f"{twice} computed by task {task.name} already; rename them"
                raise ConfigError(key=f"reward.scorers.{scorer.name}.components", message=reason)
        self._entries = [_of_the_task(name, task, settings) for name in sorted(task.components)]
        self._entries += [entry for scorer in scorers for entry in _of(scorer)]
        if (feedback := settings.feedback) is not None:
            if feedback.component in self.components:
                msg = f"{feedback.component!r} is computed already: give the feedback a name of its own"
                raise ConfigError(key="reward.feedback.component", message=msg)
            self._entries.append(_supplied(feedback))
        self._task = task

    @property
    def name(self) -> str:
        """Of the task."""
        return self._task.name

    @property
    def default_preference(self) -> PreferenceDocument:
        """The task's, for a run file that names none."""
        return self._task.default_preference

    @property
    def components(self) -> frozenset[str]:
        """Every name that a preference may read."""
        return frozenset(entry.name for entry in self._entries)

    @property
    def entries(self) -> Sequence[Component]:
        """The task's components first, then each scorer's."""
        return self._entries


def document_schema(run: Computes) -> dict[str, Any]:
    """JSON schema of a preference document that this run can serve: it reads nothing that is not computed."""
    schema = PreferenceDocument.model_json_schema()
    names = {"enum": sorted(run.components)}
    for table in ("weights", "thresholds"):
        schema["properties"][table].pop("patternProperties", None)
        schema["properties"][table] |= {"propertyNames": names, "additionalProperties": {"type": "number"}}
    schema["properties"]["gates"]["items"] = names
    return schema


def _of_the_task(name: str, task: Task, settings: RewardSection) -> Component:
    return Component(
        name=name,
        scorer=task.name,
        kind=TASK_KIND,
        description=f"computed by task {task.name}",
        deadline_s=settings.component_timeout_s,
        low=None,
        high=None,
    )


def _supplied(feedback: FeedbackSection) -> Component:
    return Component(
        name=feedback.component,
        scorer=FEEDBACK_KIND,
        kind=FEEDBACK_KIND,
        description="supplied through POST /v1/feedback",
        deadline_s=feedback.deadline_s,
        low=feedback.low,
        high=feedback.high,
    )


def _of(scorer: ComponentScorer) -> list[Component]:
    low, high = scorer.bounds or (None, None)
    return [
        Component(
            name=name,
            scorer=scorer.name,
            kind=scorer.kind,
            description=description,
            deadline_s=scorer.deadline_s,
            low=low,
            high=high,
        )
        for name, description in sorted(scorer.components.items())
    ]
