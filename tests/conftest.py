"""Fixtures that start real parts once: Valkey, tiny checkpoints, one SGLang engine for the whole session."""

from __future__ import annotations

import logging
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import redis
import structlog
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from sao.config import RunConfig, load_run_config
from sao.redis_client import RunKeys
from tests.support.engine import ENGINE_PYTHON, EngineServer, engine_server
from tests.support.stores import claim
from tests.support.valkey import valkey

# How long one example takes says how busy the machine is, nothing about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

# A shell that starts the tests in the background has them ignore it, and with them every process that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@cache
def starts_an_engine(file: str) -> bool:
    """Whether the tests in this file start one, or share the session's."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return "sglang_engine" in text or "pytest.mark.engine" in text


class EnginesInOneWorker(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """All that needs an engine in one worker, one after the other; every other file beside it in the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "engine" if starts_an_engine(file) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first."""
    items.sort(key=lambda item: not starts_an_engine(item.nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> EnginesInOneWorker:
    """An engine takes a core and gigabytes, and ends when it was not up in time: never two of them at once."""
    return EnginesInOneWorker(config, log)


@pytest.fixture(autouse=True)
def logs_go_where_they_went() -> Iterator[None]:
    """A process that is started within a test configures its logs, and would for every later test too."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root = logging.getLogger()
        root.handlers[:] = [
            one for one in root.handlers if not isinstance(one.formatter, structlog.stdlib.ProcessorFormatter)
        ]
        root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey for the session; tests keep apart by their run names."""
    with valkey(tmp_path_factory.mktemp("valkey"), "--maxmemory", "512mb", "--maxmemory-policy", "noeviction") as url:
        yield url


@pytest.fixture
def run_config(valkey_url: str, tmp_path: Path) -> RunConfig:
    """A configuration of its own for each test, on the shared Valkey, where a trainer seems to have begun."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    with redis.Redis.from_url(valkey_url) as client:
        claim(client, RunKeys(name))
    return load_run_config(
        None, [f"run.name={name}", f'run.dir="{tmp_path / "run"}"', f'redis.url="{valkey_url}"'], env={}
    )


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random checkpoints of the same shape, seeds 0 and 1."""
    from tests.support.tiny_checkpoint import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    return make_tiny_checkpoint(folder / "seed0", 0), make_tiny_checkpoint(folder / "seed1", 1)


@pytest.fixture(scope="session")
def sglang_engine(
    tiny_checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """The real engine, started once (about 40 s); tests that load other weights load seed 0 again at their end."""
    if not ENGINE_PYTHON.exists():
        pytest.skip("the engine environment is missing: run `make setup`")
    with engine_server(tiny_checkpoints[0], tmp_path_factory.mktemp("engine")) as engine:
        yield engine
