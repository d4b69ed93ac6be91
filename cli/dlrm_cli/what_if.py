"""``dlrmctl plan --what-if``: plan each combination of some values; a row for each, and a plot of them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError, NoInputError, NoPermissionError, UsageError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import Plan
from dlrm_api.tiers import TIERS
from dlrm_cli.documents import Document, find_profiles, only_job, parse_value, read_documents, set_field, with_overrides
from dlrm_cli.manifests import parse_job_document, read_references
from dlrm_cli.report.plots import SERIES_COLOURS, Plot, Series, draw_alone
from dlrm_cli.run.workdir import replace_file
from dlrm_cli.views import UNKNOWN, format_bytes, number, predicted_number, print_view, show_progress, titled_table

OPTION = "--what-if"
FIELDS: Mapping[str, tuple[str, ...]] = {
    "batch": ("spec.data.globalBatchSize",),
    "replicas": ("spec.trainer.replicas",),
    "hardware": ("spec.trainer.hardware",),
    "codec": ("spec.training.communication.forward", "spec.training.communication.backward"),
    "precision": ("spec.model.precision",),
}
"""Short keys that stand for fields of a job."""
TIER_PREFIX = "tiers."
KEYS = (*FIELDS, "dim", "width", *(f"{TIER_PREFIX}{tier}" for tier in TIERS))
MAX_COMBINATIONS = 1_000
MAX_SERIES = len(SERIES_COLOURS)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Hold one key and the values to plan with."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold what became of one combination: its plan, or what it lacks."""

    values: Mapping[str, Any]
    """The value of each key."""
    batch: int = 0
    plan: Plan | None = None
    lacks: tuple[str, ...] = ()

    @property
    def rate(self) -> float | None:
        """Return the predicted samples/s; None if it does not fit or rates are unknown."""
        return self.plan.predicted.samples_per_second if self.plan else None

    @property
    def bytes_per_tier(self) -> dict[str, int]:
        """Return the bytes in each tier of the rank with most of them there."""
        found = dict[str, int]()
        for rank in self.plan.ranks if self.plan else ():
            for tier, size in rank.bytes_per_tier.items():
                found[tier] = max(found.get(tier, 0), size)
        return found

    def to_json(self) -> str:
        """Return one line of JSON."""
        plan = self.plan
        body: dict[str, Any] = {"what_if": self.values, "fits": plan is not None, "lacks": self.lacks}
        if plan is not None:
            body |= {"replicas": plan.nodes, "world_size": plan.world_size, "bytes_per_tier": self.bytes_per_tier}
            body |= {"predicted": plan.predicted.model_dump(by_alias=False)}
        return json.dumps(body)


def print_what_if(
    path: Path,
    hardware: Sequence[Path],
    settings: Sequence[str],
    texts: Sequence[str],
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Plan a file's job with each combination of values; print a row for each, and draw their throughput.

    Raises:
        UsageError: a key or value is invalid, there are too many combinations, or there is nothing to draw.
        NoInputError: the plot's folder does not exist.
    """
    axes = read_axes(texts)
    if plot is not None and not plot.parent.is_dir():
        raise NoInputError(f"invalid --plot: folder not found: {plot.parent}; create it")
    documents = read_documents(path)
    planner = _Combinations(documents, hardware, settings)
    planner.check(axes)
    rows = list[Row]()
    with show_progress("Planning", math.prod(len(axis.values) for axis in axes)) as show:
        for row in planner.rows(axes):
            rows.append(row)
            show(len(rows), f"{len(rows)} combinations")
            if as_json:
                print(row.to_json(), flush=True)
    if not as_json:
        print_view(rows_view(planner.job.metadata.name, rows))
    if plot is not None:
        _write(plot, draw_alone(throughput_plot(planner.job.metadata.name, axes, rows)))


def read_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Read every ``KEY=VALUE,...``; values are a YAML list.

    Raises:
        UsageError: a key is unknown or given twice, a list is empty or invalid, or the product is too large.
    """
    axes = list[Axis]()
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UsageError(f"invalid {OPTION} {text}: expected key=value,value with a key of {', '.join(KEYS)}")
        if key not in KEYS and not key.startswith("spec."):
            expected = f"{', '.join(KEYS)}, or a field such as spec.trainer.processesPerReplica"
            raise UsageError(f"invalid {OPTION} {key}: expected one of {expected}")
        if any(axis.key == key for axis in axes):
            raise UsageError(f"invalid {OPTION} {key}: given twice; list all of its values in one option")
        try:
            axes.append(Axis(key=key, values=tuple(parse_value(f"[{values}]"))))
        except (yaml.YAMLError, ValueError) as error:
            raise UsageError(f"invalid {OPTION} {text}: expected YAML values, got {values!r}; quote them") from error
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_COMBINATIONS:
        raise UsageError(
            f"invalid {OPTION}: {count:,} combinations of values, the limit is {MAX_COMBINATIONS:,}; give fewer values"
        )
    return tuple(axes)


class _Combinations:
    """Plan a job with values of some keys changed."""

    def __init__(self, documents: list[Document], hardware: Sequence[Path], settings: Sequence[str]) -> None:
        document = only_job(documents)
        self._body = with_overrides(document.body, settings)
        self.job = parse_job_document(document, self._body)
        self._documents, self._hardware = documents, hardware
        self._profiles = dict[str, tuple[HardwareProfile, ...]]()

    def check(self, axes: Sequence[Axis]) -> None:
        """Raise UsageError for a value that its own field does not take; rules between fields are a row's matter."""
        for axis in axes:
            for value in axis.values:
                paths = [path for path, _ in self._fields(self._body, axis.key, value)]
                tier = axis.key.removeprefix(TIER_PREFIX)
                own = tuple(paths or (f"spec.trainer.tierBudgets.{tier}", f"spec.tiers.{tier}", "spec.devices.hbm"))
                try:
                    self._read({axis.key: value})
                except InvalidSpecError as error:
                    for path, problem in ((error.path, error.problem), *error.others):
                        if path.startswith(own):
                            raise UsageError(f"invalid {OPTION} {axis.key}: {path}: {problem}") from error

    def rows(self, axes: Sequence[Axis]) -> Iterator[Row]:
        """Yield the row of each combination; the last key changes fastest."""
        for values in product(*(axis.values for axis in axes)):
            yield self._row({axis.key: value for axis, value in zip(axes, values, strict=True)})

    def _row(self, values: Mapping[str, Any]) -> Row:
        from dlrm_planner import choose_plan

        try:
            job, profiles = self._read(values)
            plan = choose_plan(job.spec, profiles, traces=read_references(job.spec))
        except InfeasiblePlanError as error:
            return Row(values=values, lacks=error.reasons)
        except InvalidSpecError as error:
            return Row(values=values, lacks=tuple(error.lines))
        return Row(values=values, batch=job.spec.data.global_batch_size, plan=plan)

    def _read(self, values: Mapping[str, Any]) -> tuple[DLRMJob, tuple[HardwareProfile, ...]]:
        """Return the job with some values, and its profiles with the bytes of tiers that are among them."""
        body = copy.deepcopy(self._body)
        tiers = {key.removeprefix(TIER_PREFIX): value for key, value in values.items() if key.startswith(TIER_PREFIX)}
        for key, value in values.items():
            for path, each in self._fields(body, key, value):
                set_field(body, path, each, OPTION)
        job = parse_job(body)
        trainer = job.spec.trainer
        wanted = repr((trainer.hardware, trainer.hardware_profiles, trainer.hardware_selector))
        if wanted not in self._profiles:
            self._profiles[wanted] = find_profiles(job, self._documents, self._hardware)
        profiles = self._profiles[wanted]
        if not tiers:
            return job, profiles
        nodes = [profile.model_dump(mode="json", exclude_none=True) for profile in profiles]
        for tier, size in tiers.items():
            levels = [node["spec"].get("devices" if tier == "hbm" else "tiers", {}) for node in nodes]
            is_of_nodes = any(tier in each for each in levels)
            set_field(body, f"spec.trainer.tierBudgets.{tier}", None if is_of_nodes else size, OPTION)
            for each in levels:
                if tier in each:
                    each[tier]["bytes"] = size
        return parse_job(body), tuple(map(parse_profile, nodes))

    def _fields(self, body: Mapping[str, Any], key: str, value: Any) -> list[tuple[str, Any]]:
        """Return the fields that a key sets in a document, and their values; of tiers none yet."""
        model = body["spec"]["model"]
        if key.startswith(TIER_PREFIX):
            return []
        if key == "dim":
            return _dim_fields(model, value)
        if key == "width":
            # The last layers fit the interaction and the logit.
            layers = {"bottomMlp": model.get("bottomMlp"), "topMlp": model.get("topMlp", self.job.spec.model.top_mlp)}
            return [(f"spec.model.{mlp}", [*[value] * (len(of) - 1), of[-1]]) for mlp, of in layers.items() if of]
        # A named profile takes the place of those to choose from.
        others = ("hardwareProfiles", "hardwareSelector") if key == "hardware" else ()
        of_trainer = body["spec"].get("trainer") or {}
        found = [(path, value) for path in FIELDS.get(key, (key,))]
        return found + [(f"spec.trainer.{name}", None) for name in others if name in of_trainer]


def _dim_fields(model: Mapping[str, Any], dim: Any) -> list[tuple[str, Any]]:
    """Return the dims of all tables; under interaction dot the bottom MLP ends in as many."""
    fields = [(f"spec.model.tables[{i}].dim", dim) for i in range(len(model.get("tables") or ()))]
    groups = range(len(model.get("tableGroups") or ()))
    fields += [(f"spec.model.tableGroups[{i}].template.dim", dim) for i in groups]
    if (bottom := model.get("bottomMlp")) and model.get("interaction", "dot") == "dot":
        fields.append(("spec.model.bottomMlp", [*bottom[:-1], dim]))
    return fields


def rows_view(name: str, rows: Sequence[Row]) -> RenderableType:
    """Return the rows as a table, with the first reason of those that do not fit; JSON has them all."""
    keys, tiers = list(rows[0].values), sorted({tier for row in rows for tier in row.bytes_per_tier})
    priced = any(row.plan and row.plan.predicted.price_per_billion_samples is not None for row in rows)
    lacking = any(row.lacks for row in rows)
    figures = ("ranks", "samples/s", "step ms", *(("price per 1e9",) if priced else ()))
    columns = (*keys, *figures, *(f"{tier} of a rank" for tier in tiers), *(("lacks",) if lacking else ()))
    table = titled_table(f"{name}: {len(rows)} combinations", columns, words=("lacks",))
    for row in rows:
        rate, sizes, uncalibrated = row.rate, row.bytes_per_tier, bool(row.plan and row.plan.predicted.uncalibrated)
        cells = [f"{row.plan.world_size:,}" if row.plan else UNKNOWN]
        cells.append(predicted_number(rate, ",.0f", uncalibrated=uncalibrated))
        cells.append(number(1e3 * row.batch / rate if rate else None, ",.3f"))
        if priced:
            price = row.plan.predicted.price_per_billion_samples if row.plan else None
            cells.append(predicted_number(price, ",.2f", uncalibrated=uncalibrated))
        cells += [format_bytes(sizes[tier]) if tier in sizes else UNKNOWN for tier in tiers]
        table.add_row(*map(str, row.values.values()), *cells, *((next(iter(row.lacks), ""),) if lacking else ()))
    fits_unrated = any(row.plan is not None and row.rate is None for row in rows)
    note = "samples/s need a HardwareProfile that has all rates: give one with --hardware (dlrmctl profile measure)"
    return Group(table, *([Text(note)] if fits_unrated else []))


def throughput_plot(name: str, axes: Sequence[Axis], rows: Sequence[Row]) -> Plot:
    """Return samples/s over the key of most values: a line for each combination of the others, the fastest ones.

    Raises:
        UsageError: no combination has a predicted throughput.
    """
    if all(row.rate is None for row in rows):
        raise UsageError(
            "invalid --plot: no combination fits and has a predicted throughput; give a HardwareProfile with all rates"
        )
    across = max(axes, key=lambda axis: len(axis.values))
    lines = dict[str, dict[int, float]]()
    for row in rows:
        others = ", ".join(f"{key} {value}" for key, value in row.values.items() if key != across.key)
        if row.rate is not None:
            lines.setdefault(others, {})[across.values.index(row.values[across.key])] = row.rate
    fastest = sorted(lines, key=lambda line: -max(lines[line].values()))[:MAX_SERIES]
    left_out = f", the {MAX_SERIES} fastest of {len(lines)} lines" if len(lines) > MAX_SERIES else ""
    return Plot(
        title=f"{name}: predicted samples/s{left_out}",
        words="",
        x_name=across.key,
        x_names=tuple(map(str, across.values)),
        y_name="samples/s",
        y_unit="count",
        series=[Series(name=line, runs=_runs(lines[line])) for line in fastest],
        from_zero=True,
    )


def _runs(points: Mapping[int, float]) -> list[list[tuple[float, float]]]:
    """Return the points in order, in a new run after each combination that does not fit."""
    runs = list[list[tuple[float, float]]]()
    for x in sorted(points):
        if x - 1 not in points:
            runs.append([])
        runs[-1].append((x, points[x]))
    return runs


def _write(path: Path, svg: str) -> None:
    try:
        replace_file(path, svg)
    except OSError as error:
        raise NoPermissionError(f"cannot write {path}: {error.strerror or error}; choose another --plot") from error
