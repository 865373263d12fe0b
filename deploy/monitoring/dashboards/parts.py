"""What the dashboards are made of.

In an expression `{@}` stands for the variables run, job and instance, `{@run,instance}` for those named: a recorded
series has only the labels that its name says. `unit` is Grafana's name of one ("s", "percentunit", "none", ...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import promql_parser as promql
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from tools.monitoring.expressions import nodes
from tools.monitoring.rules import alerts

SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
VARIABLES = ("run", "job", "instance")
_PLACEHOLDER = re.compile(r"(?<=\{)@(run,instance|run)?")
_WIDTH = {"stat": 4, "graph": 8}
SWITCHES = (
    "max by (run) (sao_reward_preference_version{@run}) > max by (run) (sao_reward_preference_version{@run} offset 1m)"
)
PUBLISHED = (
    "max by (run) (sao_weights_published_update{@run}) > max by (run) (sao_weights_published_update{@run} offset 1m)"
)


def filled(expr: str) -> str:
    """The expression with its placeholders written out."""

    def matchers(found: re.Match[str]) -> str:
        named = found[1].split(",") if found[1] else VARIABLES
        return ", ".join(f'{name}=~"${name}"' for name in named)

    return _PLACEHOLDER.sub(matchers, expr)


def quantile(histogram: str, by: str = "", *, share: float = 0.95) -> str:
    """The value that `share` of what a histogram observed does not exceed, for each `by`."""
    labels = ", ".join(["run", *([by] if by else []), "le"])
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate({histogram}_bucket{{@}}[$__rate_interval])))"


def mean_of(summary: str, by: str = "", *, window: str = "$__rate_interval") -> str:
    """The mean of what a summary or histogram observed, for each `by`."""
    labels = ", ".join(["run", *([by] if by else [])])
    total, count = (f"sum by ({labels}) (rate({summary}_{what}{{@}}[{window}]))" for what in ("sum", "count"))
    return f"{total} / {count}"


@dataclass(frozen=True)
class Limit:
    """What an alert compares with, and on which side of it all is well."""

    value: float
    is_least: bool


def limit_of(alert: str) -> Limit:
    """The number that the alert compares with; ValueError when its limit is a series, or there are several."""
    (expr,) = [one.expr for one in alerts() if one.name == alert]
    found = {
        Limit(node.rhs.val, is_least=str(node.op) == "<")
        for node in nodes(promql.parse(expr))
        if isinstance(node, promql.BinaryExpr)
        and str(node.op) in {">", "<"}
        and isinstance(node.rhs, promql.NumberLiteral)
    }
    if len(found) != 1:
        msg = f"{alert} compares with {found or 'no number'}: expected one number"
        raise ValueError(msg)
    return found.pop()


@dataclass(frozen=True)
class Line:
    """One query of a panel and what its lines are called."""

    expr: str
    legend: str = "{{instance}}"


@dataclass
class Board:
    """One dashboard, filled from the left to the right, row by row."""

    name: str
    title: str
    description: str
    show_versions: bool = False
    _made: dashboard.Dashboard = field(init=False)

    def __post_init__(self) -> None:
        made = dashboard.Dashboard(f"SAO / {self.title}").uid(f"sao-{self.name}").description(self.description)
        made.tags(["sao"]).refresh("30s").time("now-3h", "now").timezone("browser").editable()
        made.tooltip(models.DashboardCursorSync.CROSSHAIR)
        made.link(
            dashboard.DashboardLink("SAO")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["sao"])
            .keep_time(True)
            .include_vars(True)
        )
        made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        for variable, query in (
            ("run", 'label_values(up{job=~"sao-.+"}, run)'),
            ("job", 'label_values(up{job=~"sao-.+", run=~"$run"}, job)'),
            ("instance", 'label_values(up{job=~"$job", run=~"$run"}, instance)'),
        ):
            made.with_variable(
                dashboard.QueryVariable(variable)
                .label(variable.capitalize())
                .datasource(SOURCE)
                .query(query)
                .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
                .include_all(True)
                .all_value(".*")
                .multi(True)
                .current(models.VariableOption(text="All", value="$__all", selected=True))
            )
        made.annotation(_annotation("Preference switched", SWITCHES, "purple", shown=True))
        made.annotation(_annotation("Version published", PUBLISHED, "blue", shown=self.show_versions))
        self._made = made

    def row(self, title: str) -> None:
        """A heading above what follows."""
        self._made.with_row(dashboard.Row(title))

    def number(
        self, title: str, expr: str, *, unit: str, why: str, alert: str = "", red_from: float | None = None
    ) -> None:
        """One number now, red beyond the alert's limit, or from `red_from` on."""
        panel = stat.Panel().title(title).description(why).datasource(SOURCE).unit(unit)
        panel.height(4).span(_WIDTH["stat"]).with_target(_query(Line(expr, "{{run}}"), "A", instant=True))
        panel.thresholds(_thresholds(alert, red_from)).color_mode(common_models.BigValueColorMode.VALUE)
        panel.graph_mode(common_models.BigValueGraphMode.NONE)
        panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        self._made.with_panel(panel)

    def graph(
        self, title: str, lines: Sequence[Line], *, unit: str, why: str, alert: str = "", most: float | None = None
    ) -> None:
        """Lines over time; with `alert` its limit is drawn."""
        panel = timeseries.Panel().title(title).description(why).datasource(SOURCE).unit(unit)
        panel.height(8).span(_WIDTH["graph"]).fill_opacity(8).line_width(1).show_points(
            common_models.VisibilityMode.NEVER
        )
        panel.legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        if alert:
            panel.thresholds(_thresholds(alert))
            panel.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
            )
        if most is not None:
            panel.min(0).max(most)
        for place, line in enumerate(lines):
            panel.with_target(_query(line, chr(ord("A") + place), instant=False))
        self._made.with_panel(panel)

    def json(self) -> str:
        """As Grafana reads it, ids numbered, keys sorted."""
        built = self._made.build()
        for number, panel in enumerate(built.panels or [], start=1):
            panel.id_val = number
        return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def _query(line: Line, letter: str, *, instant: bool) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(filled(line.expr)).legend_format(line.legend).ref_id(letter).datasource(SOURCE)
    return query.instant() if instant else query.range()


def _thresholds(alert: str, red_from: float | None = None) -> dashboard.ThresholdsConfig:
    limit = limit_of(alert) if alert else Limit(red_from, is_least=False) if red_from is not None else None
    below, above = ("red", "green") if limit is not None and limit.is_least else ("green", "red")
    steps = [models.Threshold(value=None, color=below)]
    if limit is not None:
        steps.append(models.Threshold(value=limit.value, color=above))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _annotation(name: str, expr: str, colour: str, *, shown: bool) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery().name(name).datasource(SOURCE).expr(filled(expr)).icon_color(colour).enable(shown)
