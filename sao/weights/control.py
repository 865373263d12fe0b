"""What an operator, or a guard, has decided about weight versions: one small file that outlives every process.

`<versions_dir>/control.json` has one writer, the weights service; `sao status` reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sao.atomic import write_file
from sao.weights.manifest import VersionName

CONTROL_FILE = "control.json"

HeldBy = Literal["operator", "zero_tensor", "canary_drift"]


class ControlFileError(Exception):
    """The file is there and cannot be read; says what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pin(_Part):
    """The fleet stays on one version, whatever is published, until somebody resumes."""

    version: VersionName
    by: Literal["activate", "hold"]
    """What was asked: this version, or to stay on it because another one was held."""
    reason: str
    client: str
    """Address the request came from."""
    since_s: float
    """Unix seconds."""


class Held(_Part):
    """Why a version is not rolled out."""

    by: HeldBy
    reason: str
    client: str = ""
    since_s: float


class Control(_Part):
    """All of it. `held` by version; what a guard holds is let through by a resume, what an operator holds is not."""

    format: Literal[1] = 1
    pin: Pin | None = None
    held: dict[VersionName, Held] = {}
    accepted: VersionName | None = None
    """Up to here the guards have judged, or somebody has overruled them; the next version is compared with this one."""

    @property
    def waiting(self) -> tuple[str, Held] | None:
        """The newest version that would serve, were it not held; None when nothing waits for that reason."""
        newest = max((name for name in self.held if name > (self.accepted or "")), default=None)
        return (newest, self.held[newest]) if newest is not None else None


class ControlFile:
    """The file, for its one writer and for readers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Control:
        """What was decided; nothing, while there is no file. ControlFileError when it holds something else."""
        try:
            return Control.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return Control()
        except (OSError, ValidationError) as error:
            msg = (
                f"{self.path} says which weight versions are held, and cannot be read: {error}. Mend it, or move it "
                "away: nothing is held then, and the newest version is rolled out"
            )
            raise ControlFileError(msg) from error

    def write(self, control: Control) -> None:
        """Replace it in one step; OSError leaves it as it was."""
        write_file(self.path, control.model_dump_json(indent=1).encode())
