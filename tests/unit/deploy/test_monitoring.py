"""Alerts, dashboards and monitors name what the code has, say what to do, and fire when they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from bench.alerts import empty
from bench.alerts.run import sides
from deploy.monitoring import dashboards
from deploy.monitoring.dashboards.parts import limit_of
from tests.unit.deploy import files
from tools.manifests import compose
from tools.manifests.render import pods
from tools.metrics_docs import MODULES, declared
from tools.monitoring import expressions
from tools.monitoring.expressions import labels_of, problems
from tools.monitoring.panels import Panel, panel_expressions, plain
from tools.monitoring.rules import MONITORING, OBJECT, Rule, alerts, prometheus_rule, rule_files, rules

ROOT = files.ROOT
OPERATIONS = ROOT / "docs" / "operations.md"
UNIT_TESTS = sorted((MONITORING / "tests").glob("*.yaml"))
CRDS = Path(os.environ.get("SAO_CRDS", ROOT.parent / "shared" / "crds"))
PROMTOOL = shutil.which("promtool")
PANELS = [panel for name in dashboards.BOARDS for panel in panel_expressions(name)]
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is missing: on Debian, apt-get install prometheus"
)
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing: it renders the overlay")


def name_of(value: Rule | Panel) -> str:
    return value.name


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


# --- what the code has


@pytest.mark.parametrize("rule", rules(), ids=name_of)
def test_a_rule_names_only_what_the_code_has(rule: Rule) -> None:
    assert problems(rule.expr) == []


@pytest.mark.parametrize("panel", PANELS, ids=name_of)
def test_a_panel_names_only_what_the_code_has(panel: Panel) -> None:
    assert problems(plain(panel.expr)) == []
    assert set(re.findall(r"\{\{ *(\w+) *\}\}", panel.legend)) <= labels_of(plain(panel.expr))


@pytest.mark.parametrize("service", MODULES)
def test_a_metric_that_is_renamed_breaks_what_uses_it(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {one.metric for text in every_expression() for one in expressions.names(text).series}
    renamed = [name for name, *_ in declared(service) if any(metric.startswith(name) for metric in used)]
    assert renamed, f"nothing watches {service}"
    for name in renamed:
        found = {metric: labels for metric, labels in expressions.known().items() if not metric.startswith(name)}
        monkeypatch.setattr(expressions, "known", lambda found=found: found)
        assert any(f"no metric {name}" in told for text in every_expression() for told in problems(text)), name
        monkeypatch.undo()


def every_expression() -> Iterator[str]:
    yield from (rule.expr for rule in rules())
    yield from (plain(panel.expr) for panel in PANELS)


def test_a_metric_label_and_value_that_nothing_has_are_found() -> None:
    assert problems("sao_trainer_updates_total") == []
    assert problems("rate(sao_trainer_update_total[5m])") == [
        "no metric sao_trainer_update_total: neither in a metrics.py nor recorded"
    ]
    assert problems('sao_trainer_updates_total{engine="e"}') == ["sao_trainer_updates_total has no label engine"]
    assert problems("sum by (engine) (sao_trainer_updates_total)") == ["nothing here has the label engine"]
    assert problems('sao_weights_engine_state{state="away"}') == ["sao_weights_engine_state: state is never away"]
    assert problems('run:sao_rollout_tokens:rate5m{instance="i"}') == [
        "run:sao_rollout_tokens:rate5m has no label instance"
    ]


@pytest.mark.parametrize(
    ("expr", "labels"),
    [
        ("up", "run job instance"),
        ("sum by (run) (up)", "run"),
        ("sum(up)", ""),
        ("1 - sao_weights_lag_updates", "run job instance engine"),
        ("up / on (run) sao_ingest_store_memory_ratio", "run"),
        ("sao_weights_lag_updates > on (run) group_left () max by (run) (up)", "run job instance engine"),
        ("up and on (run) sao_weights_lag_updates", "run job instance"),
        ("sum by (run) (up) or sum by (job) (up)", "run job"),
        ("histogram_quantile(0.5, sum by (run, le) (rate(sao_weights_pause_seconds_bucket[5m])))", "run"),
        ('label_replace(sum(up), "service", "x", "", "")', "service"),
    ],
)
def test_labels_that_an_answer_has(expr: str, labels: str) -> None:
    assert labels_of(expr) == frozenset(labels.split())


# --- alerts


@pytest.mark.parametrize("alert", alerts(), ids=name_of)
def test_an_alert_says_how_bad_where_and_what_to_do(alert: Rule) -> None:
    assert alert.labels["severity"] in {"critical", "warning"}
    assert set(alert.annotations) == {"summary", "description", "runbook_url"}
    assert alert.annotations["runbook_url"] == f"docs/operations.md#{alert.name.lower()}"
    described = alert.annotations["description"]
    shown = set(re.findall(r"\$labels\.(\w+)", described + alert.annotations["summary"]))
    there = labels_of(alert.expr) | set(alert.labels)
    assert shown <= there, "an annotation shows a label that the alert never has"
    assert {"run", "instance"} & there <= shown
    assert "$value" in described or alert.name in {"SaoServiceDown", "SaoInstanceDown"}


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    headings = re.findall(r"^### (Sao\w+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(alert.name for alert in alerts())


def test_a_section_says_what_it_means_what_to_look_at_what_to_do_and_when_to_ignore_it() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    for name, section in re.findall(r"^### (Sao\w+)$\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        told = re.findall(r"^- \*\*(\w+)\*\*", section, re.MULTILINE)
        assert told == ["Means", "Look", "Do", "Ignore"], name


def test_the_operators_object_is_made_from_the_rule_files() -> None:
    assert OBJECT.read_text(encoding="utf-8") == prometheus_rule(), "run `python -m tools.monitoring.rules`"


@cache
def cases() -> list[dict[str, Any]]:
    return [case for path in UNIT_TESTS for case in yaml.load(path.read_text(), yaml.CSafeLoader)["tests"]]


@pytest.mark.parametrize("alert", alerts(), ids=name_of)
def test_an_alert_is_shown_to_fire_not_to_fire_and_to_clear(alert: Rule) -> None:
    clears = False
    for case in cases():
        answers = [bool(one["exp_alerts"]) for one in case["alert_rule_test"] if one["alertname"] == alert.name]
        clears |= answers[:1] == [False] and True in answers and answers[-1:] == [False]
    assert clears, "no test in deploy/monitoring/tests where it is silent, then fires, then is silent"


def test_test_series_are_the_codes() -> None:
    series = {one["series"] for case in cases() for one in case["input_series"]}
    assert {text: told for text in series if (told := problems(text))} == {}


@needs_promtool
def test_promtool_finds_the_rules_sound() -> None:
    done = promtool("check", "rules", *rule_files())
    assert done.returncode == 0, done.stderr


@needs_promtool
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("topic", "written", "mutated"),
    [
        ("disk", "sao_process_disk_used_ratio > 0.8", "sao_process_disk_used_ratio > 0.9"),
        ("store", "sao_ingest_store_pressure_since_seconds > 0", "sao_ingest_store_pressure_since_seconds >= 0"),
    ],
)
def test_a_mutated_rule_fails_its_unit_tests(topic: str, written: str, mutated: str, tmp_path: Path) -> None:
    for folder in ("rules", "tests"):
        shutil.copytree(MONITORING / folder, tmp_path / folder)
    rule_file = tmp_path / "rules" / f"{topic}.yaml"
    text = rule_file.read_text(encoding="utf-8")
    assert text.count(written) == 1
    rule_file.write_text(text.replace(written, mutated), encoding="utf-8")
    assert promtool("test", "rules", tmp_path / "tests" / f"{topic}.yaml").returncode != 0


def test_what_may_be_empty_in_the_real_check_exists() -> None:
    assert {one: told for one in empty.SERIES if (told := problems(one))} == {}
    assert set(empty.EXPRESSIONS) <= {rule.name for rule in rules()} | {panel.name for panel in PANELS}


def test_the_real_check_asks_for_what_an_alert_compares() -> None:
    assert sides("a - b > 2 and on (run) max by (run) (c) == 1 unless d") == ["a{} - b{}", "max by (run)(c{})", "d{}"]
    assert sides("(a or b) > on (run) 0.9 * c") == ["a{}", "b{}", "0.9 * c{}"]


# --- dashboards


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_a_dashboard_is_made_from_its_python(name: str) -> None:
    checked_in = dashboards.file_of(name).read_text(encoding="utf-8")
    assert checked_in == dashboards.rendered(name), "run `python -m deploy.monitoring.dashboards`"


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_a_dashboard_has_variables_annotations_units_and_an_explanation_for_each_panel(name: str) -> None:
    board = json.loads(dashboards.file_of(name).read_text(encoding="utf-8"))
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "run", "job", "instance"]
    assert [one["name"] for one in board["annotations"]["list"]] == ["Preference switched", "Version published"]
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        assert panel["options"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]


def test_dashboards_cover_each_other_no_panel() -> None:
    for name in dashboards.BOARDS:
        panels = json.loads(dashboards.file_of(name).read_text(encoding="utf-8"))["panels"]
        taken: set[tuple[int, int]] = set()
        for grid in (panel["gridPos"] for panel in panels):
            cells = {
                (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
            }
            assert not cells & taken, name
            taken |= cells


def test_a_dashboards_limit_is_its_alerts() -> None:
    assert (limit_of("SaoDiskFilling").value, limit_of("SaoDiskFilling").is_least) == (0.8, False)
    assert (limit_of("SaoExplainedVarianceNegative").value, limit_of("SaoExplainedVarianceNegative").is_least) == (
        0,
        True,
    )
    with pytest.raises(ValueError, match="expected one number"):
        limit_of("SaoEngineBehind")


# --- scrapes


def test_compose_scrapes_each_service_where_it_listens() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    found = {
        (job["job_name"], target)
        for job in config["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    run = files.run_config(files.overlay("cpu"))
    assert found == {
        ("sao-ingest", f"ingest:{run.ingest.metrics_port}"),
        ("sao-rollout", f"rollout:{run.rollout.metrics_port}"),
        ("sao-reward", f"reward:{run.reward.port}"),
        ("sao-trainer", f"trainer:{run.trainer.metrics_port}"),
        ("sao-weights", f"weights:{run.weights.port}"),
    }
    assert {target.partition(":")[0] for _, target in found} <= set(compose.services())


def monitor(name: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((MONITORING / "monitors" / f"{name}.yaml").read_text(encoding="utf-8"))
    return made


def test_monitors_select_what_the_base_has() -> None:
    services = {one["metadata"]["name"]: one for one in files.overlay("cpu") if one["kind"] == "Service"}
    spec = monitor("servicemonitor")["spec"]
    (by_name,) = spec["selector"]["matchExpressions"]
    ports = {endpoint["port"] for endpoint in spec["endpoints"]}
    for name in by_name["values"]:
        labels = services[name]["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == name
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert ports & {port["name"] for port in services[name]["spec"]["ports"]}
    rollout = next(pod for pod in pods(files.overlay("cpu")) if pod.name == "rollout")
    pod_spec = monitor("podmonitor")["spec"]
    assert pod_spec["selector"]["matchLabels"].items() <= rollout.labels.items()
    named = {port["name"] for one in rollout.containers for port in one.get("ports", [])}
    assert {endpoint["port"] for endpoint in pod_spec["podMetricsEndpoints"]} <= named


def test_monitors_give_the_labels_that_alerts_count_on() -> None:
    endpoints = monitor("servicemonitor")["spec"]["endpoints"] + monitor("podmonitor")["spec"]["podMetricsEndpoints"]
    for endpoint in endpoints:
        assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"run", "job", "instance"}
        assert endpoint["relabelings"][0]["replacement"] == "sao-$1"


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused wherever fields are named."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if inner.pop("x-kubernetes-int-or-string", False):
        inner.pop("type", None)
    if "(?i)" in str(inner.get("pattern")):  # Go's regular expressions, of a field that only Thanos reads
        inner.pop("pattern")
    named = isinstance(inner.get("properties"), dict)
    if named and not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in inner:
        inner["additionalProperties"] = False
    return inner


def crd_errors(name: str, made: dict[str, Any]) -> list[str]:
    crd = yaml.load((CRDS / name).read_text(encoding="utf-8"), yaml.CSafeLoader)
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"] if version["served"]]
    schema = schema | {"properties": schema["properties"] | {"metadata": {"type": "object"}}}
    validator = jsonschema_rs.Draft4Validator(closed(schema))
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(made)]


OPERATOR = {
    "servicemonitors.yaml": MONITORING / "monitors" / "servicemonitor.yaml",
    "podmonitors.yaml": MONITORING / "monitors" / "podmonitor.yaml",
    "prometheusrules.yaml": OBJECT,
}
needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"no CRD schemas at {CRDS}: SAO_CRDS names a folder with those of prometheus-operator"
)


@needs_crds
@pytest.mark.parametrize("crd", OPERATOR)
def test_the_operator_takes_it_and_refuses_an_unknown_field(crd: str) -> None:
    made = yaml.safe_load(OPERATOR[crd].read_text(encoding="utf-8"))
    assert crd_errors(crd, made) == []
    assert crd_errors(crd, made | {"spec": made["spec"] | {"surplus": 1}}) != []
    deep = json.loads(json.dumps(made))
    spec = deep["spec"]
    (spec.get("endpoints") or spec.get("podMetricsEndpoints") or spec["groups"][0]["rules"])[0]["intervall"] = "15s"
    assert crd_errors(crd, deep) != []


@needs_kubectl
def test_the_kustomization_renders_with_every_dashboard() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(MONITORING)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert set(found) == {"ConfigMap", "PrometheusRule", "ServiceMonitor", "PodMonitor"}
    assert set(found["ConfigMap"]["data"]) == {f"sao-{name}.json" for name in dashboards.BOARDS}
    assert len(done.stdout) < 2**18, "kubectl apply keeps the whole object in an annotation of 256 KiB"
