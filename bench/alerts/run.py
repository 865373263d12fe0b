"""Every alert, recorded series and panel evaluated by a real Prometheus that scrapes a real `sao up`.

An expression of which nothing comes is a finding, unless bench/alerts/empty.py says why. Of an alert both sides of its
comparisons are asked for: a healthy run has something to compare, and fires nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import yaml

from bench.alerts.empty import EXPRESSIONS, SERIES
from sao.config import load_run_config
from sao.supervisor.ports import PortChooser
from tools.monitoring.expressions import names
from tools.monitoring.panels import dashboard_names, panel_expressions, plain
from tools.monitoring.rules import MONITORING, rule_files, rules

RUN = "alerts-check"
ASK_S, START_S, RUN_S = 10.0, 300.0, 900.0
"""Longest waits: for one answer, until the run listens, until it has ended."""
_OFFSET = re.compile(r" offset \w+")
_SETS = {"and", "or", "unless"}
_COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


class Prometheus:
    """A server of its own, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ASK_S)

    def ask(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The answer's series; RuntimeError with what the server says when it refuses."""
        answer = self._client.post("/api/v1/query", data={"query": expr, **({"time": str(at)} if at else {})}).json()
        if answer["status"] != "success":
            msg = f"{expr}: {answer['error']}"
            raise RuntimeError(msg)
        found = answer["data"]["result"]
        return found if answer["data"]["resultType"] == "vector" else [{"value": found}]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def close(self) -> None:
        """Keep no connection."""
        self._client.close()


@contextlib.contextmanager
def scraping(run: Path, work: Path) -> Iterator[Prometheus]:
    """A Prometheus over the run's services, with the checked-in rules, until the block ends."""
    port = PortChooser().free()
    (work / "prometheus.yml").write_text(yaml.safe_dump(scrape_config(run)), encoding="utf-8")
    command = ["prometheus", f"--config.file={work / 'prometheus.yml'}", f"--storage.tsdb.path={work / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (work / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(port)
    try:
        _wait(lambda: _answers(port), START_S, f"Prometheus (log {work / 'prometheus.log'})")
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(timeout=ASK_S)


def scrape_config(run: Path) -> dict[str, Any]:
    """deploy/monitoring/prometheus.yml with this run's ports, every second."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(path) for path in rule_files()]
    ports = ports_of(run)
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"], "labels": {"run": RUN}}]
    return config


def ports_of(run: Path) -> Mapping[str, int]:
    """Where each job's metrics are."""
    config = load_run_config(run / "run.toml", env={})
    return {
        "sao-ingest": config.ingest.metrics_port,
        "sao-rollout": config.rollout.metrics_port,
        "sao-reward": config.reward.port,
        "sao-trainer": config.trainer.metrics_port,
        "sao-weights": config.weights.port,
    }


def watch(server: Prometheus, process: subprocess.Popen[bytes]) -> tuple[float, set[str], list[str]]:
    """Until the run ends: the last moment with every target up, alerts that fired, rules that cannot be evaluated."""
    last, firing, broken = 0.0, set[str](), list[str]()
    deadline = time.monotonic() + RUN_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            msg = f"the run has not ended within {RUN_S:g} s"
            raise TimeoutError(msg)
        now = time.time()
        if len(server.ask('up{job=~"sao-.+"} == 1', now)) == len(ports_of_jobs()):
            last = now
            firing |= {one["metric"]["alertname"] for one in server.ask('ALERTS{alertstate="firing"}', now)}
            broken = [f"{rule['name']}: {rule['lastError']}" for rule in server.rules() if rule["health"] == "err"]
        time.sleep(1.0)
    return last, firing, broken


def ports_of_jobs() -> list[str]:
    """The jobs that deploy/monitoring/prometheus.yml names."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    return [job["job_name"] for job in config["scrape_configs"]]


def expressions() -> Iterator[tuple[str, str, list[str]]]:
    """(kind, name, what to ask for) of every alert, recorded series and panel."""
    for rule in rules():
        if rule.is_alert:
            yield "alert", rule.name, sides(rule.expr)
        else:
            yield "recording", rule.name, [rule.expr, rule.name]
    for dashboard in dashboard_names():
        for panel in panel_expressions(dashboard):
            asked = plain(panel.expr)
            # What an annotation compares now with a minute ago; a run of a minute has no minute before it.
            yield "panel", panel.name, sides(_OFFSET.sub("", asked)) if panel.is_annotation else [asked]


def sides(expr: str) -> list[str]:
    """What an alert compares: the operands of its comparisons and of `and`, `or`, `unless`, numbers left out."""

    def below(node: promql.Expr) -> Iterator[str]:
        if isinstance(node, promql.ParenExpr):
            yield from below(node.expr)
        elif isinstance(node, promql.BinaryExpr) and str(node.op) in _SETS | _COMPARISONS:
            yield from below(node.lhs)
            yield from below(node.rhs)
        elif not isinstance(node, promql.NumberLiteral):
            yield str(node)

    return list(below(promql.parse(expr)))


def judge(server: Prometheus, at: float) -> dict[str, Any]:
    """How many expressions have data, which are empty and why, and which nobody explains."""
    counted: dict[str, int] = {}
    explained: dict[str, str] = {}
    unexplained: dict[str, str] = {}
    for kind, name, asked in expressions():
        counted[kind] = counted.get(kind, 0) + 1
        for expr in asked:
            if server.ask(expr, at):
                continue
            reason = EXPRESSIONS.get(name) or _reason(server, expr, at)
            (explained if reason else unexplained)[f"{name}: {expr}"] = reason or "no data, and no reason is known"
    return {"evaluated": counted, "empty_and_explained": explained, "empty_and_unexplained": unexplained}


def _reason(server: Prometheus, expr: str, at: float) -> str | None:
    """Why an expression is empty: a series it reads, that has no data for a reason."""
    for one in names(expr).series:
        reason = SERIES.get(one.selector) or SERIES.get(one.metric)
        if reason and not server.ask(f"last_over_time({one.selector}[5m])", at):
            return reason
    return None


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            msg = f"waited {timeout_s:g} s for {what}"
            raise TimeoutError(msg)
        time.sleep(0.2)


def check(run: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Scrape the run that `process` starts in `run` until it ends, and judge; TimeoutError when it does not."""

    def listens() -> bool:
        if process.poll() is not None:
            msg = f"sao up ended with {process.returncode} before it listened; see {run.with_suffix('.log')}"
            raise RuntimeError(msg)
        return (run / "run.toml").exists()

    _wait(listens, START_S, f"{run / 'run.toml'}")
    work = run.with_name(f"{run.name}-prometheus")
    work.mkdir()
    with scraping(run, work) as server:
        at, firing, broken = watch(server, process)
        found = judge(server, at) if at else {}
        updates = server.ask("max(sao_trainer_update_number)", at)[0]["value"][1] if at else "0"
    problems = [*broken, *(f"fired: {name}" for name in sorted(firing)), *found.get("empty_and_unexplained", {})]
    if not at:
        problems.append("there was no moment at which every target was up")
    if process.returncode != 0:
        problems.append(f"sao up ended with {process.returncode}; see {run.with_suffix('.log')}")
    return {
        "passed": not problems,
        "problems": problems,
        "update_asked_at": float(updates),
        "fired": sorted(firing),
        **found,
    }


def promtool() -> list[str]:
    """What promtool refuses: rules, unit tests of alerts, scrape configuration."""
    calls = (
        ["check", "rules", *map(str, rule_files())],
        ["check", "config", str(MONITORING / "prometheus.yml")],
        ["test", "rules", *map(str, sorted((MONITORING / "tests").glob("*.yaml")))],
    )
    refused = []
    for call in calls:
        done = subprocess.run(["promtool", *call], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            refused.append(f"promtool {call[0]} {call[1]}: {(done.stdout + done.stderr)[-2000:]}")
    return refused


def result(commit: str, refused: list[str], found: Mapping[str, Any]) -> str:
    """The result file's text."""
    return json.dumps({"proof": "alerts", "commit": commit, "promtool": refused or "ok", **found}, indent=2) + "\n"
