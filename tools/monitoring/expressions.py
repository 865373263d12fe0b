"""Which series an expression reads, and whether the code, or a recording rule, makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import get_args

import promql_parser as promql

from sao.board.base import EngineState
from sao.outcome import InfraFailed, Invalid, Scored, TimedOut
from sao.store_memory import Pressure
from sao.streams.base import AppendStatus
from sao.v1 import ingest_pb2 as pb
from sao.weights.control import HeldBy, Pin
from services.trainer import metrics as trainer
from services.trainer.core.guards import GUARD_NAMES
from services.trainer.schedule import Gate, Phase
from tools.metrics_docs import MODULES, declared
from tools.monitoring.rules import rules

TARGET = frozenset({"run", "job", "instance"})
"""Labels that a scrape adds (deploy/monitoring/prometheus.yml, monitors/)."""
OF_SCRAPES: Mapping[str, frozenset[str]] = {"up": frozenset(), "process_resident_memory_bytes": frozenset()}
"""Series that Prometheus or prometheus_client makes."""
_KINDS = [one.model_fields["kind"].default for one in (Scored, TimedOut, InfraFailed, Invalid)]
VALUES: Mapping[tuple[str, str], frozenset[str]] = {
    ("sao_weights_engine_state", "state"): frozenset(state.value for state in EngineState),
    ("sao_weights_publishing_held", "by"): frozenset([*get_args(Pin.model_fields["by"].annotation), *get_args(HeldBy)]),
    ("sao_trainer_dis_tokens_fraction", "verdict"): frozenset(trainer.VERDICTS),
    ("sao_trainer_dis_tokens_fraction", "lag"): frozenset([*trainer.LAGS, "all"]),
    ("sao_trainer_rollout_kl_nats", "lag"): frozenset({"0", "all"}),
    ("sao_trainer_publishing_held", "guard"): frozenset(GUARD_NAMES),
    ("sao_trainer_guard_limit", "guard"): frozenset(GUARD_NAMES),
    ("sao_trainer_phase_active", "phase"): frozenset(phase.value for phase in Phase),
    ("sao_trainer_critic_gate_state", "state"): frozenset(gate.value for gate in Gate),
    ("sao_ingest_store_pressure", "state"): frozenset(pressure.label for pressure in Pressure),
    ("sao_ingest_trajectories_total", "status"): frozenset(status.value for status in AppendStatus),
    ("sao_ingest_admission_state", "state"): frozenset(
        name.removeprefix("ADMISSION_STATE_").lower() for name in pb.AdmissionState.keys()[1:]
    ),
    ("sao_reward_outcomes_total", "kind"): frozenset(_KINDS),
}
"""What a label can be, where the code has a list of it."""

_OPERATORS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}


@dataclass(frozen=True)
class Series:
    """What one selector names."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """(Label, operator, value)."""

    @property
    def selector(self) -> str:
        """As it is written, without offset or window."""
        inside = ", ".join(f'{label}{operator}"{value}"' for label, operator, value in self.matchers)
        return f"{self.metric}{{{inside}}}" if inside else self.metric


@dataclass
class Names:
    """Everything that an expression names."""

    series: list[Series] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    """Of `by` and `on`."""


@cache
def known() -> dict[str, frozenset[str]]:
    """Labels by name of each series that can be there."""
    found = {name: labels | TARGET for name, labels in OF_SCRAPES.items()}
    for service in MODULES:
        for name, kind, labels, _ in declared(service):
            own = TARGET.union(label for label in labels.split(", ") if label)
            found |= dict.fromkeys(_exposed(name, kind), own)
            if kind == "histogram":
                found[f"{name}_bucket"] = own | {"le"}
    for rule in rules():
        if not rule.is_alert:
            found[rule.name] = _labels(promql.parse(rule.expr), found) or frozenset()
    return found


def _exposed(name: str, kind: str) -> list[str]:
    return [f"{name}_sum", f"{name}_count"] if kind in {"histogram", "summary"} else [name]


def labels_of(expr: str) -> frozenset[str]:
    """Labels that the series of an expression's answer have."""
    return _labels(promql.parse(expr), known()) or frozenset()


def _labels(node: promql.Expr, series: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """As `labels_of`; None for a scalar."""
    match node:
        case promql.VectorSelector():
            return series.get(node.name or "", frozenset())
        case promql.MatrixSelector() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            inner = node.vector_selector if isinstance(node, promql.MatrixSelector) else node.expr
            return _labels(inner, series)
        case promql.AggregateExpr():
            return frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
        case promql.Call():
            return _labels_of_call(node, series)
        case promql.BinaryExpr():
            return _labels_of_pair(node, series)
        case _:
            return None


def _labels_of_call(node: promql.Call, series: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    found = [labels for argument in node.args if (labels := _labels(argument, series)) is not None]
    if not found:
        return None
    if node.func.name == "label_replace":
        return found[0] | {node.args[1].val}
    return found[0] - {"le"} if node.func.name == "histogram_quantile" else found[0]


def _labels_of_pair(node: promql.BinaryExpr, series: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    left, right = _labels(node.lhs, series), _labels(node.rhs, series)
    if left is None or right is None:
        return left if right is None else right
    operator, modifier = str(node.op), node.modifier
    if operator == "or":
        return left | right
    if operator in {"and", "unless"} or modifier is None or modifier.matching is None:
        return left
    if modifier.card == promql.VectorMatchCardinality.ManyToOne:
        return left.union(modifier.group_labels or ())
    return frozenset(modifier.matching.labels)


def names(expr: str) -> Names:
    """Everything that `expr` names; ValueError when it is no PromQL."""
    found = Names()
    for node in nodes(promql.parse(expr)):
        match node:
            case promql.VectorSelector():
                found.series.append(_series(node))
            case promql.AggregateExpr() if node.modifier is not None:
                found.labels |= set(node.modifier.labels)
            case promql.BinaryExpr() if node.modifier is not None and node.modifier.matching is not None:
                found.labels |= set(node.modifier.matching.labels)
            case _:
                pass
    return found


def nodes(root: promql.Expr) -> Iterator[promql.Expr]:
    """The expression and everything in it."""
    yield root
    match root:
        case promql.BinaryExpr():
            below = [root.lhs, root.rhs]
        case promql.AggregateExpr():
            below = [root.expr, *([root.param] if root.param is not None else [])]
        case promql.Call():
            below = list(root.args)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            below = [root.expr]
        case promql.MatrixSelector():
            below = [root.vector_selector]
        case _:
            below = []
    for node in below:
        yield from nodes(node)


def problems(expr: str) -> list[str]:
    """What `expr` names that nothing makes; empty when there is no such thing."""
    series = known()
    found = []
    read = names(expr)
    for one in read.series:
        if one.metric not in series:
            found.append(f"no metric {one.metric}: neither in a metrics.py nor recorded")
            continue
        for label, _, value in one.matchers:
            if label not in series[one.metric]:
                found.append(f"{one.metric} has no label {label}")
            allowed = VALUES.get((one.metric, label))
            if allowed is not None and (wrong := set(value.split("|")) - allowed):
                found.append(f"{one.metric}: {label} is never {', '.join(sorted(wrong))}")
    can_be = frozenset().union(*(series.get(one.metric, frozenset()) for one in read.series))
    found += [f"nothing here has the label {label}" for label in sorted(read.labels - can_be)]
    return found


def _series(node: promql.VectorSelector) -> Series:
    matchers = [(one.name, _OPERATORS[str(one.op)], one.value) for one in node.matchers.matchers]
    return Series(node.name or "", tuple(matchers))
