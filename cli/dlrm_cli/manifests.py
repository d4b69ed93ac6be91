"""``dlrmctl validate``, ``plan`` and ``render``: manifests in, text out. Nothing is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import yaml

from dlrm_api.errors import BadDataError, DLRMError, InvalidSpecError, NoInputError, UsageError, visible
from dlrm_api.fields import parse_bytes
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.model import ModelSpec
from dlrm_api.tiers import ELEMENT_BYTES
from dlrm_api.trace import TableTrace
from dlrm_cli.documents import (
    Document,
    find_profiles,
    located,
    only_job,
    parse_document,
    read_documents,
    refuse_unread_data,
    unquoted_fractions,
    with_data,
    with_overrides,
)
from dlrm_cli.views import dims_view, plan_view, print_stderr, print_view

if TYPE_CHECKING:
    from dlrm_api.progress import DataFiles
    from dlrm_planner import DimAdvice

CONFIGMAP = "configmap:"


def validate_files(paths: Sequence[Path]) -> None:
    """Print a line on stdout for each valid object, and on stderr for each invalid one but the first.

    The first problem is raised. Pod additions that operators refuse by default are warnings: a cluster's admin may
    allow them. Objects of other APIs are named and not checked.
    """
    documents = [document for path in paths for document in read_documents(path)]
    problems: list[DLRMError] = []
    for document in documents:
        if not document.is_ours:
            print_stderr(f"dlrmctl: {document.source}: {document.title} is not checked: it belongs to another API")
            continue
        try:
            parsed = parse_document(document)
            if isinstance(parsed, DLRMJob):
                named = {table.distribution.reference for table in parsed.spec.model.all_tables() if table.distribution}
                # Traces in ConfigMaps are the operator's to read.
                if not any(reference and reference.startswith(CONFIGMAP) for reference in named):
                    read_references(parsed.spec)
            print(visible(f"{document.source}: {document.title} is valid: {_summary(parsed)}"))
            if isinstance(parsed, DLRMJob):
                _warn([*unquoted_fractions(document.body), *_refused_by_default(parsed)])
        except DLRMError as error:
            problems.append(located(document, error))
    if not any(document.is_ours for document in documents):
        problems.append(BadDataError(f"{documents[0].source}: no DLRMJob or HardwareProfile found"))
    for problem in problems[1:]:
        for line in problem.lines:
            print_stderr(f"dlrmctl: error: {line}")
    if problems:
        raise problems[0]


def print_plan(
    path: Path, hardware: Sequence[Path], settings: Sequence[str], *, as_json: bool, with_data: bool = False
) -> None:
    """Print the plan of a file's job; ``with_data`` counts what reading its training files costs.

    Raises:
        InfeasiblePlanError: its tables do not fit the hardware.
        DLRMError: the data cannot be listed or read.
    """
    from dlrm_planner import choose_plan

    job, profiles = read_job_and_profiles(path, hardware, settings)
    data = read_data_files(job.spec) if with_data else None
    plan = choose_plan(job.spec, profiles, traces=read_references(job.spec), data=data)
    if as_json:
        print(plan.model_dump_json(indent=2))
    else:
        print_view(plan_view(job, plan))


def read_data_files(spec: DLRMJobSpec) -> DataFiles:
    """Count the training files of a job.

    Raises:
        UsageError: the trainer, which reads them, is not installed.
        DLRMError: they cannot be listed or read.
    """
    try:
        from dlrm_trainer.data.reads import count_files
    except ImportError as error:
        fix = "pip install 'dlrm-operator[trainer]'"
        raise UsageError(f"--list-data needs the package {error.name}: {fix}") from error

    return count_files(spec)


def print_dims(path: Path, settings: Sequence[str], budget: str, *, as_json: bool) -> None:
    """Print dims with which the tables of a file's job take at most ``budget``, and the manifest's fields for them.

    Raises:
        UsageError: ``budget`` is not a number of bytes.
        InfeasiblePlanError: the tables take more at any dims.
    """
    from dlrm_planner import advise_dims

    try:
        size: int = parse_bytes(budget)
    except ValueError as error:
        raise UsageError(f"invalid --bytes: {error}") from error
    job = read_job(path, settings, None)
    advice = advise_dims(job.spec, size)
    changed = _with_dims(job.spec.model, advice)
    if as_json:
        shown = {
            "bytes": advice.bytes,
            "declared_bytes": advice.declared_bytes,
            "projection_parameters": advice.projection_parameters,
            "tables": [asdict(table) for table in advice.tables],
            "manifest": changed,
        }
        print(json.dumps(shown, indent=2))
    else:
        print_view(dims_view(job, advice))
        print(yaml.safe_dump(changed, sort_keys=False), end="")


def _with_dims(model: ModelSpec, advice: DimAdvice) -> dict[str, Any]:
    """Return all tables and groups as a merge patch: lists of tables are replaced whole."""
    fields = {
        table.path: {"dim": table.advised_dim} | ({"project": True} if table.project else {}) for table in advice.tables
    }
    tables = [
        {"name": table.name} | table.model_dump(mode="json", exclude_unset=True) | fields[f"spec.model.tables[{i}]"]
        for i, table in enumerate(model.tables)
    ]
    groups = [group.model_dump(mode="json", exclude_unset=True) for group in model.table_groups]
    for i, group in enumerate(groups):
        group["template"] |= fields[f"spec.model.tableGroups[{i}].template"]
    found = {"tables": tables, "tableGroups": groups}
    return {"spec": {"model": {name: entries for name, entries in found.items() if entries}}}


def print_objects(path: Path, hardware: Sequence[Path], settings: Sequence[str], *, as_json: bool) -> None:
    """Print the Kubernetes objects that the operator would create for a file's job; warnings go to stderr."""
    from dlrm_operator.manifests.pod_template import ANY
    from dlrm_operator.manifests.pods import render_objects
    from dlrm_operator.manifests.storage import check_mounts, ephemeral_store_warnings
    from dlrm_planner import choose_plan

    job, profiles = read_job_and_profiles(path, hardware, settings)
    plan = choose_plan(job.spec, profiles, traces=read_references(job.spec), check=check_mounts)
    profile = next((each for each in profiles if each.metadata.name == plan.hardware), None)
    objects = [dict(manifest) for manifest in render_objects(job, profile, plan, limits=ANY)]
    if as_json:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True), end="")
    if profile is not None and job.spec.trainer.hardware is None and not job.spec.trainer.chooses_hardware:
        name = profile.metadata.name
        unplanned = f"the operator would not plan for HardwareProfile {name} as done here; set it to {name}"
        _warn([f"spec.trainer.hardware is not set: {unplanned}"])
    _warn([*_refused_by_default(job), *ephemeral_store_warnings(job.spec)])


def read_job_and_profiles(
    path: Path, hardware: Sequence[Path], settings: Sequence[str]
) -> tuple[DLRMJob, tuple[HardwareProfile, ...]]:
    """Read a file's job with its settings applied, and the profiles that it names or selects."""
    documents = read_documents(path)
    document = only_job(documents)
    job = parse_job_document(document, with_overrides(document.body, settings))
    return job, find_profiles(job, documents, hardware)


def read_job(path: Path, settings: Sequence[str], data: str | None, eval_data: str | None = None) -> DLRMJob:
    """Read a file's job with its settings applied, and with ``data`` and ``eval_data`` if given."""
    document = only_job(read_documents(path))
    body = with_overrides(with_data(document.body, data, eval_data), settings)
    refuse_unread_data(body, data, eval_data)
    return parse_job_document(document, body)


def parse_job_document(document: Document, body: dict[str, Any]) -> DLRMJob:
    """Return the job of a document whose body is now ``body``; errors name its file."""
    changed = replace(document, body=body)
    try:
        job = parse_document(changed)
    except DLRMError as error:
        raise located(changed, error) from error
    assert isinstance(job, DLRMJob), "only_job gives DLRMJobs alone"
    return job


def _refused_by_default(job: DLRMJob) -> tuple[str, ...]:
    from dlrm_operator.manifests.pod_template import RESTRICTED, policy_violations

    found = policy_violations(job.spec, job.metadata.namespace or "", RESTRICTED)
    return tuple(f"{each.path}: refused by operators with default settings: {each.problem}" for each in found)


def _warn(warnings: Sequence[str]) -> None:
    for text in warnings:
        print_stderr(f"dlrmctl: warning: {text}")


def _summary(parsed: DLRMJob | HardwareProfile) -> str:
    if isinstance(parsed, HardwareProfile):
        return f"{parsed.spec.tiers.ddr.bytes / 1e9:,.1f} GB of DDR per node"
    tables = parsed.spec.model.all_tables()
    rows = sum(table.rows for table in tables)
    size = sum(table.rows * table.dim * ELEMENT_BYTES[table.dtype] for table in tables)
    return f"{len(tables)} tables, {rows:,} rows, {size / 1e9:,.2f} GB of rows, {_world_size(parsed.spec)}"


def _world_size(spec: DLRMJobSpec) -> str:
    objective = spec.trainer.objective
    if objective is None or spec.fixed_replicas is not None:
        return f"world size {spec.world_size}"
    from dlrm_planner import max_replicas

    most = min(objective.max_replicas, max_replicas(spec)) * spec.trainer.processes_per_replica
    return f"world size {spec.world_size} to {most}, chosen by the plan"


def read_references(spec: DLRMJobSpec) -> dict[str, TableTrace]:
    """Read the trace of each table that refers to a file on this machine.

    Raises:
        NoInputError: a file does not exist or cannot be read.
        InvalidSpecError: the reference is to a ConfigMap, the file is not a trace, or it lacks the table.
    """
    if not any(table.distribution for table in spec.model.all_tables()):
        return {}
    from dlrm_planner import read_traces, trace_references

    texts = {reference: _read_reference(reference, field) for reference, field in trace_references(spec).items()}
    return read_traces(spec, texts)


def _read_reference(reference: str, field: str) -> str:
    if reference.startswith(CONFIGMAP):
        name = reference.removeprefix(CONFIGMAP)
        raise InvalidSpecError(
            field,
            f"dlrmctl cannot read {reference} from a cluster; write its trace to a file (kubectl get configmap "
            rf"{name} -o jsonpath='{{.data.trace\.json}}') and refer to it as file:///path",
        )
    path = Path(unquote(urlsplit(reference).path))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise NoInputError(
            f"invalid {field}: cannot read {path}: {error.strerror or error}; measure a trace with dlrmctl trace"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidSpecError(field, f"{path} is not a trace; write one with dlrmctl trace") from error
