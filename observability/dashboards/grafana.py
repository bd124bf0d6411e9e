"""Panels and boards as Grafana's JSON, with one builder for each kind of panel.

grafana-foundation-sdk knows the fields and their defaults of the Grafana release in its version.
"""

from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table
from grafana_foundation_sdk.builders import timeseries as lines
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from observability.dashboards.panel import Board, Kind, Panel, Query, Unit

TAG = "kvrecall"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 3
_WIDTH, _HEIGHT = 24 // _COLUMNS, 8
NEW_VERSIONS = (
    'count by (component, version) (kvrecall_build_info{job=~"$job"}) '
    'unless count by (component, version) (kvrecall_build_info{job=~"$job"} offset 5m)'
)
DRAINING = 'max by (worker) (kvrecall_worker_draining{job=~"$job", worker=~"$worker"}) == 1'


def render(board: Board) -> str:
    """Return the JSON text of a dashboard."""
    return JSONEncoder(sort_keys=True, indent=2).encode(build(board).build()) + "\n"


def build(board: Board) -> dashboard.Dashboard:
    """Build a dashboard: variables, links to the others, annotations, panels in rows of three."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"kvrecall-{board.name}")
        .description(board.description)
        .tags([TAG])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("kvrecall")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(False)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(_annotate("New version", NEW_VERSIONS, "blue"))
        .annotation(_annotate("Draining worker", DRAINING, "orange"))
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(_ask("job", "Job", "label_values(kvrecall_build_info, job)"))
        .with_variable(
            _ask("worker", "Worker", 'label_values(kvrecall_worker_info{job=~"$job"}, worker)')
        )
    )
    if board.by_instance:
        source = 'label_values(kvrecall_build_info{job=~"$job"}, instance)'
        built = built.with_variable(_ask("instance", "Instance", source))
    for number, panel in enumerate(board.panels):
        row, column = divmod(number, _COLUMNS)
        place = models.GridPos(h=_HEIGHT, w=_WIDTH, x=column * _WIDTH, y=row * _HEIGHT)
        built = built.with_panel(_draw(panel).id(number + 1).grid_pos(place))
    return built


def _ask(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Build a variable of all values of a label, all of them selected."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _annotate(name: str, expression: str, color: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .expr(expression)
        .icon_color(color)
        .enable(True)
    )


def _draw(panel: Panel) -> Any:
    """Build a panel of any kind."""
    drawn = _DRAWN[panel.kind]()
    steps = [models.Threshold(value=None, color="green")]
    if panel.warn_above is not None:
        steps.append(models.Threshold(value=panel.warn_above, color="red"))
    drawn = (
        drawn.title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    )
    if panel.unit is Unit.RATIO and panel.kind is Kind.LINES:
        drawn = drawn.min(0)
    for name, query in zip(ascii_uppercase, panel.queries, strict=False):
        drawn = drawn.with_target(_to_target(name, query, panel))
    return drawn


def _to_target(name: str, query: Query, panel: Panel) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery()
        .ref_id(name)
        .datasource(SOURCE)
        .expr(query.expression)
        .legend_format(query.legend)
    )
    match panel.kind:
        case Kind.HEATMAP:
            return target.format(PromQueryFormat.HEATMAP).range().exemplar(True)
        case Kind.TABLE:
            return target.format(PromQueryFormat.TABLE).instant()
        case Kind.NUMBER:
            return target.instant()
    has_traces = "time_to_first_token" in query.expression
    return target.range().exemplar(True) if has_traces else target.range()


def _draw_lines() -> lines.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull"])
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return (
        lines.Panel()
        .legend(legend)
        .tooltip(tooltip)
        .fill_opacity(10)
        .thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.LINE)
        )
    )


def _draw_stacked() -> lines.Panel:
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return _draw_lines().fill_opacity(40).stacking(stacking)


def _draw_heatmap() -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    axis = heatmap.YAxisConfig().unit(Unit.SECONDS)
    scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LINEAR)
    drawn = heatmap.Panel().calculate(False).color(color).y_axis(axis).show_tooltip()
    return drawn.scale_distribution(scale)


_DRAWN: Mapping[Kind, Callable[[], Any]] = {
    Kind.LINES: _draw_lines,
    Kind.STACKED: _draw_stacked,
    Kind.HEATMAP: _draw_heatmap,
    Kind.NUMBER: lambda: stat.Panel().graph_mode(common_models.BigValueGraphMode.NONE),
    Kind.TABLE: lambda: table.Panel().show_header(True),
}
