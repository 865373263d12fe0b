"""What makes a version wait although every engine could serve it: it looks like an accident of training.

Both guards compare with the last version that was let through, by its manifest. The first version of a run is compared
with nothing: it is the operator's own model, whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from sao.weights.control import HeldBy
from sao.weights.manifest import Manifest
from services.weights import metrics


@dataclass(frozen=True)
class Doubt:
    """Which guard holds a version, and why."""

    guard: HeldBy
    detail: str


def doubt(
    manifest: Manifest, before: Manifest | None, *, zeros: Collection[str], drift_max: float | None
) -> Doubt | None:
    """The first guard that holds `manifest` after `before`; None lets it through.

    `zeros`: its tensors that hold nothing but zeros. `drift_max`: the largest mean |log-prob difference| of the
    canaries, in nats; None does not look.
    """
    if before is None:
        return None
    found = drift(manifest, before)
    if found is not None:
        metrics.CANARY_DRIFT.set(found)
    if zeroed := newly_zero(manifest, before, zeros):
        more = f" and {len(zeroed) - 1} more" if len(zeroed) > 1 else ""
        return Doubt("zero_tensor", f"{zeroed[0]}{more} holds nothing but zeros, and did not in {before.version}")
    if drift_max is not None and found is not None and found > drift_max:
        detail = (
            f"the canary's log-probs are {found:.3g} nats from those of {before.version} on average, allowed "
            f"{drift_max:.3g} (weights.canary_drift_max)"
        )
        return Doubt("canary_drift", detail)
    return None


def newly_zero(manifest: Manifest, before: Manifest, zeros: Collection[str]) -> list[str]:
    """Those of `zeros` that were something else in `before`, by name.

    A tensor that was zero already, like a bias that nothing has trained yet, is no accident.
    """
    earlier = {(tensor.name, tensor.dtype): tensor.sha256 for tensor in before.tensors}
    return sorted(
        tensor.name
        for tensor in manifest.tensors
        if tensor.name in zeros and earlier.get((tensor.name, tensor.dtype), tensor.sha256) != tensor.sha256
    )


def drift(manifest: Manifest, before: Manifest) -> float | None:
    """Mean |log-prob difference| over the canary, in nats; None when the two were asked different tokens."""
    if [one.token_ids for one in manifest.canary] != [one.token_ids for one in before.canary]:
        return None
    differences = [
        abs(mine - theirs)
        for one, other in zip(manifest.canary, before.canary, strict=True)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
    ]
    return math.fsum(differences) / len(differences)
