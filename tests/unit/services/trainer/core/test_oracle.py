"""10,000 random trajectories through the tensor code and through the equations, one number at a time.

Tolerances. The code computes log-ratios and weights in max(float32, the inputs' precision), here `eps`: subtracting
and exponentiating accepted log-ratios of at most 5 nats cannot be wrong by more than 8 eps. Advantages, returns,
lambda and explained variance are computed in float64 whatever the inputs; the first two are rounded to `eps` at the
end. Every input is exact for the oracle: bfloat16 and float32 numbers are float64 numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from services.trainer.core.critic import explained_variance
from services.trainer.core.dis import Verdict, importance_weights
from services.trainer.core.gae import length_adaptive_lambda, skip_observation_gae
from services.trainer.core.losses import critic_loss_sum, policy_loss_sum
from tests.support import float64_oracle as oracle
from tests.unit.services.trainer.core.oracle_cases import DTYPES, HUGE, Case, Kind, make_cases

CASES = 10_000
SUM = 1e-12
"""Absolute, for float64 sums of at most 12 terms below 100."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(CASES, seed=0)


def assert_close(
    found: Tensor | Sequence[float], expected: Sequence[float], *, rtol: float, atol: float, case: Case
) -> None:
    """Number by number, NaN equal to NaN."""
    numbers = found.tolist() if isinstance(found, Tensor) else found
    for x, y in zip(numbers, expected, strict=True):
        assert abs(x - y) <= atol + rtol * abs(y) or (x != x and y != y), f"{x} is not {y}: {case}"


def weights_of(case: Case) -> tuple[list[str], list[float]]:
    """The oracle's verdict and weight of every token, "NONE" and 0 off the mask."""
    tokens = zip(case.mask, case.logp_T.tolist(), case.logp_rollout_T.tolist(), case.stale, strict=True)
    pairs = [
        oracle.importance_weight(logp, rollout, case.eps_low, case.eps_high, stale=stale) if action else ("NONE", 0.0)
        for action, logp, rollout, stale in tokens
    ]
    return [verdict for verdict, _ in pairs], [weight for _, weight in pairs]


def test_every_class_of_cases_occurs(cases: list[Case]) -> None:
    """By what a case is, not by what it was meant to be."""
    seen: Counter[str] = Counter()
    for case in cases:
        verdicts, _ = weights_of(case)
        actions = [verdict for verdict in verdicts if verdict != "NONE"]
        log_ratios = (case.logp_T.double() - case.logp_rollout_T.double())[torch.tensor(case.mask)]
        returns = set(case.window_returns_N.tolist())
        seen.update(actions)
        seen.update({str(case.logp_T.dtype), case.kind.name})
        seen["masked tail"] += not case.mask[-1]
        seen["last token an action"] += case.mask[-1]
        seen["one action"] += len(actions) == 1
        seen["one-token turns"] += not any(a and b for a, b in zip(case.mask, case.mask[1:], strict=False))
        seen["huge"] += bool((log_ratios.abs() > 0.99 * HUGE).logical_and(log_ratios.isfinite()).any())
        seen["all rejected"] += "ACCEPTED" not in actions
        seen["observations NaN"] += bool(case.values_T.isnan().any())
        seen["returns constant"] += len(returns) == 1
        seen["returns vary"] += len(returns) > 1
        seen["no returns"] += not returns
    assert len(cases) == CASES
    for name in (*(kind.name for kind in Kind), *map(str, DTYPES)):
        assert seen[name] >= CASES // 9
    assert seen["no returns"] > 300
    assert all(count > 1000 for name, count in seen.items() if name != "no returns"), seen
    assert {verdict.name for verdict in Verdict} <= seen.keys()


def test_importance_weights(cases: list[Case]) -> None:
    for case in cases:
        weight_T, stats = importance_weights(
            case.logp_T,
            case.logp_rollout_T,
            torch.tensor(case.mask),
            case.eps_low,
            case.eps_high,
            torch.tensor(case.stale),
        )
        verdicts, weights = weights_of(case)
        eps = torch.finfo(case.exact).eps
        assert weight_T.dtype == case.exact
        assert_close(weight_T, weights, rtol=8 * eps, atol=eps, case=case)
        assert [w == 0 for w in weight_T.tolist()] == [w == 0 for w in weights], f"rejected means exactly 0: {case}"
        assert [Verdict(v).name for v in stats.verdict_A.tolist()] == [v for v in verdicts if v != "NONE"], case


def test_skip_observation_gae(cases: list[Case]) -> None:
    for case in cases:
        arguments = (case.reward, case.gamma, case.lam)
        found = skip_observation_gae(case.values_T, torch.tensor(case.mask), *arguments)
        expected = oracle.skip_observation_gae(case.values_T.tolist(), case.mask, *arguments)
        for x_T, y in zip(found, expected, strict=True):
            assert x_T.dtype == case.exact
            assert_close(x_T, y, rtol=torch.finfo(case.exact).eps, atol=SUM, case=case)


def test_length_adaptive_lambda(cases: list[Case]) -> None:
    for case in cases:
        actions = sum(case.mask)
        assert length_adaptive_lambda(actions, case.alpha) == pytest.approx(
            oracle.length_adaptive_lambda(actions, case.alpha), rel=0, abs=1e-15
        )


def test_explained_variance(cases: list[Case]) -> None:
    for case in cases:
        found = explained_variance(case.window_values_N, case.window_returns_N)
        expected = oracle.explained_variance(case.window_values_N.tolist(), case.window_returns_N.tolist())
        assert_close([found], [expected], rtol=1e-9, atol=1e-9, case=case)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.3])
@pytest.mark.parametrize("tokens", [1, 3, 7, 100])
def test_a_constant_return_has_no_explained_variance_though_its_computed_variance_is_not_zero(
    value: float, tokens: int
) -> None:
    returns_N = torch.full((tokens,), value, dtype=torch.float64)
    assert math.isnan(explained_variance(torch.linspace(0, 1, tokens), returns_N))


def differentiated(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient that autograd finds at x."""
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(loss(leaf))
    assert leaf.grad is not None
    return leaf.grad


def policy_loss(case: Case, logp_T: Tensor, logp_rollout_T: Tensor, advantages: list[float]) -> Tensor:
    """The loss sum of the code under test, with the oracle's advantages."""
    mask_T, stale_T = torch.tensor(case.mask), torch.tensor(case.stale)
    weight_T, _ = importance_weights(logp_T, logp_rollout_T, mask_T, case.eps_low, case.eps_high, stale_T)
    return policy_loss_sum(logp_T, weight_T, torch.tensor(advantages, dtype=weight_T.dtype))


def advantages_of(case: Case) -> list[float]:
    return oracle.skip_observation_gae(case.values_T.tolist(), case.mask, case.reward, case.gamma, case.lam)[0]


def check_policy_gradient(case: Case, dtype: torch.dtype) -> None:
    rollout, advantages = case.logp_rollout_T.tolist(), advantages_of(case)
    keep = [verdict == "ACCEPTED" for verdict in weights_of(case)[0]]
    found = differentiated(
        lambda logp_T: policy_loss(case, logp_T, case.logp_rollout_T, advantages), case.logp_T.to(dtype)
    ).tolist()
    expected = oracle.gradient(
        lambda logp: oracle.surrogate_loss(logp, rollout, advantages, keep), case.logp_T.tolist()
    )
    assert_close(found, expected, rtol=1e-6 + 8 * torch.finfo(dtype).eps, atol=1e-7, case=case)
    assert all(slope == 0.0 for slope, kept in zip(found, keep, strict=True) if not kept), f"rejected, moves: {case}"


def test_the_policys_gradient_by_finite_differences(cases: list[Case]) -> None:
    """In float64 on every case, though NaN and infinities are among the log-probs."""
    for case in cases:
        check_policy_gradient(case, torch.float64)


def test_the_policys_gradient_in_the_precision_of_its_log_probs(cases: list[Case]) -> None:
    for case in cases[::4]:  # 4 has no divisor in common with the period of kinds and precisions
        check_policy_gradient(case, case.logp_T.dtype)


def test_the_policys_gradient_through_a_softmax(cases: list[Case]) -> None:
    """With respect to logits, at the log-ratios of the case: f(r) A grad log pi, and no term of grad r."""
    draw = torch.Generator().manual_seed(1)
    for case in cases[: CASES // 20]:
        logits_TV = torch.randn(len(case.mask), 3, dtype=torch.float64, generator=draw)
        chosen = torch.randint(3, (len(case.mask),), generator=draw).tolist()
        check_softmax_gradient(case, logits_TV, chosen)


def check_softmax_gradient(case: Case, logits_TV: Tensor, chosen: list[int]) -> None:
    places = range(len(chosen))
    logp_T = torch.log_softmax(logits_TV, -1)[places, chosen]
    rollout_T = logp_T - (case.logp_T.double() - case.logp_rollout_T.double())
    advantages, rollout = advantages_of(case), rollout_T.tolist()
    keep = [verdict == "ACCEPTED" for verdict in weights_of(case)[0]]

    def loss(logits: list[float]) -> float:
        logp = [oracle.log_softmax(logits[3 * t : 3 * t + 3], chosen[t]) for t in places]
        return oracle.surrogate_loss(logp, rollout, advantages, keep)

    found_TV = differentiated(
        lambda x_TV: policy_loss(case, torch.log_softmax(x_TV, -1)[places, chosen], rollout_T, advantages), logits_TV
    )
    expected = oracle.gradient(loss, logits_TV.flatten().tolist())
    assert_close(found_TV.flatten(), expected, rtol=1e-6, atol=1e-7, case=case)


def check_critic_gradient(case: Case, dtype: torch.dtype) -> None:
    mask_T, values = torch.tensor(case.mask), case.values_T.tolist()
    _, returns = oracle.skip_observation_gae(values, case.mask, case.reward, case.gamma, case.lam)
    returns_T = torch.tensor(returns, dtype=torch.promote_types(dtype, torch.float32))
    found = differentiated(lambda v_T: critic_loss_sum(v_T, returns_T, mask_T), case.values_T.to(dtype)).tolist()
    expected = oracle.gradient(lambda v: oracle.critic_loss(v, returns, case.mask), values)
    assert_close(found, expected, rtol=1e-6 + 8 * torch.finfo(dtype).eps, atol=1e-6, case=case)
    assert all(slope == 0.0 for slope, action in zip(found, case.mask, strict=True) if not action), case


def test_the_critics_gradient_by_finite_differences(cases: list[Case]) -> None:
    """In float64 on every case, though observations have NaN for a value in half of them."""
    for case in cases:
        check_critic_gradient(case, torch.float64)


def test_the_critics_gradient_in_the_precision_of_its_values(cases: list[Case]) -> None:
    for case in cases[::4]:
        check_critic_gradient(case, case.values_T.dtype)
