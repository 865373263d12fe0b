"""Start line of one SGLang engine, in the environment that `make setup` built for it."""

from __future__ import annotations

import random
from pathlib import Path
from urllib.parse import urlsplit

from sao.config.schema import RunConfig
from sao.supervisor.process import Command

KIT = Path(__file__).parents[2] / "engine"


class NoEngineEnvironmentError(RuntimeError):
    """The engine's virtual environment is not there."""


def engine_python(environment: Path) -> Path:
    """Its interpreter; a relative path is looked for here, then beside the sao package."""
    for base in (Path.cwd(), KIT.parent):
        python = base / environment / "bin" / "python"
        if python.exists():
            return python
    msg = f"engine.environment: no Python in {environment}/bin; run `make setup`, or give servers in engine.urls"
    raise NoEngineEnvironmentError(msg)


def engine_seed(run_seed: int, index: int, start: int) -> int:
    """A seed of its own for each engine and each start: a repeated seed repeats the samples."""
    return random.Random(f"{run_seed}/{index}/{start}").getrandbits(31)  # noqa: S311  # no secret


def engine_command(config: RunConfig, index: int, model: Path, start: int, log: Path) -> Command:
    """Start line of engine `index`; `start` counts its starts within the run."""
    settings = config.engine
    address = urlsplit(settings.urls[index])
    argv = [
        str(engine_python(settings.environment)),
        *("-m", "sglang_cpuref.serve"),
        *("--model", str(model)),
        *("--host", address.hostname or "127.0.0.1"),
        *("--port", str(address.port)),
        *("--seed", str(engine_seed(config.run.seed, index, start))),
        *("--dtype", settings.dtype),
        *("--max-running-requests", str(settings.max_running_requests)),
        *("--max-total-tokens", str(settings.max_total_tokens)),
    ]
    if config.trainer.routing_replay:
        argv += ["--", "--enable-return-routed-experts"]
    env = {"PYTHONUNBUFFERED": "1"}
    if settings.api_key is not None:
        env["SAO_ENGINE_API_KEY"] = settings.api_key.get_secret_value()
    if settings.admin_key is not None:
        env["SAO_ENGINE_ADMIN_KEY"] = settings.admin_key.get_secret_value()
    return Command(f"engine-{index}", tuple(argv), log, env)
