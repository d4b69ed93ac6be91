"""Write every generated file: CRDs, API reference, tables of metrics, results and chart values, dashboards.

``python hack/generate.py`` writes them; ``--check`` writes nothing and fails if a file differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "charts"))

from dlrm_api.crd import definitions  # noqa: E402
from dlrm_api.reference import reference  # noqa: E402
from dlrm_checkpointer.status import Status  # noqa: E402
from dlrm_monitoring.fleet import FLEET  # noqa: E402
from dlrm_monitoring.job import JOB_DASHBOARD  # noqa: E402
from dlrm_monitoring.operator_health import OPERATOR  # noqa: E402
from dlrm_monitoring.panels import to_json  # noqa: E402
from dlrm_operator import metrics as operator_metrics  # noqa: E402
from dlrm_operator.job_metrics import JobMetrics  # noqa: E402
from dlrm_trainer.endpoint import TrainerMetrics  # noqa: E402
from dlrm_trainer.metrics.row_sizes import SizeMetrics  # noqa: E402
from dlrm_trainer.metrics.stages import StepMetrics, TransportMetrics  # noqa: E402
from dlrm_trainer.metrics.tiers import TierMetrics  # noqa: E402
from dlrm_trainer.metrics.unique_tables import UniqueMetrics  # noqa: E402

CRDS = ROOT / "crds"
CHART = ROOT / "charts" / "dlrm-operator"
CHART_FILES = CHART / "files"
CHART_PAGE = CHART / "README.md"
API_PAGE = ROOT / "docs" / "api.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
BENCHMARKS_PAGE = ROOT / "benchmarks" / "README.md"
EMBEDDINGS_PAGE = ROOT / "docs" / "embeddings.md"
SWEEPS_PAGE = ROOT / "docs" / "characterization.md"
SWEEPS = ROOT / "docs" / "characterization.csv"
RESULTS = ROOT / "benchmarks" / "results.jsonl"
HEADER = "# Generated from crds/dlrm_api by make generate: change the models, not this file.\n"
DASHBOARDS = (FLEET, JOB_DASHBOARD, OPERATOR)

BEGIN, END = "<!-- metrics of the {}: written by make generate -->", "<!-- end of the {}'s metrics -->"
HELM_TYPES = {
    bool: "bool",
    dict: "object",
    float: "float",
    int: "int",
    list: "list",
    str: "string",
    type(None): "string",
}
UNITS = (
    ("timestamp_seconds", "Unix seconds"),
    ("samples_per_second", "samples/s"),
    ("cost_per_hour", "currency/h"),
    ("last_snapshot_step", "step"),
)
"""Units that are not the last word of a metric's name."""
UNIT_OF_LAST_WORD = {
    "phase": "0 or 1",
    "held": "0 or 1",
    "failing": "0 or 1",
    "early": "cuts",
    "abandoned": "cuts",
    "length": "snapshots",
    "loss": "nats",
}
"""Units of names whose last word is not a unit."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """Describe one metric as a reader needs it."""

    name: str
    """As scraped; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: str
    labels: tuple[str, ...]
    description: str

    @property
    def unit(self) -> str:
        """Return the unit of the values; by Prometheus' conventions the last word of the name."""
        base = self.name.removesuffix("_total")
        for ending, unit in UNITS:
            if base.endswith(ending):
                return unit
        last = base.rpartition("_")[2]
        return UNIT_OF_LAST_WORD.get(last, last)


def metrics() -> Mapping[str, tuple[MetricRow, ...]]:
    """Return every metric of each process, in the order of the code, by the process' name."""
    trainer = [
        family
        for each in (TrainerMetrics, StepMetrics, TransportMetrics, TierMetrics, UniqueMetrics, SizeMetrics)
        for family in each.describe()
    ]
    return {
        "operator": (*_of_objects(vars(operator_metrics)), *_of_families(JobMetrics.describe())),
        "trainer": tuple(_of_families(trainer)),
        "checkpointer": tuple(_of_objects(vars(Status()))),
    }


def render() -> dict[Path, str]:
    """Return the text of every generated file by its path. Equal code gives equal bytes."""
    crds = {f"{plural}.yaml": HEADER + _yaml(document) for plural, document in definitions().items()}
    return {
        **{folder / name: text for folder in (CRDS, CHART_FILES / "crds") for name, text in crds.items()},
        **{CHART_FILES / "monitoring" / "dashboards" / f"{each.uid}.json": to_json(each) for each in DASHBOARDS},
        API_PAGE: reference(),
        METRICS_PAGE: _metrics_page(METRICS_PAGE.read_text("utf-8")),
        CHART_PAGE: _chart_page(CHART_PAGE.read_text("utf-8"), (CHART / "values.yaml").read_text("utf-8")),
        **_result_pages([json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]),
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the base class names it so
        # Helm's tools do not read anchors, and people stumble over them.
        return True


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _of_objects(named: Mapping[str, object]) -> Iterable[MetricRow]:
    for each in named.values():
        if isinstance(each, MetricWrapperBase):
            [family] = each.describe()
            yield _row(family, each._labelnames)


def _of_families(families: Iterable[Metric]) -> Iterable[MetricRow]:
    for family in families:
        yield _row(family, family._labelnames)  # type: ignore[attr-defined]


def _row(family: Metric, labels: Iterable[str]) -> MetricRow:
    name = family.name + ("_total" if family.type == "counter" else "")
    return MetricRow(name=name, kind=family.type, labels=tuple(labels), description=family.documentation)


def _metrics_page(text: str) -> str:
    for process, rows in metrics().items():
        cells = ((f"`{each.name}`", each.kind, ", ".join(each.labels), each.unit, each.description) for each in rows)
        table = _table(("metric", "type", "labels", "unit", "meaning"), cells)
        text = _between(text, BEGIN.format(process), END.format(process), table)
    return text


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (names, ["---"] * len(names), *rows))


def _result_pages(lines: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the pages with tables of the lines that benchmarks printed; those about embeddings have their own."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_name.setdefault(line["benchmark"], []).append(line)
    tables = {
        " of id_quality": _ids_table(by_name.pop("id_quality")),
        " of embeddings": _results_table(by_name.pop("embeddings")),
        " of dim_quality": _dims_table(by_name.pop("dim_quality")),
    }
    page = EMBEDDINGS_PAGE.read_text("utf-8")
    for name, table in tables.items():
        page = _with_results(page, name, table)
    sweeps = _sweeps_table(csv.DictReader(SWEEPS.read_text("utf-8").splitlines()))
    others = _results_table([line for each in by_name.values() for line in each])
    return {
        EMBEDDINGS_PAGE: page,
        SWEEPS_PAGE: _with_results(SWEEPS_PAGE.read_text("utf-8"), " of characterize", sweeps),
        BENCHMARKS_PAGE: _with_results(BENCHMARKS_PAGE.read_text("utf-8"), "", others),
    }


def _with_results(text: str, name: str, table: str) -> str:
    return _between(text, f"<!-- results{name}: written by make generate -->", f"<!-- end of results{name} -->", table)


def _results_table(lines: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for line in lines:
        setting = ", ".join(str(value) for value in line["setting"].values())
        spread = f" (spread {line['spread']})" if "spread" in line else ""
        cells = (
            f"{line['benchmark']}: {setting}",
            line["metric"],
            f"{line['ours']:,}",
            line["against"],
            f"{line['theirs']:,}" if "theirs" in line else "",
            f"{line['ratio']}{spread}",
            line["machine"],
        )
        rows.append(cells)
    return _table(("benchmark", "metric", "ours", "against", "theirs", "ratio", "machine"), rows)


def _ids_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return changes of normalized entropy, with a column for each number of rows, and maintenance periods."""
    by_row: dict[tuple[str, ...], dict[float, Mapping[str, Any]]] = {}
    for line in lines:
        setting = line["setting"]
        row = setting["data"], str(setting["seeds"]), setting["ours"], line["against"]
        by_row.setdefault(row, {})[setting["capacity"]] = line["measured"]
    columns, rows = sorted({line["setting"]["capacity"] for line in lines}), []
    for names, found in by_row.items():
        changes = (_change(found[each]) if each in found else "" for each in columns)
        steps = sorted({steps for measured in found.values() for steps in measured["maintenance_steps_at_end"]})
        rows.append((*names, *changes, ", ".join(map(str, steps))))
    shares = (f"{each:.0%} of ids" for each in columns)
    return _table(("data", "seeds", "ours", "against", *shares, "maintenance"), rows)


def _dims_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return bytes and normalized entropy against full rows, and on how many seeds prefixes are better."""
    rows = []
    for line in lines:
        setting, found = line["setting"], line["measured"]
        is_full = line["against"] == "full"
        method, whose = ("prefixes", "") if is_full else (line["against"], "their_")
        cells = (
            setting["data"],
            f"{setting['columns']:.1%}",
            method,
            f"{found[f'{whose}bytes_of_full']:.1%}",
            _change(found, whose),
            f"{found['wins']} of {setting['seeds']}" + (" than full rows" if is_full else ""),
        )
        rows.append(cells)
    return _table(("data", "columns", "method", "bytes of full rows", "NE above full rows", "prefixes better"), rows)


def _sweeps_table(lines: Iterable[Mapping[str, str]]) -> str:
    """Return measured beside predicted steps, with a row for each value of each sweep."""
    rows = []
    for line in lines:
        cells = (line["sweep"], line[line["sweep"]], line["measured_ms"], line["predicted_ms"])
        rates = (f"{int(line['measured_samples_per_s']):,}", f"{float(line['error']):+.0%}")
        rows.append((*cells, *rates, line["spread"], line["bound"]))
    names = ("sweep", "value", "measured ms", "predicted ms", "samples/s", "error", "spread", "bound by")
    return _table(names, rows)


def _change(measured: Mapping[str, Any], whose: str = "") -> str:
    return f"{measured[f'{whose}change_percent']:+.2f} ± {measured[f'{whose}standard_deviation']:.2f}"


def _chart_page(text: str, values: str) -> str:
    """Return the chart's page with the table that helm-docs 1.14 makes of the same values."""
    table = "| Key | Type | Default | Description |\n|-----|------|---------|-------------|\n"
    found = _values(yaml.compose(values), yaml.safe_load(values), values.splitlines())
    for key, default, comment in sorted(found, key=itemgetter(0)):
        shown = (
            "nil" if default is None else json.dumps(default, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        )
        # A null has no type of its own, so its comment may begin with one: "(int) ...".
        typed = re.fullmatch(r"\((\w+)\) (.*)", comment)
        kind, comment = typed.groups() if typed else (HELM_TYPES[type(default)], comment)
        table += f"| {key} | {kind} | `{shown}` | {comment} |\n"
    return _between(text, "<!-- values: written by make generate -->", "<!-- end of values -->", table)


def _values(node: Any, value: Any, lines: Sequence[str], prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """Yield the path, the default and the comment of each value. A map without a comment has values of its own."""
    for key, below in node.value:
        path, default = f"{prefix}{key.value}", value[key.value]
        if comment := _comment_above(lines[: key.start_mark.line]):
            yield path, default, comment
        elif isinstance(default, dict) and default:
            yield from _values(below, default, lines, f"{path}.")
        else:
            raise ValueError(f"values.yaml: {path} has no comment: write a line '# -- ...' above it")


def _comment_above(lines: Sequence[str]) -> str:
    """Return the comment that ends the lines, from its last ``# --`` on; empty without one."""
    comment: list[str] = []
    for line in map(str.strip, reversed(lines)):
        if not line.startswith("#"):
            break
        comment.insert(0, line.removeprefix("#").strip())
        if comment[0].startswith("-- "):
            return " ".join(comment).removeprefix("-- ")
    return ""


def _between(text: str, begin: str, end: str, content: str) -> str:
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"marks not found: {begin} and {end}; restore them")
    return f"{before}{begin}\n{content}{end}{after}"


def main() -> int:
    """Write the files, or check them and return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args().check
    stale = {path: text for path, text in render().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run make generate", file=sys.stderr)
        else:
            path.write_text(text, "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
