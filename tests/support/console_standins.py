"""Stand-ins for routes that the console reads and that are not built yet, in the shapes of their contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from sao.archive import Archive
from sao.board.base import Board, PreferenceConflictError
from sao.outcome import OUTCOME, Scored
from sao.preference import Preference, PreferenceDocument
from sao.problems import ProblemError, bounded_body
from sao.tasks.base import Task


def standins(run_dir: Path, task: Task, board: Board) -> APIRouter:
    """History, rollback, dry run, hold and components."""
    router = APIRouter()
    hold: dict[str, Any] = {"held": False, "author": "", "reason": "", "since_s": 0.0}

    @router.get("/v1/preferences/history")
    async def history(before: int = 10**9, limit: int = 20) -> dict[str, Any]:
        current = await board.preference()
        newest = min(before, (current.version if current else 0) + 1)
        found = [await board.preference(version) for version in range(newest - 1, max(0, newest - 1 - limit), -1)]
        return {"preferences": [full(one) for one in found if one is not None]}

    @router.post("/v1/preferences/{version}:rollback")
    async def rollback(version: int, request: Request) -> Response:
        wanted = await board.preference(version)
        if wanted is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"there is no preference version {version}")
        expected = request.headers.get("if-match", "").strip('"')
        try:
            stored = await board.put_preference(wanted.document, if_version=int(expected) if expected else None)
        except PreferenceConflictError as error:
            raise ProblemError(HTTPStatus.PRECONDITION_FAILED, str(error)) from error
        body = Preference.model_validate(stored).model_dump_json()
        return Response(body, headers={"ETag": f'"{stored.version}"'}, media_type="application/json")

    @router.post("/v1/preferences:dry-run")
    async def dry_run(request: Request, last: int = 200) -> dict[str, Any]:
        body = await bounded_body(request, 65536, "a preference document")
        proposed = PreferenceDocument.model_validate_json(body)
        current = await board.preference()
        assert current is not None
        return compared(newest_components(run_dir, last), current.document, proposed)

    @router.get("/v1/preferences/hold")
    async def held() -> dict[str, Any]:
        return hold

    @router.post("/v1/preferences:hold")
    async def hold_changes(author: str = "", reason: str = "") -> dict[str, Any]:
        hold.update(held=True, author=author, reason=reason, since_s=1_790_000_000.0)
        return hold

    @router.post("/v1/preferences:resume")
    async def resume() -> dict[str, Any]:
        hold.update(held=False, author="", reason="", since_s=0.0)
        return hold

    @router.get("/v1/components")
    async def components() -> dict[str, Any]:
        return {"components": [{"name": name} for name in sorted(task.components)]}

    return router


def full(preference: Preference) -> dict[str, Any]:
    """With what the contract adds to a stored preference."""
    said = {"author": "", "reason": "", "origin": "put", "restores": None}
    more = {"stored_s": 1_790_000_000.0 + preference.version, **said}
    return {**more, **preference.model_dump(mode="json")}


def newest_components(run_dir: Path, last: int) -> list[tuple[str, dict[str, float]]]:
    """Ids and components of the newest archived trajectories."""
    archive, found = Archive(run_dir / "archive"), []
    for step in reversed(archive.steps()):
        for trained in reversed(archive.load(step).trajectories):
            outcome = OUTCOME.validate_json(trained.outcome_json)
            assert isinstance(outcome, Scored)
            found.append((trained.trajectory.id, dict(outcome.components)))
        if len(found) >= last:
            break
    return found[:last]


def compared(
    found: Sequence[tuple[str, dict[str, float]]], now: PreferenceDocument, then: PreferenceDocument
) -> dict[str, Any]:
    """Both distributions, and the trajectories that move most."""
    lacking = Counter(name for _, components in found for name in then.components - components.keys())
    if lacking:
        return {"trajectories": 0, "now": {}, "then": {}, "flips": 0, "examples": [], "missing": dict(lacking)}
    pairs = [(one, now.value(components), then.value(components)) for one, components in found]
    before, after = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    means = sum(before) / max(len(before), 1), sum(after) / max(len(after), 1)
    moved = sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))[:5]
    return {
        "trajectories": len(pairs),
        "now": distribution(before),
        "then": distribution(after),
        "flips": sum((b >= means[0]) != (a >= means[1]) for _, b, a in pairs),
        "examples": [{"trajectory_id": one, "now": b, "then": a} for one, b, a in moved],
        "missing": {},
    }


def distribution(values: Sequence[float]) -> dict[str, Any]:
    counts = Counter(min(int(10 * value), 9) for value in values)
    return {
        "mean": sum(values) / len(values),
        "min": min(values),
        "max": max(values),
        "histogram": [counts[number] for number in range(10)],
    }
