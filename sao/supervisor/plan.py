"""Which processes a run has, what each waits for, and when it counts as ready."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sao.config import RunConfig, secret_environment
from sao.supervisor.engine import engine_command
from sao.supervisor.ports import PortChooser
from sao.supervisor.probes import Probe, http_ok, redis_ok
from sao.supervisor.process import Command
from sao.supervisor.valkey import valkey_command

MODEL = "model"
"""What stands in `after` for: the initial checkpoint is there."""

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
DEEPSPEED = {"DS_BUILD_OPS": "0"}


@dataclass(frozen=True, slots=True)
class Service:
    """One process of the run."""

    name: str
    command: Callable[[int], Command]
    """What to start, given how often it was started before in this run."""
    ready: Probe
    after: frozenset[str]
    """Names that must be ready before it starts."""
    address: str
    """Where people and scrapers find it."""
    health: str | None
    """URL of its /healthz; none: it has none of ours."""
    ends_run: bool = False
    """Its end with exit code 0 is the run's: it is not started again."""


def owns_engines(config: RunConfig) -> bool:
    """Whether engines are started with the run: nothing says where others are."""
    return not config.engine.urls and config.engine.discovery == "static"


def with_ports(config: RunConfig, chooser: PortChooser) -> RunConfig:
    """The effective configuration: every port a number, every address filled in, the run's folder absolute.

    Raises NoFreePortError with the key of a port that is asked for and taken.
    """
    folder = config.run.dir.expanduser().resolve()
    ingest_port = chooser.take(config.ingest.port, "ingest.port")
    ingest = {
        "port": ingest_port,
        "target": config.ingest.target or f"{_reachable(config.ingest.bind)}:{ingest_port}",
        "metrics_port": chooser.take(config.ingest.metrics_port, "ingest.metrics_port"),
    }
    own = config.engine.count if owns_engines(config) else 0
    engines = config.engine.urls or [f"http://127.0.0.1:{chooser.free()}" for _ in range(own)]
    redis = f"redis://127.0.0.1:{chooser.free()}/0" if config.redis.embedded else config.redis.url
    reward_port = chooser.take(config.reward.port, "reward.port")
    weights_port = chooser.take(config.weights.port, "weights.port")
    rollout_port = chooser.take(config.rollout.metrics_port, "rollout.metrics_port")
    trainer_port = chooser.take(config.trainer.metrics_port, "trainer.metrics_port")
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder}),
            "redis": config.redis.model_copy(update={"url": redis}),
            "engine": config.engine.model_copy(update={"urls": engines, "count": max(1, len(engines))}),
            "ingest": config.ingest.model_copy(update=ingest),
            "rollout": config.rollout.model_copy(update={"metrics_port": rollout_port}),
            "reward": config.reward.model_copy(update={"port": reward_port}),
            "trainer": config.trainer.model_copy(update={"metrics_port": trainer_port}),
            "weights": config.weights.model_copy(update={"port": weights_port}),
        }
    )


def plan(config: RunConfig, run_file: Path, model: Path, *, own_engines: bool, earlier_starts: int) -> list[Service]:
    """Every process of the effective configuration, engines first: they take longest.

    `earlier_starts`: starts of the run before this one, so that a resumed engine samples anew.
    """
    services = []
    if own_engines:
        services += [_engine(config, index, model, earlier_starts) for index in range(len(config.engine.urls))]
    if config.redis.embedded:
        services.append(_valkey(config))
    reward = f"http://{_reachable(config.reward.bind)}:{config.reward.port}"
    weights = f"http://{_reachable(config.weights.bind)}:{config.weights.port}"
    telemetry = _reachable(config.ingest.bind)  # where ingest binds, trainer and worker show their metrics
    modules = [
        ("trainer", "services.trainer", f"http://{telemetry}:{config.trainer.metrics_port}"),
        ("ingest", "services.rollout.ingest", f"http://{telemetry}:{config.ingest.metrics_port}"),
        ("reward", "services.reward", reward),
        ("weights", "services.weights", weights),
        ("worker", "services.rollout", f"http://{telemetry}:{config.rollout.metrics_port}"),
    ]
    after = frozenset({MODEL} | ({"valkey"} if config.redis.embedded else set()))
    secrets = secret_environment(config)
    for name, module, url in modules:
        argv = (sys.executable, "-m", module, "--config", str(run_file))
        env = THREADS | secrets | (DEEPSPEED if name == "trainer" else {})
        command = Command(name, argv, _log(config, name), env)
        address = f"{url} (gRPC {config.ingest.target})" if name == "ingest" else url
        ready, health = http_ok(f"{url}/readyz"), f"{url}/healthz"
        services.append(Service(name, _always(command), ready, after, address, health, ends_run=name == "trainer"))
    return services


def _engine(config: RunConfig, index: int, model: Path, earlier_starts: int) -> Service:
    name, url = f"engine-{index}", config.engine.urls[index]
    key = config.engine.api_key.get_secret_value() if config.engine.api_key else None
    return Service(
        name=name,
        command=lambda start: engine_command(config, index, model, earlier_starts + start, _log(config, name)),
        ready=http_ok(f"{url}/model_info", key),
        after=frozenset({MODEL}),
        address=url,
        health=None,
    )


def _valkey(config: RunConfig) -> Service:
    port = int(config.redis.url.rpartition(":")[2].partition("/")[0])
    command = valkey_command(config.redis, port, config.run.dir / "valkey", _log(config, "valkey"))
    return Service("valkey", _always(command), redis_ok("127.0.0.1", port), frozenset(), config.redis.url, None)


def _always(command: Command) -> Callable[[int], Command]:
    return lambda _start: command


def _log(config: RunConfig, name: str) -> Path:
    return config.run.dir / "logs" / f"{name}.log"


def _reachable(bind: str) -> str:
    return "127.0.0.1" if bind in {"0.0.0.0", "::", ""} else bind  # noqa: S104  # compared, not bound
