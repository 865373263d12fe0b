"""Which releases of the inference server are known to do what docs/engine.md says.

Between releases the meaning of a call changes without a word: before 0.5.21 a refused flush ended the server, and no
error said that new weights were live under an old cache.
"""

from __future__ import annotations

import re

from services.weights.engines.base import EngineError

TESTED = "0.5.23"
OLDEST = "0.5.21"
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class UnsupportedReleaseError(EngineError):
    """Nothing is tried on this engine: what its answers mean is unknown."""


def _numbers(release: str) -> tuple[int, ...]:
    found = _NUMBERS.match(release)
    return tuple(int(number) for number in found.groups()) if found else ()


def is_tested(engine_id: str, release: str) -> bool:
    """Whether every test of ours runs on this release; UnsupportedReleaseError when it is too old, or not readable."""
    if not (numbers := _numbers(release)) or numbers < _numbers(OLDEST):
        detail = f"SGLang {release!r}, expected {OLDEST} or newer (tested: {TESTED}); install sglang=={TESTED} there"
        raise UnsupportedReleaseError(engine_id, "release", detail)
    return release == TESTED
