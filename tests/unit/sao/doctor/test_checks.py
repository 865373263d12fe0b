"""Each check of `sao doctor`: what is well is ok, and each thing that is wrong is told with what to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sao.config import RunConfig, load_run_config
from sao.doctor import checks
from sao.doctor.checks import (
    Check,
    Clock,
    Disk,
    EngineSeen,
    HealthSeen,
    Observations,
    Reached,
    Status,
    TokenTried,
    judge,
)
from sao.doctor.edges import Edge
from sao.doctor.names import Resolved

GOOD_STORE = {
    "redis_version": "7.2.4",
    "valkey_version": "9.1.2",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "maxmemory_policy": "noeviction",
    "maxmemory": 100 * 2**20,
    "used_memory": 10 * 2**20,
}
GOOD_ENGINE = {"version": "0.5.23", "enable_cache_report": True, "dtype": "float32", "random_seed": 1}


@pytest.fixture
def config() -> RunConfig:
    return load_run_config(None, ["trainer.max_lag=4"], env={})


def only(found: Sequence[Check], status: Status) -> str:
    """The one check that is not ok, as `name: found; do`."""
    (bad,) = [check for check in found if check.status is not Status.OK]
    assert bad.status is status
    assert bad.expected
    assert bad.do
    return f"{bad.name}: {bad.found}; {bad.do}"


def test_a_deployment_that_is_well_has_nothing_but_ok(config: RunConfig) -> None:
    seen = Observations(
        edges=[Reached(Edge(("rollout", "weights"), "engine", "http://e:1"))],
        clocks=[Clock("store", 0.3, 0.1), Clock("engine", -2.9, 1.0)],
        tokens=[TokenTried("ingest", "auth.token", accepted=True, found="accepted")],
        disks=[Disk("run folder", "/run", free=60 << 30, total=100 << 30)],
        engines=[EngineSeen("http://e:1", GOOD_ENGINE), EngineSeen("http://e:2", GOOD_ENGINE | {"random_seed": 2})],
        health=[HealthSeen("trainer", alive=True, sentence="working")],
        store=GOOD_STORE,
        packages={"redis": ("6", "8.1.0")},
        protocol="abc",
        lag=4.0,
    )
    found = judge(config, seen)
    assert {check.status for check in found} == {Status.OK}, found
    assert [check.name for check in found][:2] == ["edge rollout, weights -> engine http://e:1", "token ingest"]
    assert len(found) == 17


def test_a_dead_edge_is_named_with_its_ends_and_one_without_an_address_is_not_tried() -> None:
    dead = checks.edge(Reached(Edge(("reward",), "valkey", "v:6379"), "ConnectionError: refused"))
    assert only([dead], Status.FAIL).startswith("edge reward -> valkey: v:6379: ConnectionError: refused; is valkey up")
    assert "ingest.target" in only([checks.edge(Reached(Edge(("rollout",), "ingest", "")))], Status.WARN)
    assert "--service trainer=URL" in only([checks.edge(Reached(Edge(("prometheus",), "trainer", "")))], Status.WARN)


UDP, TCP = (Edge(("reward",), "dns", f"10.96.0.10:53/{protocol}") for protocol in ("UDP", "TCP"))


def test_a_closed_way_to_the_name_server_is_told_apart_from_a_name_that_nobody_has(config: RunConfig) -> None:
    store = Edge(("reward",), "valkey", "valkey:6379")
    nowhere = Resolved("valkey", problem="no such name")
    answered = Observations(edges=[Reached(UDP), Reached(TCP), Reached(store, unresolved="valkey")], names=[nowhere])
    found = {check.name: check.status for check in judge(config, answered)}
    assert found == {
        "edge reward -> dns 53/UDP": Status.OK,
        "edge reward -> dns 53/TCP": Status.OK,
        "edge reward -> valkey": Status.WARN,
        "name valkey": Status.FAIL,
    }
    silent = Observations(
        edges=[Reached(UDP, "no answer within 2 s"), Reached(TCP), Reached(store, unresolved="valkey")], names=[nowhere]
    )
    found = {check.name: check.status for check in judge(config, silent)}
    assert found["edge reward -> dns 53/UDP"] is Status.FAIL
    assert found["edge reward -> valkey"] is Status.WARN
    assert "name valkey" not in found, "the name is not what is wrong"


def test_without_tcp_only_long_answers_are_missing(config: RunConfig) -> None:
    store = Edge(("reward",), "valkey", "valkey:6379")
    names = [Resolved("valkey", ["10.0.0.1"])]
    seen = Observations(edges=[Reached(UDP), Reached(TCP, "no answer within 2 s"), Reached(store)], names=names)
    told = only(judge(config, seen), Status.FAIL)
    assert told.startswith("edge reward -> dns 53/TCP: 10.96.0.10:53/TCP: no answer within 2 s; ")
    assert "too long for UDP" in told


def test_one_name_server_of_two_that_answers_is_enough_to_blame_the_name(config: RunConfig) -> None:
    other = Edge(("reward",), "dns", "10.96.0.11:53/UDP")
    names = [Resolved("valkey", problem="no such name")]
    seen = Observations(edges=[Reached(UDP, "no answer within 2 s"), Reached(other)], names=names)
    assert "name valkey" in {check.name for check in judge(config, seen) if check.status is Status.FAIL}


def test_an_engine_that_hangs_fails_and_one_that_is_at_work_is_warned_of(config: RunConfig) -> None:
    hangs = EngineSeen("http://e:1", {}, silent="/model_info: nothing came in time", hangs=True)
    assert "restart it if it hangs" in only(list(checks.engines(config, [hangs])), Status.FAIL)
    busy = EngineSeen("http://e:1", {}, silent="/server_info: nothing came in time")
    assert "it may be loading weights" in only(list(checks.engines(config, [busy])), Status.WARN)


def test_a_refused_token_names_its_setting() -> None:
    refused = TokenTried("ingest", "auth.token", accepted=False, found="refused")
    assert "auth.token" in only([checks.token(refused)], Status.FAIL)


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"redis_version": "6.2.1", "valkey_version": ""}, Status.FAIL, "store version: 6.2.1"),
        ({"aof_enabled": 0}, Status.FAIL, "store persistence: no append-only file"),
        ({"aof_last_write_status": "err"}, Status.FAIL, "aof_last_write_status err"),
        ({"aof_last_bgrewrite_status": "err"}, Status.FAIL, "aof_last_bgrewrite_status err"),
        ({"maxmemory_policy": "allkeys-lru"}, Status.FAIL, "store eviction: allkeys-lru"),
        ({"maxmemory": 0}, Status.FAIL, "store memory: no bound"),
        ({"used_memory": 80 * 2**20}, Status.WARN, "store memory: 80% of 100 MiB"),
        ({"used_memory": 100 * 2**20}, Status.FAIL, "store memory: 100%"),
    ],
)
def test_a_store_that_could_lose_work_is_told(
    config: RunConfig, change: dict[str, object], status: Status, told: str
) -> None:
    assert told in only(list(checks.store(config, GOOD_STORE | change)), status)


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"version": "0.5.20"}, Status.FAIL, "0.5.20"),
        ({"version": ""}, Status.FAIL, "it does not say"),
        ({"version": "0.5.24"}, Status.WARN, "make prove-weights"),
        ({"enable_cache_report": False}, Status.FAIL, "start it with --enable-cache-report"),
        ({"dtype": "bfloat16"}, Status.FAIL, "--dtype float32"),
    ],
)
def test_an_engine_that_is_not_as_it_must_be_is_told(
    config: RunConfig, change: dict[str, object], status: Status, told: str
) -> None:
    assert told in only(list(checks.engines(config, [EngineSeen("http://e:1", GOOD_ENGINE | change)])), status)


def test_routing_replay_needs_its_flag() -> None:
    config = load_run_config(None, ["trainer.routing_replay=true"], env={})
    seen = [EngineSeen("http://e:1", GOOD_ENGINE)]
    assert "--enable-return-routed-experts" in only(list(checks.engines(config, seen)), Status.FAIL)
    seen = [EngineSeen("http://e:1", GOOD_ENGINE | {"enable_return_routed_experts": True})]
    assert all(check.status is Status.OK for check in checks.engines(config, seen))


def test_two_engines_of_one_seed_are_named(config: RunConfig) -> None:
    told = only(
        list(checks.engines(config, [EngineSeen(url, GOOD_ENGINE) for url in ("http://a", "http://b")])), Status.FAIL
    )
    assert "engine seeds: one seed for http://a, http://b" in told


def test_a_stalled_service_fails_with_its_own_words() -> None:
    assert "stalled: 9 s" in only(
        [checks.health(HealthSeen("trainer", alive=False, sentence="stalled: 9 s"))], Status.FAIL
    )


def test_what_trains_and_is_too_old_is_told(config: RunConfig) -> None:
    assert "trainer lag: 5 updates" in only(list(checks.lag(config, 5.0)), Status.WARN)
    assert list(checks.lag(config, None)) == []


@pytest.mark.parametrize(
    ("ahead", "status"), [(3.1, Status.WARN), (-3.1, Status.WARN), (11.2, Status.FAIL), (-11.2, Status.FAIL)]
)
def test_clocks_that_differ_are_told_beyond_what_the_measurement_can_tell(ahead: float, status: Status) -> None:
    assert "NTP" in only([checks.clock(Clock("store", ahead, 1.0))], status)


@pytest.mark.parametrize(
    ("seen", "status", "told"),
    [
        (Disk("run folder", "/r", None), Status.WARN, "is not on this machine"),
        (Disk("run folder", "/r", 200 << 20, 100 << 30), Status.FAIL, "200 MiB free"),
        (Disk("run folder", "/r", 20 << 30, 100 << 30), Status.WARN, "80% used"),
    ],
)
def test_a_disk_that_fills_up_is_told_before_and_after(seen: Disk, status: Status, told: str) -> None:
    assert told in only([checks.disk(seen, 256 << 20)], status)


def test_packages_that_are_missing_or_old_are_named() -> None:
    found = list(checks.packages({"redis": ("6", "5.3"), "grpcio": ("1.71.2", None), "rich": ("13", "13.9")}))
    assert [(check.name, check.found) for check in found] == [
        ("package grpcio", "not installed"),
        ("package redis", "5.3"),
    ]


def test_a_probe_that_broke_fails(config: RunConfig) -> None:
    assert "edge a -> b: KeyError" in only(
        judge(config, Observations(failed=[("edge a -> b", "KeyError")])), Status.FAIL
    )
