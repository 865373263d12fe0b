"""What a doctor said is right when it names the closed edge, and that edge alone."""

from __future__ import annotations

import pytest

from tools.manifests.edges import Edge
from tools.network.check import Told, wrong


def told(*failing: str, code: int = 1) -> Told:
    checks = [{"check": name, "status": "fail", "found": "no connection in time"} for name in failing]
    warned = {"check": "disk run folder", "status": "warn", "found": "not on this machine"}
    return Told(code, [*checks, warned], 1.0)


STORE = Edge("rollout", "valkey", "6379/TCP")
ENGINE = Edge("weights", "engine", "30000/TCP")
UDP, TCP = Edge("rollout", "dns", "53/UDP"), Edge("rollout", "dns", "53/TCP")


@pytest.mark.parametrize(
    ("edge", "failing"),
    [
        (STORE, ["edge rollout -> valkey"]),
        (ENGINE, ["edge weights -> engine http://10.231.0.5:30000", "edge weights -> engine http://10.231.0.6:30000"]),
        (UDP, ["edge rollout -> dns 53/UDP"]),
        (TCP, ["edge rollout -> dns 53/TCP"]),
    ],
)
def test_the_edge_alone_is_right(edge: Edge, failing: list[str]) -> None:
    assert wrong(edge, told(*failing)) == []


@pytest.mark.parametrize(
    ("edge", "failing", "code", "problem"),
    [
        (STORE, [], 0, ["exit 0, expected 1", "names no edge"]),
        (STORE, ["edge rollout -> ingest"], 1, ["names rollout -> ingest"]),
        (
            STORE,
            ["edge rollout -> valkey", "edge rollout -> ingest"],
            1,
            ["names rollout -> ingest, rollout -> valkey"],
        ),
        (STORE, ["edge rollout -> valkey", "health trainer"], 1, ["unrelated: health trainer"]),
        (UDP, ["edge rollout -> dns 53/TCP"], 1, ["names rollout -> dns 53/TCP"]),
        (UDP, ["edge rollout -> dns 53/UDP", "name valkey"], 1, ["unrelated: name valkey"]),
        (
            STORE,
            ["edge rollout, weights -> valkey"],
            1,
            ["unrelated: edge rollout, weights -> valkey", "names no edge"],
        ),
    ],
)
def test_anything_else_is_a_problem(edge: Edge, failing: list[str], code: int, problem: list[str]) -> None:
    assert wrong(edge, told(*failing, code=code)) == problem
