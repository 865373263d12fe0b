"""REST and telemetry of the weights service, and its process from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from sao.config import ConfigError
from sao.config.schema import RunConfig
from sao.telemetry.health import Health
from services.weights import app
from services.weights.canary import CalibrateOnFirst, CanaryError, Exact
from tests.support.processes import free_port
from tests.unit.services.weights.world import World


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    await made.restore()
    return made


async def test_versions_and_engines_are_shown(world: World) -> None:
    served = await world.publish(1)
    await world.settle()
    client = TestClient(app.build_app(world.fleet, world.keepers, Health(60), None))
    (version,) = client.get("/v1/versions").json()
    assert version["version"] == served.version
    assert version["held_by"] == ["engine-0", "target"]
    assert version["target"] is True
    assert version["refused"] is None
    (engine,) = client.get("/v1/engines").json()
    assert (engine["engine_id"], engine["state"], engine["verified"]) == ("engine-0", "serving", [served.version])


@pytest.mark.parametrize(("header", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer secret", 200)])
async def test_a_token_is_required_when_configured(world: World, header: str, status: int) -> None:
    client = TestClient(app.build_app(world.fleet, world.keepers, Health(60), SecretStr("secret")))
    for path in ("/v1/versions", "/v1/engines"):
        assert client.get(path, headers={"Authorization": header}).status_code == status
    assert client.get("/healthz").status_code == 200


async def test_metrics_tell_states_and_rounds(world: World) -> None:
    await world.publish(1)
    await world.settle()
    text = TestClient(app.build_app(world.fleet, world.keepers, Health(60), None)).get("/metrics").text
    assert 'sao_weights_engine_state{engine="engine-0",state="serving"} 1.0' in text
    assert 'sao_weights_rounds_total{engine="engine-0",result="ok"}' in text
    assert 'sao_weights_lag_updates{engine="engine-0"}' in text
    assert 'sao_weights_step_seconds_count{step="canary"}' in text


def test_tolerance_follows_the_engines_dtype(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}})
    assert app.tolerance_for(config) == Exact(1e-4)
    bf16 = RunConfig.model_validate({"run": {"dir": str(tmp_path)}, "engine": {"dtype": "bfloat16"}})
    assert isinstance(app.tolerance_for(bf16), CalibrateOnFirst)


@pytest.mark.parametrize(("tolerance", "passes"), [(0.05, True), (0.005, False)])
def test_the_tolerance_of_the_run_file_bounds_the_calibration_of_bfloat16(
    tmp_path: Path, tolerance: float, passes: bool
) -> None:
    (tmp_path / "versions").mkdir()
    tables = {"run": {"dir": str(tmp_path)}, "engine": {"dtype": "bfloat16"}}
    config = RunConfig.model_validate({**tables, "weights": {"canary_tolerance": tolerance}})
    with contextlib.nullcontext() if passes else pytest.raises(CanaryError, match="canary_tolerance"):
        app.tolerance_for(config).check([0.01] * 512)


async def test_engines_are_found_as_the_run_file_says() -> None:
    config = RunConfig.model_validate({"engine": {"urls": ["http://a", "http://b/"], "admin_key": "k"}})
    engines = [app.build_engine(config, located) for located in await app.build_discovery(config).look()]
    assert [(engine.engine_id, engine.url) for engine in engines] == [
        ("engine-0", "http://a"),
        ("engine-1", "http://b"),
    ]
    by_name = RunConfig.model_validate({"engine": {"discovery": "dns", "dns": "localhost:30000"}})
    assert "http://127.0.0.1:30000" in {located.url for located in await app.build_discovery(by_name).look()}


async def test_the_service_does_not_start_while_it_cannot_tell_what_is_held(run_config: RunConfig) -> None:
    run_config.versions_dir.mkdir(parents=True)
    (run_config.versions_dir / "control.json").write_text("{")
    with pytest.raises(ConfigError, match=r"weights\.store_dir: .*control\.json says which weight versions are held"):
        await app.main(run_config, asyncio.Event())


async def test_the_service_starts_answers_and_stops(run_config: RunConfig) -> None:
    port = free_port()
    weights = run_config.weights.model_copy(update={"port": port})
    config = run_config.model_copy(update={"weights": weights})
    stop = asyncio.Event()
    service = asyncio.ensure_future(app.main(config, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(20.0):
        while True:
            try:
                ready = await client.get("/readyz")
            except httpx.TransportError:
                ready = None
            if ready is not None and ready.status_code == 200:
                break
            assert not service.done(), service.exception()
            await asyncio.sleep(0.02)
        assert (await client.get("/v1/engines")).json() == []
        stop.set()
        await service
