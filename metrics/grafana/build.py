"""Writes the dashboards' JSON files: `python -m swiftbatch.metrics.grafana.build`."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

from swiftbatch.metrics.grafana.dashboards import DURABILITY, SERVE, SPECULATION, THROUGHPUT, Board, Panel, Query

BOARDS = (THROUGHPUT, SPECULATION, DURABILITY, SERVE)
FOLDER = Path(__file__).parent
TAG = "swiftbatch"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHTS = {"value": 4, "lines": 8, "stack": 8}

AnyPanel = timeseries.Panel | stat.Panel


def render(board: Board) -> str:
    builder = (
        dashboard.Dashboard(f"swiftbatch: {board.title}")
        .uid(f"swiftbatch-{board.name}")
        .description(board.meaning)
        .tags([TAG])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
    )
    for name, query in board.choices:
        builder.with_variable(_variable(name, query))
    for number, panel in enumerate(board.panels, start=1):
        builder.with_panel(_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def _links() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(TAG).type(DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of several values, initially all."""
    variable = dashboard.QueryVariable(name).query(query).datasource(SOURCE)
    variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".*")
    return variable.current(VariableOption(selected=True, text="All", value="$__all"))


def _panel(panel: Panel) -> AnyPanel:
    made = _value() if panel.kind == "value" else _lines(is_stacked=panel.kind == "stack")
    made.title(panel.title).description(panel.meaning).unit(panel.unit).datasource(SOURCE)
    made.span(panel.width).height(HEIGHTS[panel.kind])
    for ref_id, query in zip(ascii_uppercase, panel.queries, strict=False):
        made.with_target(_target(ref_id, query))
    return made


def _value() -> stat.Panel:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(newest)


def _lines(is_stacked: bool) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = timeseries.Panel().legend(legend).min(0).fill_opacity(30 if is_stacked else 0)
    made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if is_stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return made


def _target(ref_id: str, query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref_id).expr(query.expr).legend_format(query.legend).datasource(SOURCE).range()


if __name__ == "__main__":
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(render(board), encoding="utf-8")
