"""Which trajectories are traced, what an attribute may be, and what a bad collector or a missing extra costs."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import ConfigError, RunConfig, load_run_config
from sao.config.schema import TracesSection
from sao.ids import uuid7
from sao.telemetry import logs, metrics
from sao.telemetry.traces import OFF, connect
from sao.telemetry.traces.base import ATTRIBUTES, SPANS, carried, context_of, context_of_version, new_context, sampled
from sao.telemetry.traces.memory import MemoryTracer
from sao.telemetry.traces.otlp import CLOSE_S, OtlpTracer
from tests.support.otlp import receiver
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "traces.md"

trace_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
shares = st.floats(0, 1)


def traced(endpoint: str = "") -> RunConfig:
    return load_run_config(None, [f'traces.endpoint="{endpoint}"'], env={})


# --- sampling


@given(trace_ids, shares, shares)
def test_a_larger_share_holds_all_of_a_smaller_one(trace_id: str, one: float, other: float) -> None:
    assert sampled(trace_id, min(one, other)) <= sampled(trace_id, max(one, other))


@given(trace_ids)
def test_all_or_nothing(trace_id: str) -> None:
    assert sampled(trace_id, 1.0)
    assert not sampled(trace_id, 0.0)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_ids_made_at_one_moment_are_sampled_by_the_share(share: float) -> None:
    """A UUIDv7 begins with the time, and the two bits in its middle are always the same."""
    draw = random.Random(0)
    base = int(uuid7().replace("-", ""), 16) >> 80 << 80 | 0x7 << 76 | 0b10 << 62
    ids = [f"{base | draw.getrandbits(12) << 64 | draw.getrandbits(62):032x}" for _ in range(4000)]

    found = sum(sampled(one, share) for one in ids) / len(ids)

    assert abs(found - share) < 0.04


def test_every_service_decides_alike() -> None:
    rollout, reward = MemoryTracer(0.3), MemoryTracer(0.3)
    ids = [uuid7() for _ in range(200)]
    for one in ids:
        with rollout.span("episode", context_of(one)) as span:
            traceparent = span.traceparent
        reward.span("score", context_of(one, traceparent)).end()

    roots = {span.context.trace_id: span.context.span_id for span in rollout.spans}
    assert 0 < len(roots) < len(ids)
    assert {span.context.trace_id: span.parent_id for span in reward.spans} == roots


def test_what_is_not_sampled_is_not_carried_either() -> None:
    tracer = MemoryTracer(0.0)
    with tracer.span("publish", new_context(), always=True) as span:
        assert carried() == ()
    assert tracer.fields(span.context) == {}
    assert span.traceparent.endswith("-00")
    assert tracer.spans == []


def test_a_version_is_traced_whatever_its_name_comes_to() -> None:
    tracer = MemoryTracer(1e-9)
    for number in range(20):
        tracer.span("round", context_of_version("run", f"v{number:08}"), always=True).end()
    assert len(tracer.spans) == 20


# --- where spans hang


@pytest.mark.parametrize(
    "traceparent",
    ["", "no traceparent", f"00-{'1' * 32}-{'2' * 16}-01", f"00-{'1' * 32}-{'2' * 16}", f"01-{'1' * 32}-{'2' * 16}-01"],
)
def test_a_traceparent_that_is_not_of_this_trajectory_is_not_believed(traceparent: str) -> None:
    trajectory_id = uuid7()
    found = context_of(trajectory_id, traceparent)
    assert (found.trace_id, found.span_id) == (trajectory_id.replace("-", ""), "")


def test_outside_of_a_span_nothing_is_carried() -> None:
    assert carried() == ()


# --- attributes


@given(st.text(st.sampled_from("az09_.:/+- \n\t{}\"'\u00e9\u4e2d"), max_size=200))
def test_of_a_text_only_what_a_name_may_hold_is_kept(text: str) -> None:
    tracer = MemoryTracer()
    with tracer.span("score", new_context()) as span:
        span.set(component=text)
        span.fail(text)
    value = tracer.spans[0].attributes["component"]
    assert isinstance(value, str)
    assert len(value) <= 128
    assert not set(value) & set(" \n\t{}\"'")


def test_the_page_explains_every_span_and_attribute() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in SPANS if f"| `{name}` |" not in page] == []
    assert [name for name in sorted(ATTRIBUTES) if f"`sao.{name}`" not in page] == []


# --- settings


@pytest.mark.parametrize(
    "setting",
    [
        'traces.endpoint="collector:4317"',
        'traces.endpoint="http://u:p@host:1"',
        'traces.endpoint="http://collector"',
        'traces.endpoint="http://collector:otlp"',
        'traces.endpoint="http://collector:65536"',
        'traces.endpoint="http://::1:4317"',
        "traces.sample=1.5",
        "traces.other=1",
    ],
)
def test_a_wrong_setting_is_refused_with_its_key(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_run_config(None, [setting], env={})


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracer = connect(traced(), "reward")
    assert tracer is OFF
    with tracer.span("score", context_of(uuid7())) as span:
        assert not span.recording


BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["ingest", "--config", sys.argv[1]]
import sao.cli.main, services.rollout.app, services.weights.keeper
import services.rollout.ingest.__main__
"""


def test_the_extra_is_wanted_only_by_an_endpoint_and_then_named(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[traces]\nendpoint = "http://127.0.0.1:4317"\n')

    command = [sys.executable, "-c", BLOCKED, str(run_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)

    assert done.returncode == 2, done.stderr
    assert "traces.endpoint" in done.stderr
    assert "pip install 'sao[traces]'" in done.stderr


# --- bad collectors


def exports_failed() -> float:
    return float(metrics.SPANS_DROPPED.labels("export_failed")._value.get())


def more_failed_than(before: float) -> bool:
    return exports_failed() > before


async def test_a_collector_that_is_down_is_said_once_and_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("test", "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tracer = OtlpTracer("test", "run", TracesSection(endpoint=f"http://127.0.0.1:{port}", timeout_s=0.1))
    for _ in range(2):
        before = exports_failed()
        tracer.span("queue", new_context()).end()
        tracer._wake.set()
        await eventually(partial(more_failed_than, before), what="a failed export")
    await tracer.close()

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["spans dropped"]


async def test_a_collector_that_never_answers_keeps_no_process_from_ending() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        tracer = OtlpTracer("test", "run", TracesSection(endpoint=f"http://127.0.0.1:{hole.getsockname()[1]}"))
        tracer.span("queue", new_context()).end()
        began = time.monotonic()
        await tracer.close()

    assert time.monotonic() - began < CLOSE_S + 1.0
    assert not tracer._thread.is_alive()


async def test_what_waits_at_the_end_arrives() -> None:
    with receiver() as collector:
        tracer = OtlpTracer("test", "run", TracesSection(endpoint=collector.endpoint))
        for _ in range(1500):
            tracer.span("queue", new_context()).end()
        await asyncio.wait_for(tracer.close(), 5)
        assert len(collector.spans) == 1500
        assert {service for service, _ in collector.spans} == {"sao-test"}


async def test_a_mistake_in_an_export_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as collector:
        tracer = OtlpTracer("test", "run", TracesSection(endpoint=collector.endpoint))
        with monkeypatch.context() as broken:
            broken.setattr(tracer, "_readable", lambda span: 1 / 0)
            before = exports_failed()
            tracer.span("queue", new_context()).end()
            tracer._wake.set()
            await eventually(lambda: exports_failed() - before == 1, what="a failed export")
        tracer.span("queue", new_context()).end()
        await tracer.close()
        assert len(collector.spans) == 1
