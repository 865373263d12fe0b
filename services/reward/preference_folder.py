"""Every preference version in the run's folder as well, so that a store that loses its file does not lose them.

    <run.dir>/preferences/00000007.json      version 7; never changed once written

Any number of reward services write it: each copies what the board has and the folder lacks, and gives back what the
folder has and the board has lost.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from pathlib import Path

from sao.atomic import fsync_directory, make_directory, write_file
from sao.board.base import Board
from sao.preference import Preference
from sao.streams.base import StreamError
from sao.telemetry.logs import get_logger
from services.reward import metrics

log = get_logger(__name__)

FOLDER = "preferences"
KEEP_EVERY_S = 1.0
_NAME = re.compile(r"(\d{8,})\.json")


class PreferenceFolder:
    """The folder of one run; made at the first write."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER

    def newest(self) -> int:
        """The newest version kept; 0: none."""
        return max(self._versions(), default=0)

    def read_all(self) -> list[Preference]:
        """Every version kept, ascending."""
        return [Preference.model_validate_json(self._file(version).read_bytes()) for version in self._versions()]

    def keep(self, preference: Preference) -> None:
        """Make this version durable; one that is kept stays as it is."""
        path = self._file(preference.version)
        if not path.exists():
            make_directory(self._path)
            mine = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # others may write the same version now
            write_file(mine, preference.model_dump_json().encode())
            mine.replace(path)
            fsync_directory(self._path)

    def _file(self, version: int) -> Path:
        return self._path / f"{version:08d}.json"

    def _versions(self) -> list[int]:
        names = (path.name for path in self._path.iterdir()) if self._path.exists() else ()
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


async def reconcile(board: Board, folder: PreferenceFolder) -> None:
    """Bring the board up to the folder, or the folder up to the board; OSError when the folder refuses."""
    current = await board.preference()
    on_board, kept = current.version if current is not None else 0, folder.newest()
    if on_board < kept and await board.restore_preferences(folder.read_all()):
        metrics.PREFERENCES_RESTORED.inc()
        log.error("the board had lost its preferences, they are restored", found=on_board, restored=kept)
    for version in range(kept + 1, on_board + 1):
        preference = await board.preference(version)
        if preference is not None:
            await asyncio.to_thread(folder.keep, preference)


class Keeper:
    """Reconciles again and again, and says once when the folder refuses and once when it takes again."""

    def __init__(self, board: Board, folder: PreferenceFolder) -> None:
        self._board = board
        self._folder = folder
        self._refused = False

    async def run(self) -> None:
        """Until cancelled; a store that does not answer is asked again the next time."""
        while True:
            try:
                await self.once()
            except StreamError as error:
                metrics.STORE_RETRIES.inc()
                log.warning("preferences could not be compared with the board's", error=str(error))
            await asyncio.sleep(KEEP_EVERY_S)

    async def once(self) -> None:
        """Reconcile; a folder that refuses is counted and asked again the next time. StreamError: the board refused."""
        try:
            await reconcile(self._board, self._folder)
        except OSError as error:
            metrics.PREFERENCE_FOLDER_ERRORS.inc()
            if not self._refused:
                log.error(  # noqa: TRY400 - the disk's words say it
                    "preferences are not kept in the run's folder: a loss of the store would lose them",
                    reason=str(error),
                )
            self._refused = True
        else:
            if self._refused:
                log.info("preferences are kept in the run's folder again")
            self._refused = False
