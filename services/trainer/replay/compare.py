"""Two archived updates, number by number, in the order in which an update computes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import BaseModel, ConfigDict

from sao.rows import CRITIC_ONLY
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from services.trainer.metrics import GROUP_OUTCOMES

PER_TOKEN = ("values", "advantages", "ratios", "weights")
PER_STEP = ("critic_loss", "policy_loss", "critic_grad_norm", "policy_grad_norm", "skipped", "policy_lr", "critic_lr")
OF_THE_MOMENT = frozenset(
    {"queue_depth", "queue_age_s", "update_s", "idle_s", "unsettled"}
    | {f"groups_{outcome}" for outcome in GROUP_OUTCOMES}
)
"""Metrics of the loop around an update: no function of its trajectories."""
_OF_THE_STEPS = {
    "critic_grad_norm",
    "policy_grad_norm",
    "skipped",
    "update_skipped",
    "policy_lr",
    "critic_lr",
    CRITIC_ONLY,
}
_OF_THE_SUMMARY = {
    *("trajectories", "action_tokens", "reward_mean", "lag_mean", "lag_max", "versions_mean", "versions_max"),
    *("tokens_mean", "action_tokens_mean", "turns_mean", "truncated_fraction"),
}
OF_ALL_RANKS = frozenset(_OF_THE_STEPS | _OF_THE_SUMMARY)
"""Metrics that cover every trajectory where several ranks trained; the others are of rank 0's share."""

Number = float | str | None
"""None: not there."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Quantity(_Part):
    """One quantity of one update, over all of its trajectories and tokens."""

    quantity: str
    compared: int
    differing: int
    """Beyond the tolerance."""
    logged: Number
    """With `replayed`, the pair that lies furthest apart."""
    replayed: Number
    largest_difference: float

    @property
    def ok(self) -> bool:
        return self.differing == 0


class Divergence(_Part):
    """The first number of an update that does not come out as it was logged."""

    update: int
    critic_only: int
    """Warm-up steps made by then, which tells the steps of update 0 apart."""
    trajectory: str
    """Empty when the quantity is the whole update's."""
    quantity: str
    token: int | None
    """Position in the flat sequence, prompt included."""
    logged: Number
    replayed: Number
    meaning: str


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal: |a - b| <= absolute + relative * max(|a|, |b|); NaN equals NaN."""

    relative: float
    absolute: float

    def holds(self, logged: Number, replayed: Number) -> bool:
        """Whether the two are the same number."""
        if not isinstance(logged, float) or not isinstance(replayed, float):
            return logged == replayed
        if not (math.isfinite(logged) and math.isfinite(replayed)):
            return logged == replayed or (math.isnan(logged) and math.isnan(replayed))
        return abs(logged - replayed) <= self.absolute + self.relative * max(abs(logged), abs(replayed))


@dataclass(frozen=True)
class _Pair:
    quantity: str
    logged: Number
    replayed: Number
    trajectory: str = ""
    token: int | None = None

    @property
    def difference(self) -> float:
        if not isinstance(self.logged, float) or not isinstance(self.replayed, float):
            return 0.0 if self.logged == self.replayed else math.inf
        if Tolerance(0.0, 0.0).holds(self.logged, self.replayed):
            return 0.0
        difference = abs(self.logged - self.replayed)
        return difference if math.isfinite(difference) else math.inf


def compare(
    logged: pb.ArchivedUpdate, replayed: pb.ArchivedUpdate, tolerance: Tolerance, *, several_ranks: bool = False
) -> tuple[list[Quantity], Divergence | None]:
    """Every quantity in the order of computation, and the first number beyond the tolerance.

    `several_ranks`: the logged metrics of tokens are of one rank's share and are left out.
    """
    pairs = list(_pairs(logged, replayed, OF_ALL_RANKS if several_ranks else None))
    by_quantity: dict[str, list[_Pair]] = {}
    for pair in pairs:
        by_quantity.setdefault(pair.quantity, []).append(pair)
    rows = [_quantity(same, tolerance) for same in by_quantity.values()]
    first = next((pair for pair in pairs if not tolerance.holds(pair.logged, pair.replayed)), None)
    if first is None:
        return rows, None
    divergence = Divergence(
        update=logged.update,
        critic_only=int(replayed.metrics[CRITIC_ONLY]),
        trajectory=first.trajectory,
        quantity=first.quantity,
        token=first.token,
        logged=first.logged,
        replayed=first.replayed,
        meaning=meaning(first.quantity, rows),
    )
    return rows, divergence


def _quantity(pairs: Sequence[_Pair], tolerance: Tolerance) -> Quantity:
    worst = max(pairs, key=lambda pair: pair.difference)
    return Quantity(
        quantity=worst.quantity,
        compared=len(pairs),
        differing=sum(not tolerance.holds(pair.logged, pair.replayed) for pair in pairs),
        logged=worst.logged,
        replayed=worst.replayed,
        largest_difference=worst.difference,
    )


def meaning(first: str, rows: Collection[Quantity]) -> str:
    """What usually makes an update diverge at this quantity first."""
    differing = {row.quantity: row.differing for row in rows if not row.ok}
    if sum(differing.values()) == 1:
        return _ALONE
    if first == "values" and "ratios" in differing:
        return _BOTH_NETWORKS
    if first == "ratios" and differing["ratios"] == 1:
        return _ONE_RATIO
    return _MEANINGS.get(first, _DERIVED)


_ALONE = "nothing else of this update differs: most likely this number was changed after it was logged"
_BOTH_NETWORKS = (
    "both networks differ: the state this began from is not the run's (checkpoint, initial model), a step before it "
    "was made otherwise, or its tokens were changed"
)
_ONE_RATIO = "one token's alone: its log-prob in the archive is not the engine's"
_LOSS = (
    "every token agrees: a term of the loss or what it is divided by (trainer.kl_coef, trainer.entropy_coef, "
    "trainer.loss_aggregation), or the initial model, which the KL term refers to"
)
_RATE = "the step was made at another learning rate than the run file of its time asks for"
_DERIVED = "every token agrees: how this number is computed changed, or it was changed after it was logged"
_MEANINGS = {
    "lag": "the lags of its versions, or which version sampled which token, are not those of the run",
    "reward": "the raw components or the preference document are not those that the run trained with",
    "copies": "its group is not the run's: a member is missing or came twice, or group.size changed",
    "values": "only the critic differs: its weights in the checkpoint, its learning rate or its settings "
    "(critic.frozen, critic.updates_per_policy_update)",
    "advantages": "values and reward agree: trainer.gamma, trainer.alpha, the baseline in the checkpoint, or another "
    "trajectory of the update",
    "ratios": "only the policy differs: its weights, its learning rate, or the engine's log-probs in the archive",
    "weights": "ratios agree: trainer.eps_low, trainer.eps_high or trainer.max_lag, or a ratio lies on a bound",
    "critic_loss": _LOSS,
    "policy_loss": _LOSS,
    "critic_grad_norm": _LOSS,
    "policy_grad_norm": _LOSS,
    "skipped": "a pass was finite in one and not in the other: look for a fault of the machine that trained",
    "policy_lr": _RATE,
    "critic_lr": _RATE,
}


def _pairs(logged: pb.ArchivedUpdate, replayed: pb.ArchivedUpdate, only: Collection[str] | None) -> Iterator[_Pair]:
    for one, other in zip(logged.trajectories, replayed.trajectories, strict=True):
        trajectory = Trajectory(one.trajectory)
        yield _Pair("lag", float(one.lag), float(other.lag), trajectory.id)
        yield _Pair("reward", one.reward, other.reward, trajectory.id)
        yield _Pair("copies", float(one.copies), float(other.copies), trajectory.id)
        actions = [t for t, sampled in enumerate(trajectory.action_mask) if sampled]
        for name in PER_TOKEN:
            ours, theirs = getattr(one, name), getattr(other, name)
            for token, a, b in zip_longest(actions, ours, theirs) if ours or theirs else ():
                yield _Pair(name, a, b, trajectory.id, token)
    numbers, again = _numbers(logged), _numbers(replayed)
    for name in [*PER_STEP, *sorted((numbers.keys() | again.keys()) - {*PER_STEP})]:
        if (name in numbers or name in again) and (only is None or name in only):
            yield _Pair(name, numbers.get(name), again.get(name))


def _numbers(update: pb.ArchivedUpdate) -> dict[str, float | str]:
    numbers = {name: value for name, value in update.metrics.items() if name not in OF_THE_MOMENT}
    skipped = f"yes: {update.skipped_reason}" if update.skipped else "no"
    # As text: a learning rate lies below any absolute tolerance.
    return {**numbers, "skipped": skipped, "policy_lr": repr(update.policy_lr), "critic_lr": repr(update.critic_lr)}
