"""Tables of all metrics, made from the objects by which each process counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from dlrm_checkpointer.status import Status
from dlrm_operator import metrics as operator_metrics
from dlrm_operator.job_metrics import JobMetrics
from dlrm_trainer.endpoint import TrainerMetrics
from dlrm_trainer.metrics.stages import StepMetrics
from dlrm_trainer.metrics.tiers import TierMetrics

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- metrics: written by make generate -->", "<!-- end of metrics -->"
UNITS = (
    ("timestamp_seconds", "Unix seconds"),
    ("samples_per_second", "samples/s"),
    ("cost_per_hour", "currency/h"),
    ("last_snapshot_step", "step"),
)
"""Units that are not the last word of a name."""
WORDS = {
    "phase": "0 or 1",
    "held": "0 or 1",
    "failing": "0 or 1",
    "early": "cuts",
    "abandoned": "cuts",
    "length": "snapshots",
    "loss": "nats",
}
"""Last words of names that are no units."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """One metric as a reader needs it."""

    name: str
    """As it is scraped; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: str
    labels: tuple[str, ...]
    words: str

    @property
    def unit(self) -> str:
        """Of its values; Prometheus' conventions put it last in the name."""
        base = self.name.removesuffix("_total")
        for ending, unit in UNITS:
            if base.endswith(ending):
                return unit
        last = base.rpartition("_")[2]
        return WORDS.get(last, last)


def processes() -> Mapping[Path, tuple[Described, ...]]:
    """Every metric of each process, in the order of the code, by the page that lists them."""
    trainer = [family for each in (TrainerMetrics, StepMetrics, TierMetrics) for family in each.describe()]
    return {
        ROOT / "operator" / "METRICS.md": (*_of_objects(vars(operator_metrics)), *_of_families(JobMetrics.describe())),
        ROOT / "trainer" / "METRICS.md": tuple(_of_families(trainer)),
        ROOT / "checkpointer" / "METRICS.md": tuple(_of_objects(vars(Status()))),
    }


def pages() -> dict[Path, str]:
    """Each page with its table brought up to date; the words around it stay.

    Raises:
        ValueError: a page lacks the two marks between which the table stands.
    """
    return {path: _with_table(path.read_text("utf-8"), found) for path, found in processes().items()}


def _of_objects(named: Mapping[str, object]) -> Iterable[Described]:
    for each in named.values():
        if isinstance(each, MetricWrapperBase):
            [family] = each.describe()
            yield _described(family, each._labelnames)


def _of_families(families: Iterable[Metric]) -> Iterable[Described]:
    for family in families:
        yield _described(family, family._labelnames)  # type: ignore[attr-defined]


def _described(family: Metric, labels: Iterable[str]) -> Described:
    name = family.name + ("_total" if family.type == "counter" else "")
    return Described(name=name, kind=family.type, labels=tuple(labels), words=family.documentation)


def _with_table(text: str, metrics: Iterable[Described]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.unit} | {each.words} |" for each in metrics
    ]
    table = ["| metric | type | labels | unit | meaning |", "| --- | --- | --- | --- | --- |", *rows]
    return before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after
