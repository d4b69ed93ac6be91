"""Traces that a job's tables refer to, read from files of this machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import InvalidSpecError, NoInputError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.trace import TableTrace

CONFIGMAP = "configmap:"


def read_references(spec: DLRMJobSpec) -> dict[str, TableTrace]:
    """The trace of each table that refers to one.

    Raises:
        NoInputError: a file is not there or can't be read; names the field, the file and the mend.
        InvalidSpecError: a reference is to a ConfigMap, a file holds no trace, or a trace lacks the table.
    """
    if not any(table.distribution for table in spec.model.all_tables()):
        return {}
    from dlrm_planner import read_traces, trace_references

    texts = {reference: _read(reference, field) for reference, field in trace_references(spec).items()}
    return read_traces(spec, texts)


def _read(reference: str, field: str) -> str:
    if reference.startswith(CONFIGMAP):
        name = reference.removeprefix(CONFIGMAP)
        raise InvalidSpecError(
            field,
            f"{reference}: dlrmctl reads no cluster: write the ConfigMap's trace to a file (kubectl get configmap "
            rf"{name} -o jsonpath='{{.data.trace\.json}}') and refer to it as file:///path",
        )
    path = Path(unquote(urlsplit(reference).path))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise NoInputError(
            f"{field}: {path}: {error.strerror or error}: measure the trace with dlrmctl trace, or mend the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidSpecError(field, f"{path} is no text, so no trace: write it with dlrmctl trace") from error
