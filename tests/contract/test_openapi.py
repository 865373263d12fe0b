"""Every route answers what its OpenAPI document says: no undocumented status, content type or body.

Routes are found in the applications, so one that is added is tested here without a word about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import SecretStr
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok

from sao.board.memory import MemoryBoard
from sao.tasks.writing import Writing
from sao.telemetry.health import Health
from services.weights.app import build_app
from tests.support.reward_app import wired
from tests.unit.services.weights.world import World

EXAMPLES = {True: 6, False: 2}
"""Requests to each route of each kind, such as its document allows, and such as it forbids; with the token, without."""
Service = Callable[[Path, SecretStr], FastAPI]
TOKEN = "s3cret"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
"""What must hold of each answer."""


def reward(run_dir: Path, token: SecretStr) -> FastAPI:
    """The reward service with its preferences stored; it asks for feedback."""
    board, task = MemoryBoard(), Writing()

    async def store() -> None:
        for document in task.preferences.values():
            await board.put_preference(document)

    asyncio.run(store())
    return wired(task, run_dir, board=board, token=token, settings={"feedback": {}}).app


def weights(run_dir: Path, token: SecretStr) -> FastAPI:
    """The weights service with two versions, the second of which serves."""
    world = World(run_dir)

    async def publish() -> None:
        await world.restore()
        for number in (1, 2):
            await world.publish(number)
            await world.settle(1.5)

    asyncio.run(publish())
    return build_app(world.fleet, world.keepers, Health(60.0), token)


@pytest.mark.parametrize("authorized", [True, False], ids=["with the token", "without it"])
@pytest.mark.parametrize("service", [reward, weights])
def test_every_route_answers_as_documented(service: Service, authorized: bool, tmp_path: Path) -> None:
    app = service(tmp_path, SecretStr(TOKEN))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) == sum(len(methods) for methods in app.openapi()["paths"].values())
    headers = {"Authorization": f"Bearer {TOKEN}"} if authorized else {}
    for operation in operations:
        takes_something = any(operation.iter_parameters()) or bool(operation.body)
        for mode in GenerationMode if takes_something else [GenerationMode.POSITIVE]:
            answers_as_documented(operation, mode, headers)


def answers_as_documented(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, headers: dict[str, str]
) -> None:
    """Send requests of one kind to one route, always the same ones, and check each answer."""

    @settings(
        max_examples=EXAMPLES[bool(headers)],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        response = case.call(headers=headers)
        case.validate_response(response, checks=CHECKS)
        if not headers and operation.path.startswith("/v1"):
            assert response.status_code in {401, 404}  # 404: what was sent makes another path of it

    ask()
