"""Whatever is published, asked, refused and restarted in whatever order, the target is what a few lines say it is."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.operator import CannotServeError, Operator
from tests.support.versions import floats, write_safetensors, write_toy_checkpoint
from tests.unit.services.weights.world import World

HEADS = {"good": (1.0, 2.0, 3.0), "zero": (0.0, 0.0, 0.0), "nan": (1.0, float("nan"), 3.0)}


@dataclass
class Rule:
    """What the target shall be."""

    kinds: dict[str, str] = field(default_factory=dict)
    """Of every version ever published."""
    pin: str = ""
    banned: set[str] = field(default_factory=set)
    """By an operator."""
    doubted: set[str] = field(default_factory=set)
    """By the guard against zeros."""
    accepted: str = ""
    proven: list[str] = field(default_factory=list)
    target: str = ""

    def follow(self, stored: Sequence[str]) -> None:
        if self.pin:
            self.target = self.pin
            return
        for version in reversed(stored):
            if self.kinds[version] == "nan" or version in self.banned | self.doubted:
                continue
            if version > self.accepted and self._became_zero(version, stored):
                self.doubted.add(version)
                continue
            self.target, self.accepted = version, max(self.accepted, version)
            return

    def _became_zero(self, version: str, stored: Sequence[str]) -> bool:
        before = [
            name
            for name in stored
            if name <= self.accepted and self.kinds[name] != "nan" and name not in self.banned | self.doubted
        ]
        return bool(before) and self.kinds[version] == "zero" and self.kinds[before[-1]] != "zero"

    def activate(self, version: str) -> None:
        if self.kinds[version] == "nan":
            raise CannotServeError
        self.pin, self.accepted = version, max(self.accepted, version)
        self.banned.discard(version)
        self.doubted.discard(version)

    def hold(self, version: str, stored: Sequence[str]) -> None:
        if self.kinds[version] == "nan":
            raise CannotServeError
        stay_on = self.pin or self.target
        if stay_on in {"", version}:
            left = [
                name
                for name in self.proven
                if name in stored and name not in self.banned | self.doubted and name != version
            ]
            if not left:
                raise CannotServeError
            stay_on = left[-1]
        self.pin = stay_on
        self.doubted.discard(version)
        self.banned.add(version)

    def resume(self, newest: str) -> None:
        self.pin, self.accepted = "", max(self.accepted, newest)
        self.doubted.clear()


class Run:
    """A world and the rule, told the same."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.rule = Rule()
        self.operator = Operator(self.world.fleet)

    async def act(self, action: str, number: int) -> None:
        stored = self.world.store.names()
        match action:
            case "good" | "zero" | "nan":
                version = await self.world.publish_from(self._checkpoint(action))
                self.rule.kinds[version.version] = action
            case "serve":
                await self.world.settle(1.5)
                if self.rule.target:
                    self.rule.proven = [name for name in self.rule.proven if name != self.rule.target]
                    self.rule.proven.append(self.rule.target)
            case "collect":
                await self.world.fleet.collect()
            case "restart":
                self.world.start()
                await self.world.restore()
                self.operator = Operator(self.world.fleet)
                self.rule.proven.sort()
            case "resume":
                await self.operator.resume(reason="", client="")
                self.rule.resume(max(self.rule.kinds, default=""))
            case _ if stored:
                await self._ask(action, stored[number % len(stored)], stored)
        self.rule.follow(self.world.store.names())
        await self.world.fleet.follow()

    async def _ask(self, action: str, version: str, stored: Sequence[str]) -> None:
        refused = self._refuses(action, version, stored)
        ask = self.operator.activate if action == "activate" else self.operator.hold
        with contextlib.suppress(CannotServeError):
            await ask(version, reason="", client="")
            assert not refused, f"{action} {version} was done"
            return
        assert refused, f"{action} {version} was refused"

    def _refuses(self, action: str, version: str, stored: Sequence[str]) -> bool:
        try:
            if action == "activate":
                self.rule.activate(version)
            else:
                self.rule.hold(version, stored)
        except CannotServeError:
            return True
        return False

    def _checkpoint(self, kind: str) -> Path:
        seed = len(self.rule.kinds)
        source = write_toy_checkpoint(self.world.folder / f"{kind}{seed}", seed)
        tensors = {"model.embed_tokens.weight": floats(seed + 0.5, 1.0), "lm_head.weight": floats(*HEADS[kind])}
        write_safetensors(source / "model.safetensors", tensors)
        return source


actions = st.lists(
    st.tuples(
        st.sampled_from(["good", "good", "zero", "nan", "serve", "collect", "restart", "activate", "hold", "resume"]),
        st.integers(0, 5),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(actions)
async def test_the_target_is_what_the_rule_says_whatever_happened(history: Sequence[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        await run.world.restore()
        for action, number in history:
            await run.act(action, number)
            target = run.world.fleet.target
            assert (target.version if target is not None else "") == run.rule.target, (action, run.rule)
            assert not run.rule.pin or run.rule.pin in run.world.store.names()
