"""What the chart's dashboards ask a Prometheus for."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hack.generate import DASHBOARDS

from dlrm_testing.charts.real_prometheus import Prometheus

OPERATOR = "dlrm-operator"
HOME = "dlrm-system"
"""Namespace of the operator."""
Empty = Collection[tuple[str, str]]
"""Queries that can have no data, by dashboard and legend or panel."""


def queries(namespace: str, job: str, empty: Empty = ()) -> set[str]:
    """Return the queries of all panels that can have data, with the dashboard's variables filled in."""
    found = set()
    for dashboard in DASHBOARDS:
        place = HOME if dashboard.uid == OPERATOR else namespace
        for panel in dashboard.panels():
            for query in panel.queries:
                if not {(dashboard.uid, query.legend), (dashboard.uid, panel.title)} & set(empty):
                    expr = query.expr.replace("$__rate_interval", "30s")
                    found.add(expr.replace("$namespace", place).replace("$job", job))
    return found


def assert_variables_offer(prometheus: Prometheus, namespace: str, jobs: Iterable[str]) -> None:
    """Check that each dashboard's variables offer this namespace and these jobs, and no other."""
    for dashboard in DASHBOARDS:
        offered = [prometheus.choices(each.query.replace("$namespace", namespace)) for each in dashboard.variables]
        assert offered[0] == [HOME if dashboard.uid == OPERATOR else namespace]
        assert offered[1:] in ([], [sorted(jobs)])
