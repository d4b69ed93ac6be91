"""Describe dashboards and render them as Grafana JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dlrm_api.status import Phase

SCHEMA_VERSION = 39
"""Dashboard schema of Grafana 11; later versions read it too."""
WIDTH = 24
"""Columns of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "bargauge", "table"]
Color = Literal["green", "yellow", "red", "blue", "orange", "purple"]
PHASE_COLORS: Mapping[str, Color] = {
    Phase.PENDING: "yellow",
    Phase.SCHEDULING: "yellow",
    Phase.RESTORING: "orange",
    Phase.RUNNING: "green",
    Phase.SUSPENDED: "purple",
    Phase.RESTARTING: "orange",
    Phase.SUCCEEDED: "blue",
    Phase.FAILED: "red",
}
"""Colors of phases that someone looks for; the others have those of Grafana's palette."""


@dataclass(frozen=True)
class Query:
    """Hold one PromQL expression; ``legend`` is a template over its labels."""

    expr: str
    legend: str = ""
    column: str = ""
    """Name of the value in a table; empty: only the labels are shown."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Describe one panel. ``unit`` is Grafana's name of a unit, such as ``s``, ``bytes``, ``percentunit``."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    decimals: int | None = None
    most: float | None = None
    """Upper end of the axis, if fixed."""
    shows_names: bool = False
    """Show the legend of each value instead of the value."""
    thresholds: tuple[tuple[float, Color], ...] = ()
    """Color of values from each of these on; below the first they are green, or red if the first is green."""
    colors: Mapping[str, Color] = field(default_factory=dict)
    """Colors of series, by legend."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Units of a table's columns, if others."""
    link: str = ""
    """URL that a table's rows lead to."""


@dataclass(frozen=True)
class Row:
    """Group panels under one heading, side by side as they fit."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """Describe a template variable, read from the labels of a metric."""

    name: str
    label: str
    query: str
    several: bool = False


@dataclass(frozen=True)
class Annotation:
    """Mark on all panels when something happened: whenever ``expr`` is above 0."""

    name: str
    expr: str
    color: Color
    is_time: bool = False
    """The value is the time of the event (Unix seconds)."""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """Describe one dashboard; its file is named after ``uid``."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    def panels(self) -> Iterator[Panel]:
        """Return all panels, in order."""
        for row in self.rows:
            yield from row.panels


def within_an_hour(counter: str, by: str) -> str:
    """Return the increase of a counter within an hour if its series begin with their first event.

    ``increase`` alone leaves out what a series begins with. One that was not there an hour ago has counted all that it
    holds since then.
    """
    older = f"last_over_time({counter}[10m] offset 1h)"
    return f"sum by ({by}) ((increase({counter}[1h]) and {older}) or {counter})"


def to_json(dashboard: Dashboard) -> str:
    """Return the JSON that Grafana imports. Equal dashboards give equal texts."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["dlrm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation(each) for each in dashboard.annotations]},
        "links": [{"type": "dashboards", "title": "dlrm", "tags": ["dlrm"], "asDropdown": True, "includeVars": True}],
        "templating": {"list": [_source(), *(_variable(each) for each in dashboard.variables)]},
        "panels": list(_laid_out(dashboard)),
    }
    return json.dumps(document, indent=1) + "\n"


def _annotation(annotation: Annotation) -> Json:
    return {
        "name": annotation.name,
        "datasource": SOURCE,
        "enable": True,
        "expr": f"{annotation.expr} * 1000" if annotation.is_time else annotation.expr,
        "useValueForTime": annotation.is_time,
        "iconColor": annotation.color,
        "step": "60s",
        "titleFormat": annotation.name,
    }


def _source() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> Json:
    found: Json = {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": SOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
    }
    if variable.several:
        every = {"text": ["All"], "value": ["$__all"]}
        found |= {"multi": True, "includeAll": True, "allValue": ".*", "current": every}
    return found


def _laid_out(dashboard: Dashboard) -> Iterator[Json]:
    """Return rows and panels with their grid positions."""
    number, top = 0, 0
    for row in dashboard.rows:
        number += 1
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": panel.height})
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel, number: int, place: Json) -> Json:
    at_once = panel.kind != "timeseries"
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": at_once,
            "range": not at_once,
            **({"format": "table"} if panel.kind == "table" else {}),
        }
        for i, query in enumerate(panel.queries)
    ]
    found: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": _options(panel),
        "targets": targets,
    }
    if panel.kind == "table":
        found["transformations"] = _joined(panel)
    return found


def _joined(panel: Panel) -> list[Json]:
    """Return the steps that make one row for each set of labels, with a column for each query."""
    values = {f"Value #{chr(ord('A') + i)}": query.column for i, query in enumerate(panel.queries)}
    hidden = {"Time": True, **{value: True for value, column in values.items() if not column}}
    renamed = {value: column for value, column in values.items() if column} | {"dlrm_job": "job"}
    organized = {"excludeByName": hidden, "renameByName": renamed}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]


def _overrides(panel: Panel) -> Iterator[Json]:
    for legend, color in panel.colors.items():
        fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": color}}
        yield {"matcher": {"id": "byName", "options": legend}, "properties": [fixed]}
    for column, unit in panel.units.items():
        yield {"matcher": {"id": "byName", "options": column}, "properties": [{"id": "unit", "value": unit}]}
    if panel.link:
        links = [{"title": "Open", "url": panel.link}]
        yield {"matcher": {"id": "byName", "options": "job"}, "properties": [{"id": "links", "value": links}]}


def _defaults(panel: Panel) -> Json:
    found: Json = {"unit": panel.unit, "min": 0 if panel.stacked or panel.most is not None else None}
    if panel.decimals is not None:
        found["decimals"] = panel.decimals
    if panel.most is not None:
        found["max"] = panel.most
    if panel.thresholds:
        below = "red" if panel.thresholds[0][1] == "green" else "green"
        steps = [{"color": below, "value": None}, *({"color": color, "value": at} for at, color in panel.thresholds)]
        found["thresholds"] = {"mode": "absolute", "steps": steps}
        found["color"] = {"mode": "thresholds"} if panel.kind != "timeseries" else {"mode": "palette-classic"}
    if panel.kind == "timeseries":
        found["custom"] = {
            "drawStyle": "line",
            # The line of a series of zeros would cover that of the series below it.
            "lineWidth": 0 if panel.stacked else 1,
            "fillOpacity": 60 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return {key: value for key, value in found.items() if value is not None}


def _options(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "job", "desc": False}]}
    reduced = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "bargauge":
        return {**reduced, "orientation": "horizontal", "displayMode": "basic"}
    return {**reduced, "colorMode": "value", "graphMode": "none", "textMode": "name" if panel.shows_names else "auto"}
