"""The equations of docs/algorithm.md once more, one number at a time in Python's float64.

Written from the mathematics alone, and by another way wherever there is one: the importance ratio is compared as a
ratio and not as its logarithm, an advantage is an explicit sum and not a recursion, lambda is an exact fraction, and
gradients are central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction


def importance_weight(
    logp: float, logp_rollout: float, eps_low: float, eps_high: float, *, stale: bool = False
) -> tuple[str, float]:
    """What becomes of one action token and its f(r): r inside (1 - eps_low, 1 + eps_high), else 0."""
    log_ratio = logp - logp_rollout
    if not math.isfinite(log_ratio):
        return "NON_FINITE", 0.0
    if stale:
        return "STALE", 0.0
    ratio = math.exp(log_ratio) if log_ratio < 700.0 else math.inf  # math.exp raises where float64 ends
    if eps_low < 1.0 and ratio <= 1.0 - eps_low:  # with eps_low 1 the bound is r > 0, which every r is
        return "REJECTED_LOW", 0.0
    if ratio >= 1.0 + eps_high:
        return "REJECTED_HIGH", 0.0
    return "ACCEPTED", ratio


def skip_observation_gae(
    values: Sequence[float], mask: Sequence[bool], reward: float, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_j = sum over k >= j of (gamma lambda)^(k - j) delta_k over action tokens, and G_j = A_j + V_j; else 0."""
    actions = [t for t, action in enumerate(mask) if action]
    value = [values[t] for t in actions] + [0.0]
    rho = [0.0] * (len(actions) - 1) + [reward]
    delta = [rho[j] + gamma * value[j + 1] - value[j] for j in range(len(actions))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for j, t in enumerate(actions):
        advantages[t] = math.fsum((gamma * lam) ** (k - j) * delta[k] for k in range(j, len(actions)))
        returns[t] = advantages[t] + value[j]
    return advantages, returns


def length_adaptive_lambda(n_actions: int, alpha: float) -> float:
    """1 - 1 / (alpha l), clamped to [0, 1], in exact arithmetic."""
    return float(max(Fraction(0), min(Fraction(1), 1 - 1 / (Fraction(alpha) * n_actions))))


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """1 - Var(R - V) / Var(R); NaN where R does not vary."""
    if len(set(returns)) < 2:
        return math.nan
    return 1.0 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)


def variance(x: Sequence[float]) -> float:
    """Mean squared distance from the mean."""
    mean = math.fsum(x) / len(x)
    return math.fsum((number - mean) ** 2 for number in x) / len(x)


def surrogate_loss(
    logp: Sequence[float], logp_rollout: Sequence[float], advantages: Sequence[float], keep: Sequence[bool]
) -> float:
    """-sum over the kept tokens of r A, whose gradient at fixed `keep` and A is that of the policy's loss."""
    tokens = [t for t, kept in enumerate(keep) if kept]
    return -math.fsum(math.exp(logp[t] - logp_rollout[t]) * advantages[t] for t in tokens)


def critic_loss(values: Sequence[float], returns: Sequence[float], mask: Sequence[bool]) -> float:
    """Sum over the action tokens of (V - R)^2."""
    return math.fsum((values[t] - returns[t]) ** 2 for t, action in enumerate(mask) if action)


def log_softmax(logits: Sequence[float], index: int) -> float:
    """log of the index-th probability."""
    most = max(logits)
    return logits[index] - most - math.log(math.fsum(math.exp(z - most) for z in logits))


def gradient(function: Callable[[list[float]], float], x: Sequence[float], step: float = 1e-5) -> list[float]:
    """Central differences of `function` at `x`, one coordinate after the other."""
    slopes = []
    for t in range(len(x)):
        ahead, behind = list(x), list(x)
        ahead[t] += step
        behind[t] -= step
        slopes.append((function(ahead) - function(behind)) / (2 * step))
    return slopes
