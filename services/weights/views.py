"""What the REST interface shows: versions, what holds them, and which engine serves what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from sao.board.base import EngineFacts
from sao.weights.base import IncompleteVersionError, UnknownVersionError
from sao.weights.manifest import Manifest
from services.weights.fleet import Fleet
from services.weights.rounds import RoundTimings

VersionState = Literal["target", "refused", "held", "waiting", "earlier"]


class VersionView(BaseModel):
    """One stored version, for people and consoles."""

    version: str
    update: int
    parent: str | None
    trainer_epoch: int
    created_s: float
    dtype: str
    tensors: int
    bytes: int
    held_by: list[str]
    """Who has a lease on it, so that it is not collected."""
    target: bool
    refused: str | None


class HeldView(BaseModel):
    """Why a version is not rolled out."""

    by: str
    """operator | zero_tensor | canary_drift"""
    reason: str
    client: str
    since_s: float


class RoundView(BaseModel):
    """The last round of one version on one engine, since the service started."""

    timings: RoundTimings | None
    """None when it failed."""
    error: str


class WeightView(VersionView):
    """A version with what became of it."""

    state: VersionState
    """waiting: newer than the target, and neither refused nor held; earlier: neither of all that."""
    serving: list[str]
    """Engines that serve it now, verified."""
    held: HeldView | None
    pinned: bool
    """Whether publishing is held at it."""
    rounds: dict[str, RoundView]


class PublishingView(BaseModel):
    """Whether newer versions wait, and what for."""

    held: bool
    by: str = ""
    """activate | hold | operator | zero_tensor | canary_drift"""
    version: str = ""
    """What publishing is pinned to; when a guard holds: the version that waits."""
    reason: str = ""
    client: str = ""
    since_s: float | None = None


class FleetView(BaseModel):
    """What all engines shall serve, and what the trainer has published."""

    target: str
    """Empty before the first."""
    published: str
    publishing: PublishingView


class WeightsView(FleetView):
    """Everything."""

    versions: list[WeightView]
    """Oldest first."""
    engines: list[EngineFacts]


def fleet_view(fleet: Fleet) -> FleetView:
    """As things are."""
    return FleetView(target=_target(fleet), published=fleet.published, publishing=_publishing(fleet))


def weights_view(fleet: Fleet, engines: Sequence[EngineFacts]) -> WeightsView:
    """Everything there is to see; reads the store."""
    versions = [_weight(fleet, view, engines) for view in version_views(fleet)]
    return WeightsView(**fleet_view(fleet).model_dump(), versions=versions, engines=list(engines))


def version_views(fleet: Fleet) -> list[VersionView]:
    """Every version that the store has whole, oldest first."""
    leases = fleet.store.leases()
    return [_version(fleet, manifest, leases) for manifest in _manifests(fleet)]


def _manifests(fleet: Fleet) -> list[Manifest]:
    found = []
    for name in fleet.store.names():
        try:
            found.append(fleet.store.manifest(name))
        except (UnknownVersionError, IncompleteVersionError):  # collected since, or damaged: nothing to show
            continue
    return found


def _version(fleet: Fleet, manifest: Manifest, leases: dict[str, str]) -> VersionView:
    return VersionView(
        version=manifest.version,
        update=manifest.update,
        parent=manifest.parent,
        trainer_epoch=manifest.trainer_epoch,
        created_s=manifest.created_s,
        dtype=manifest.dtype,
        tensors=len(manifest.tensors),
        bytes=sum(file.size for file in manifest.files),
        held_by=sorted(holder for holder, version in leases.items() if version == manifest.version),
        target=manifest.version == _target(fleet),
        refused=fleet.refused.get(manifest.version),
    )


def _weight(fleet: Fleet, view: VersionView, engines: Sequence[EngineFacts]) -> WeightView:
    control = fleet.holds.control
    held = control.held.get(view.version)
    rounds = dict(fleet.rounds.get(view.version, {}))  # a copy: this is not the thread that adds to it
    return WeightView(
        **view.model_dump(),
        state=_state(fleet, view),
        serving=[one.engine_id for one in engines if one.in_rotation and one.version == view.version],
        held=HeldView(**held.model_dump()) if held is not None else None,
        pinned=control.pin is not None and control.pin.version == view.version,
        rounds={name: RoundView(timings=one.timings, error=one.error) for name, one in sorted(rounds.items())},
    )


def _state(fleet: Fleet, view: VersionView) -> VersionState:
    if view.target:
        return "target"
    if view.refused is not None:
        return "refused"
    if view.version in fleet.holds.control.held:
        return "held"
    return "waiting" if view.version > _target(fleet) else "earlier"


def _publishing(fleet: Fleet) -> PublishingView:
    control = fleet.holds.control
    if control.pin is not None:
        return PublishingView(held=True, **control.pin.model_dump())
    if control.waiting is not None:
        version, held = control.waiting
        return PublishingView(held=True, version=version, **held.model_dump())
    return PublishingView(held=False)


def _target(fleet: Fleet) -> str:
    return fleet.target.version if fleet.target is not None else ""
