"""A fleet of in-memory engines with a store and a board, driven step by step on a clock that tests move."""

from __future__ import annotations

from pathlib import Path

from sao.board.base import EngineFacts, EngineState
from sao.board.memory import MemoryBoard
from sao.streams.base import StreamUnavailableError
from sao.telemetry.health import Health
from sao.telemetry.traces.memory import MemoryTracer
from sao.weights.control import CONTROL_FILE, ControlFile
from sao.weights.manifest import Manifest
from sao.weights.memory import MemoryVersionStore
from services.weights.canary import Exact
from services.weights.engines.base import PauseMode
from services.weights.engines.memory import MemoryEngine, checkpoint_logprobs
from services.weights.fleet import Fleet
from services.weights.holds import Holds
from services.weights.keeper import Keeper, KeeperSettings
from services.weights.slots import Slots
from tests.support.versions import announce, publish_checkpoint, write_toy_checkpoint

SERVED = ["quiescing", "quiesced", "loading", "verifying", "serving"]
"""The states of a round that succeeds."""


class RecordingBoard(MemoryBoard):
    """Remembers every engine fact written; refuses the first write of the state `outage_at`."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[EngineFacts] = []
        self.outage_at: EngineState | None = None

    async def write_engine(self, facts: EngineFacts) -> None:
        if facts.state is self.outage_at:
            self.outage_at = None
            msg = "the board is away"
            raise StreamUnavailableError(msg)
        self.history.append(facts)
        await super().write_engine(facts)

    def empty(self) -> None:
        """The store behind it came back without its file; what was written before stays in `history`."""
        super().__init__()

    def states(self, engine_id: str = "engine-0") -> list[str]:
        return [facts.state.value for facts in self.history if facts.engine_id == engine_id]


class World:
    """Engines start from seed 0; `publish(seed)` is what the trainer does."""

    def __init__(
        self,
        folder: Path,
        engines: int = 1,
        *,
        engines_out_max: int | None = None,
        mode: PauseMode = PauseMode.RETRACT,
        drift_max: float | None = None,
    ) -> None:
        self.folder = folder
        self.engines_out_max = engines_out_max
        self.mode = mode
        self.now = 1000.0
        self.drift_max = drift_max
        self.board = RecordingBoard()
        self.store = MemoryVersionStore()
        launch = write_toy_checkpoint(folder / "launch", 0)
        self.engines = [MemoryEngine(f"engine-{index}", launch, deadline_s=0.02) for index in range(engines)]
        self.updates = 0
        self.tracer = MemoryTracer()
        self.start()

    def start(self) -> None:
        """A new process of the weights service."""
        self.fleet = Fleet(
            self.board,
            self.store,
            [engine.engine_id for engine in self.engines],
            keep_versions=2,
            holds=Holds(ControlFile(self.folder / CONTROL_FILE), wall_clock=lambda: self.now),
            drift_max=self.drift_max,
            run_dir=self.folder,
        )
        settings = KeeperSettings(attempts=2, poll_s=0.01, probe_s=1.0, cool_down_s=10.0, mode=self.mode)
        self.slots = Slots(self.engines_out_max, hold_s=60.0, clock=lambda: self.now)
        self.keepers = [
            Keeper(
                engine,
                self.fleet,
                settings,
                Exact(1e-4),
                Health(60),
                slots=self.slots,
                clock=lambda: self.now,
                tracer=self.tracer,
            )
            for engine in self.engines
        ]

    async def restore(self) -> None:
        await self.fleet.restore()
        for keeper in self.keepers:
            await keeper.restore()

    async def publish(self, seed: int) -> Manifest:
        return await self.publish_from(write_toy_checkpoint(self.folder / f"seed{seed}", seed))

    async def publish_from(self, source: Path) -> Manifest:
        """A checkpoint directory of one's own making."""
        if self.board.newest_epoch == 0:
            await self.board.new_trainer_epoch()
        manifest = publish_checkpoint(self.store, source, checkpoint_logprobs, update=self.updates)
        self.updates += 1
        await announce(self.board, manifest)
        await self.fleet.follow()
        return manifest

    async def settle(self, seconds: float = 0.0) -> None:
        """Let time pass, then let every keeper act until none has anything to do."""
        self.now += seconds
        for _ in range(20):
            if not any([await keeper.step() for keeper in self.keepers]):
                return
        msg = f"still busy: {[keeper.facts for keeper in self.keepers]}"
        raise AssertionError(msg)

    async def facts(self, index: int = 0) -> EngineFacts:
        return (await self.board.engines())[f"engine-{index}"]
