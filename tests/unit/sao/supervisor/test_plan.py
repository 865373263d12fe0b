"""Which processes, with which ports, seeds and start lines."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import RunConfig, dump_run_config, load_run_config
from sao.supervisor.engine import NoEngineEnvironmentError, engine_command, engine_python, engine_seed
from sao.supervisor.plan import MODEL, owns_engines, plan, with_ports
from sao.supervisor.ports import NoFreePortError, PortChooser
from sao.supervisor.valkey import valkey_command


def asked(*sets: str) -> RunConfig:
    return load_run_config(None, ["redis.embedded=true", *sets], env={})


def ports_of(config: RunConfig) -> list[int]:
    """Every port of an effective configuration."""
    urls = [*config.engine.urls, config.redis.url]
    return [
        *(urlsplit(url).port or 0 for url in urls),
        config.ingest.port,
        config.ingest.metrics_port,
        config.rollout.metrics_port,
        config.reward.port,
        config.trainer.metrics_port,
        config.weights.port,
    ]


def test_every_port_is_filled_in_and_none_is_used_twice() -> None:
    config = with_ports(asked("engine.count=3"), PortChooser())

    ports = ports_of(config)
    assert len(ports) == 10
    assert 0 not in ports
    assert len(set(ports)) == len(ports)
    assert config.ingest.target == f"127.0.0.1:{config.ingest.port}"
    assert config.run.dir.is_absolute()


def test_what_was_asked_for_stays(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sets = [f"reward.port={port}", 'engine.urls=["http://10.0.0.1:30000"]', f'run.dir="{tmp_path}"']

    config = with_ports(asked(*sets), PortChooser())

    assert config.reward.port == port
    assert config.engine.urls == ["http://10.0.0.1:30000"]
    assert config.run.dir == tmp_path


def test_no_engine_is_started_where_dns_finds_them(tmp_path: Path) -> None:
    config = with_ports(asked('engine.discovery="dns"', 'engine.dns="engines:30000"'), PortChooser())
    assert config.engine.urls == []
    services = plan(config, tmp_path / "run.toml", tmp_path, own_engines=owns_engines(config), earlier_starts=0)
    assert [service.name for service in services if service.name.startswith("engine")] == []


def test_a_port_that_is_taken_is_named_by_its_key() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        with pytest.raises(NoFreePortError, match=rf"weights\.port: port {port}"):
            with_ports(asked(f"weights.port={port}"), PortChooser())


def test_chosen_ports_lie_below_the_ephemeral_range() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    assert all(PortChooser().free() < max(low, 32768) for _ in range(5))


def test_the_effective_file_reads_back_as_the_effective_configuration(tmp_path: Path) -> None:
    config = with_ports(asked("trainer.trajectories_per_update=4"), PortChooser())
    file = tmp_path / "run.toml"
    file.write_text(dump_run_config(config))

    assert load_run_config(file, env={}) == config


def test_a_run_has_these_processes_engines_first(tmp_path: Path) -> None:
    config = with_ports(asked("engine.count=2", f'run.dir="{tmp_path}"'), PortChooser())

    services = plan(config, tmp_path / "run.toml", tmp_path / "model", own_engines=True, earlier_starts=0)

    names = [one.name for one in services]
    assert names == ["engine-0", "engine-1", "valkey", "trainer", "ingest", "reward", "weights", "worker"]
    waits = {one.name: set(one.after) for one in services}
    assert waits["valkey"] == set()
    assert waits["engine-0"] == {MODEL}
    assert waits["trainer"] == {MODEL, "valkey"}
    assert [one.name for one in services if one.ends_run] == ["trainer"]


def test_servers_that_are_there_already_are_not_started(tmp_path: Path) -> None:
    sets = ["redis.embedded=false", 'engine.urls=["http://10.0.0.1:30000"]']
    config = with_ports(asked(*sets), PortChooser())

    services = plan(config, tmp_path / "run.toml", tmp_path, own_engines=False, earlier_starts=0)

    assert [one.name for one in services] == ["trainer", "ingest", "reward", "weights", "worker"]
    assert all(one.after == {MODEL} for one in services)


def test_trainer_and_worker_are_looked_for_where_they_bind(tmp_path: Path) -> None:
    config = with_ports(asked("ingest.bind=127.0.0.9"), PortChooser())

    services = plan(config, tmp_path / "run.toml", tmp_path, own_engines=False, earlier_starts=0)

    hosts = {one.name: urlsplit(one.health).hostname for one in services if one.health is not None}
    assert {hosts[name] for name in ("trainer", "ingest", "worker")} == {"127.0.0.9"}
    assert {hosts[name] for name in ("reward", "weights")} == {"127.0.0.1"}


def test_a_secret_reaches_children_by_the_environment_and_never_by_the_command_line(tmp_path: Path) -> None:
    config = with_ports(asked("auth.token=open-sesame", "engine.api_key=for-data"), PortChooser())

    services = plan(config, tmp_path / "run.toml", tmp_path, own_engines=False, earlier_starts=0)
    commands = [one.command(0) for one in services if one.name != "valkey"]

    assert all("open-sesame" in command.env.values() for command in commands)
    assert not any("open-sesame" in part for command in commands for part in command.argv)


@given(st.integers(0, 2**31 - 1))
def test_engines_and_their_starts_have_seeds_of_their_own(seed: int) -> None:
    seeds = [engine_seed(seed, index, start) for index in range(4) for start in range(4)]

    assert len(set(seeds)) == len(seeds)
    assert seeds == [engine_seed(seed, index, start) for index in range(4) for start in range(4)]
    assert all(0 <= one < 2**31 for one in seeds)


def test_an_engine_is_told_where_and_what_to_serve(tmp_path: Path) -> None:
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    sets = ["engine.api_key=for-data", f'engine.environment="{tmp_path / "env"}"', "engine.max_running_requests=5"]
    config = with_ports(asked(*sets), PortChooser())

    command = engine_command(config, 0, tmp_path / "model", 2, tmp_path / "log")

    options = dict(zip(command.argv[3::2], command.argv[4::2], strict=True))
    assert command.argv[:3] == (str(python), "-m", "sglang_cpuref.serve")
    assert options["--model"] == str(tmp_path / "model")
    assert options["--port"] == config.engine.urls[0].rpartition(":")[2]
    assert options["--seed"] == str(engine_seed(0, 0, 2))
    assert options["--max-running-requests"] == "5"
    assert command.env["SAO_ENGINE_API_KEY"] == "for-data"
    assert "for-data" not in command.argv


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_returns_routes_exactly_when_they_are_replayed(tmp_path: Path, *, replay: bool) -> None:
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    sets = [f'engine.environment="{tmp_path / "env"}"', f"trainer.routing_replay={str(replay).lower()}"]

    command = engine_command(with_ports(asked(*sets), PortChooser()), 0, tmp_path / "model", 0, tmp_path / "log")

    assert (command.argv[-2:] == ("--", "--enable-return-routed-experts")) is replay
    assert ("--enable-return-routed-experts" in command.argv) is replay


def test_a_missing_engine_environment_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoEngineEnvironmentError, match="make setup"):
        engine_python(tmp_path / "nothing")


def test_valkey_keeps_everything_and_listens_to_nobody_else(tmp_path: Path) -> None:
    command = valkey_command(asked("redis.maxmemory_mb=77").redis, 7001, tmp_path / "valkey", tmp_path / "log")

    options = dict(zip(command.argv[1::2], command.argv[2::2], strict=True))
    assert options["--bind"] == "127.0.0.1"
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory"] == "77mb"
    assert options["--maxmemory-policy"] == "noeviction"
    assert (tmp_path / "valkey").is_dir()
