"""Traces that a job refers to: which they are, and what they say of its tables. Whoever calls reads them."""

from __future__ import annotations

from collections.abc import Mapping

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.trace import TableTrace, parse_trace
from dlrm_planner.tables import table_paths


def trace_references(spec: DLRMJobSpec) -> dict[str, str]:
    """Each reference of the job, and the first field that names it."""
    found: dict[str, str] = {}
    for table, path in zip(spec.model.all_tables(), table_paths(spec), strict=True):
        if table.distribution is not None and table.distribution.reference is not None:
            found.setdefault(table.distribution.reference, f"{path}.distribution.reference")
    return found


def read_traces(spec: DLRMJobSpec, texts: Mapping[str, str | bytes]) -> dict[str, TableTrace]:
    """Each referring table's part of its trace; ``texts`` holds the document of each reference.

    Raises:
        InvalidSpecError: a document is no trace, or lacks a table; names the field and the reference.
    """
    fields = trace_references(spec)
    documents: dict[str, dict[str, TableTrace]] = {}
    for reference, text in texts.items():
        try:
            documents[reference] = {each.table: each for each in parse_trace(text).tables}
        except InvalidSpecError as error:
            raise InvalidSpecError(
                fields[reference], f"{reference} holds no trace: {error}: write it with dlrmctl trace"
            ) from error
    found = {}
    for table, path in zip(spec.model.all_tables(), table_paths(spec), strict=True):
        named = table.distribution.reference if table.distribution else None
        if named is None or named not in documents:
            continue
        if table.name not in documents[named]:
            raise InvalidSpecError(
                f"{path}.distribution.reference",
                f"table {table.name} is not in the trace {named}: measure it again with dlrmctl trace",
            )
        found[table.name] = documents[named][table.name]
    return found
