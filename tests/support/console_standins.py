"""Stand-ins for routes that the console reads and that are not built yet, in the shapes of their contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from statistics import fmean, pstdev, quantiles
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
        return compared(newest_components(run_dir, last), current.document, proposed, current.version)

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
        rest = {"scorer": task.name, "kind": "task", "description": "", "deadline_s": 10.0, "low": None, "high": None}
        return {"components": [{"name": name, **rest} for name in sorted(task.components)]}

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
    found: Sequence[tuple[str, dict[str, float]]], now: PreferenceDocument, then: PreferenceDocument, version: int
) -> dict[str, Any]:
    """Both distributions, and the trajectories that move most."""
    whole = [(one, values) for one, values in found if now.components | then.components <= values.keys()]
    lacking = Counter(name for _, values in found for name in then.components - values.keys())
    pairs = [(one, now.value(values), then.value(values), values) for one, values in whole]
    before, after = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    low, high = min([0.0, *before, *after]), max([1.0, *before, *after])
    sides = [(b > fmean(before), a > fmean(after)) for b, a in zip(before, after, strict=True)]
    moved = sorted(zip(pairs, sides, strict=True), key=lambda one: -abs(one[0][2] - one[0][1]))[:10]
    return {
        "asked": 200,
        "trajectories": len(found),
        "compared": len(pairs),
        "version": version,
        "edges": [low + (high - low) * place / 10 for place in range(11)] if pairs else [],
        "now": distribution(before, low, high),
        "then": distribution(after, low, high),
        "flips": {"up": sides.count((False, True)), "down": sides.count((True, False))},
        "examples": [
            {"id": one, "update": 1, "now": b, "then": a, "flips": side[0] != side[1], "components": values}
            for (one, b, a, values), side in moved
        ],
        "missing": dict(lacking),
        "missing_now": 0,
        "not_finite": 0,
        "unreadable": 0,
    }


def distribution(values: Sequence[float], low: float, high: float) -> dict[str, Any]:
    if not values:
        return {"mean": None, "std": None, "deciles": [], "histogram": []}
    counts = Counter(min(int(10 * (value - low) / (high - low)), 9) for value in values)
    return {
        "mean": fmean(values),
        "std": pstdev(values),
        "deciles": [min(values), *quantiles(values, n=10, method="inclusive"), max(values)],
        "histogram": [counts[number] for number in range(10)],
    }
