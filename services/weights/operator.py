"""What an operator may ask of the fleet: another version, not this one, go on.

Everything asked is on disk before it takes effect and before it is answered, so it outlives this process and the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sao.weights.base import IncompleteVersionError
from sao.weights.manifest import Manifest
from services.weights.fleet import OPERATOR_LEASE, Fleet
from services.weights.preflight import RefusedVersionError


class CannotServeError(Exception):
    """The version exists, but what was asked cannot be done with it; says why and what to do."""


class Operator:
    """One request at a time. UnknownVersionError from each that names a version the store does not have."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._holds = fleet.holds
        self._one = asyncio.Lock()

    async def activate(self, version: str, *, reason: str, client: str) -> None:
        """Bring every engine to `version`, newer or older, and let newer ones wait until `resume`."""
        async with self._one:
            await self._exists(version)
            if version not in await self._fleet.board.versions():
                msg = f"the board does not know version {version}: the trainer announces what it published; then repeat"
                raise CannotServeError(msg)
            await self._stay_on(version, lambda: self._holds.pin(version, reason=reason, client=client))

    async def hold(self, version: str, *, reason: str, client: str) -> None:
        """Never roll out `version`, and nothing else newer than what is served, until `resume`.

        When it is the target, the fleet goes back to the version that was proven last before it.
        """
        async with self._one:
            await self._exists(version)
            await self._usable(version)
            stay_on = await self._other_than(version)
            await self._stay_on(
                stay_on, lambda: self._holds.hold(version, stay_on=stay_on, reason=reason, client=client)
            )

    async def resume(self, *, reason: str, client: str) -> None:
        """Let publishing go on: the newest version that is neither refused nor held by an operator, at once."""
        async with self._one:
            trainer = await self._fleet.board.trainer()
            newest = trainer.version if trainer is not None else ""
            await self._holds.resume(newest, reason=reason, client=client)
            await self._fleet.lease_pinned()
            await self._fleet.follow()

    async def _exists(self, version: str) -> None:
        try:
            await asyncio.to_thread(self._fleet.store.manifest, version)
        except IncompleteVersionError as error:
            raise CannotServeError(str(error)) from error

    async def _usable(self, version: str) -> Manifest:
        if version in self._fleet.refused:
            msg = f"version {version} is refused and will never serve: {self._fleet.refused[version]}"
            raise CannotServeError(msg)
        try:
            return await self._fleet.inspected(version)
        except RefusedVersionError as error:
            raise CannotServeError(str(error)) from error

    async def _other_than(self, version: str) -> str:
        pin, target = self._holds.control.pin, self._fleet.target
        serving = pin.version if pin is not None else target.version if target is not None else version
        if serving != version:
            return serving
        good = await asyncio.to_thread(self._fleet.last_good, version)
        if good is None:
            msg = f"no proven version but {version} is left to serve: activate another one, or wait for the next"
            raise CannotServeError(msg)
        return good

    async def _stay_on(self, version: str, record: Callable[[], Awaitable[None]]) -> None:
        await asyncio.to_thread(self._fleet.store.lease, version, OPERATOR_LEASE)
        try:
            manifest = await self._usable(version)
            await record()
            await self._fleet.keep(version)
        finally:
            await self._fleet.lease_pinned()
        self._fleet.aim(manifest)
