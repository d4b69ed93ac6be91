"""A trace as ConfigMaps, from which the operator reads it: one where it fits, else several that share its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import yaml

from dlrm_api.errors import UsageError
from dlrm_api.model import TRACE_KEY
from dlrm_api.trace import TableTrace, Trace

CONFIGMAP_BYTES = 1 << 20
"""Most bytes of data that a ConfigMap may hold."""


@dataclass(frozen=True, kw_only=True)
class TraceMap:
    """One ConfigMap, and the tables that refer to it."""

    name: str
    text: str
    """The trace of its tables."""
    first: str
    """Path of its first table in the manifest."""
    last: str
    """Path of its last one."""

    def manifest(self, namespace: str | None) -> str:
        """The object in YAML."""
        metadata = {"name": self.name} | ({"namespace": namespace} if namespace else {})
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {TRACE_KEY: self.text}}
        return yaml.safe_dump(body, sort_keys=False, width=2**31)

    def words(self) -> str:
        """Which tables name it, for people."""
        which = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{which}: distribution.reference: configmap:{self.name}"


def trace_maps(name: str, trace: Trace, paths: Sequence[str]) -> list[TraceMap]:
    """The ConfigMap ``name``, or ``name-0``, ``name-1`` and so on where one can't hold the trace.

    Tables stay in the model's order, and those of one path in one ConfigMap: the template of a group names only one.

    Args:
        name: Name of the ConfigMap.
        trace: Of all the model's tables.
        paths: Where each of its tables stands in the manifest.

    Raises:
        UsageError: one group's tables are too many for a ConfigMap; names the group.
    """
    parts = list(_parts(trace, paths))
    found = []
    for number, part in enumerate(parts):
        found.append(
            TraceMap(
                name=name if len(parts) == 1 else f"{name}-{number}",
                text=_text(trace, [table for _, table in part]),
                first=part[0][0],
                last=part[-1][0],
            )
        )
    return found


Part = list[tuple[str, TableTrace]]
"""Tables with their paths."""


def _parts(trace: Trace, paths: Sequence[str]) -> Iterator[Part]:
    """Tables that fit one ConfigMap together, as many as do."""
    room = CONFIGMAP_BYTES - len(_text(trace, []))
    part: Part = []
    taken = 0
    for path, group in groupby(zip(paths, trace.tables, strict=True), key=lambda each: each[0]):
        tables = list(group)
        size = sum(len(table.model_dump_json().encode()) + 1 for _, table in tables)
        if size > room:
            raise UsageError(
                f"--configmap: the traces of {path}, {len(tables):,} tables, take {size:,} bytes; a template names one "
                f"ConfigMap, which holds at most {CONFIGMAP_BYTES:,}: write the tables as several groups"
            )
        if taken + size > room:
            yield part
            part, taken = [], 0
        part += tables
        taken += size
    yield part


def _text(trace: Trace, tables: Sequence[TableTrace]) -> str:
    return trace.model_copy(update={"tables": tuple(tables)}).model_dump_json()
