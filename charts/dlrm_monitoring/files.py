"""Which files are written from this package, and what stands in each."""

from __future__ import annotations

from pathlib import Path

from dlrm_monitoring.fleet import FLEET
from dlrm_monitoring.job import JOB_DASHBOARD
from dlrm_monitoring.metric_tables import pages
from dlrm_monitoring.operator_health import OPERATOR
from dlrm_monitoring.panels import to_json

DASHBOARDS = (FLEET, JOB_DASHBOARD, OPERATOR)
FOLDER = Path(__file__).resolve().parents[1] / "dlrm-operator" / "files" / "monitoring" / "dashboards"


def rendered() -> dict[Path, str]:
    """Every file's path and text; equal code gives equal bytes."""
    return pages() | {FOLDER / f"{each.uid}.json": to_json(each) for each in DASHBOARDS}
