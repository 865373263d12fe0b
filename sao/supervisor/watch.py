"""Looking on while a run goes: its rows, its board and its processes, until it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from signal import Signals

from sao.board.base import EngineFacts
from sao.config import RunConfig
from sao.preference import Preference
from sao.supervisor import initial_model
from sao.supervisor.board_view import BoardView
from sao.supervisor.folder import RunFolder
from sao.supervisor.held import held_notices
from sao.supervisor.log_retention import LogRetention
from sao.supervisor.progress import Progress
from sao.supervisor.status import Status, console_url, lines_of, switch_command
from sao.supervisor.storage import storage_notices
from sao.supervisor.supervisor import Outcome, Supervisor
from sao.supervisor.tracked import GaveUpError
from sao.supervisor.views import View

TICK_S = 0.1
BOARD_EVERY_S = 1.0
STORAGE_EVERY_S = 5.0
CONVERGE_S = 45.0
"""How long the end of a run waits for every engine to serve the newest version."""
FIRST_VERSION_S = 60.0
"""How long every engine may refuse the first version before the start counts as failed."""


class StoppedError(Exception):
    """A signal asked for the end."""

    def __init__(self, number: Signals) -> None:
        self.number = number
        super().__init__(number.name)


class Watch:
    """The supervisor's loop with what people see of it."""

    def __init__(
        self, supervisor: Supervisor, config: RunConfig, folder: RunFolder, board: BoardView, view: View
    ) -> None:
        self._supervisor = supervisor
        self._config = config
        self._folder = folder
        self._board = board
        self._view = view
        self._progress = Progress(folder.rows_file)
        self._start = time.monotonic()
        self._board_at = 0.0
        self._storage_at = 0.0
        self._storage: list[str] = []
        self._logs = LogRetention(folder, config.retention.logs_h)
        self._engines: dict[str, EngineFacts] = {}
        self._preference: Preference | None = None
        self._command = switch_command(config, None)
        self._all_ready = False
        self._trained_at: float | None = None
        self._refused_at: float | None = None

    def until_finished(self, pending: Sequence[Signals]) -> None:
        """Return when the run is over; raises StoppedError or GaveUpError."""
        while not self._step():
            if pending:
                raise StoppedError(pending[0])
            time.sleep(TICK_S)

    def _step(self) -> bool:
        outcome = self._supervisor.tick()
        self._progress.poll()
        if not self._all_ready and self._supervisor.all_ready:
            self._all_ready = True
            self._folder.note("ready")
            self._view.tell("sao", "every process is ready")
        if time.monotonic() >= self._board_at and self._supervisor.board_is_up:
            self._engines, self._preference = self._board.engines(), self._board.preference()
            self._board_at = time.monotonic() + BOARD_EVERY_S
            self._command = switch_command(self._config, self._preference)
            self._check_first_version()
        if time.monotonic() >= self._storage_at and self._supervisor.board_is_up:
            root = self._folder.root
            held = held_notices(self._config, root)
            self._storage = [*held, *storage_notices(self._config, root, self._board)]
            self._storage_at = time.monotonic() + STORAGE_EVERY_S
        if trouble := self._logs.look():
            self._view.tell("sao", trouble)
        self._view.show(self._status(), self._command)
        return outcome is Outcome.FINISHED and self._engines_done()

    def _check_first_version(self) -> None:
        """Fail the start when no engine ever comes to serve the initial weights as the trainer computes them."""
        never = [facts for facts in self._engines.values() if not facts.verified]
        if (
            not self._all_ready
            or not never
            or len(never) < len(self._engines)
            or not any(facts.error for facts in never)
        ):
            self._refused_at = None
            return
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        if now - self._refused_at > FIRST_VERSION_S:
            errors = [f"{facts.engine_id} {facts.version}: {facts.error}" for facts in never]
            reason = f"no engine has passed the canary of the first version within {FIRST_VERSION_S:.0f} s"
            raise GaveUpError(name="weights", reason=reason, tail=errors)

    def _status(self) -> Status:
        warm = self._supervisor.warm_start
        step = initial_model.progress(warm.log_tail(3)) if warm is not None else None
        elapsed_s = time.monotonic() - self._start
        lines = lines_of(self._supervisor, self._engines)
        where = console_url(self._config)
        return Status(elapsed_s, lines, self._progress, step, self._preference, self._storage, console=where)

    def _engines_done(self) -> bool:
        """Whether every engine serves the newest version, or has had its time to."""
        now = time.monotonic()
        if self._trained_at is None:
            self._trained_at = now
            self._board_at = 0.0  # look again before judging
            return False
        trainer = self._board.trainer()
        newest = trainer.version if trainer is not None else self._progress.version
        behind = [name for name, facts in self._engines.items() if facts.version != newest or not facts.in_rotation]
        if behind and now - self._trained_at < CONVERGE_S:
            return False
        said = f"not on {newest} in time: {', '.join(behind)}" if behind else f"every engine serves {newest}"
        self._view.tell("sao", said)
        return True
