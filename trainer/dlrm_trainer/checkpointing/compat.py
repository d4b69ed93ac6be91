"""Whether a snapshot fits a job: the same model and data, with tables that may have other numbers of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_api.errors import SnapshotError
from dlrm_api.model import TableSpec
from dlrm_checkpointer import CutMeta, TableMeta, table_scale

MEND = "undo the change, or give another spec.checkpoint.uri to start from step 0"

_SAID_SINCE = frozenset({"columns", "content", "dense", "hash", "pooling"})
"""What older snapshots don't say of their data and tables: it is not compared with theirs."""
_SHORT = 80
"""Characters of a value that a message shows."""


def check_data(meta: CutMeta, fingerprint: Mapping[str, Any], where: str) -> None:
    """Refuse a snapshot made with other data: its reader's position would mean other samples.

    Raises:
        SnapshotError: names the part of the data that changed.
    """
    then = meta.reader.get("fingerprint", {})
    if change := first_change(then, _as_said_by(then, fingerprint), "data"):
        raise SnapshotError(f"{where}: the data changed since the snapshot: {change}; {MEND}")


def check_model(
    meta: CutMeta, last_rows: Mapping[str, int], model: Mapping[str, Any], tables: Sequence[TableSpec], where: str
) -> bool:
    """Refuse a snapshot of another model; tables may have more rows now, or fewer where no row is lost.

    Args:
        meta: of the snapshot.
        last_rows: of each table the last row that was ever updated; tables without one are absent.
        model: ``model_document`` of the job.
        tables: of the job.
        where: the snapshot's URI.

    Returns:
        Whether a table has another number of rows now.

    Raises:
        SnapshotError: names the table or parameter that changed, and what would make a new number of rows possible.
    """
    then = {table.name: table for table in meta.tables}
    resized = [table for table in tables if table.name in then and then[table.name].rows != table.rows]
    for table in resized:
        if problem := _resizing_problem(table, then[table.name], last_rows.get(table.name, -1)):
            raise SnapshotError(f"{where}: table {table.name} has {table.rows} rows now: {problem}")
    kept = {table.name: then[table.name].rows for table in resized}
    now = dict(model) | {"tables": [each | {"rows": kept.get(each["name"], each["rows"])} for each in model["tables"]]}
    if change := _model_change(meta.model, now):
        raise SnapshotError(f"{where}: the model changed since the snapshot: {change}; {MEND}")
    return bool(resized)


def _resizing_problem(table: TableSpec, then: TableMeta, last: int) -> str:
    """Why a table can't get another number of rows; empty where it can."""
    if table.embedding.hash != "none":
        return (
            f"embedding.hash {table.embedding.hash} gives each id another row then: keep the {then.rows} rows of the "
            "snapshot"
        )
    if table_scale(table.initializer, table.rows) != then.scale:
        return (
            "its rows would start from other values: give initializer.scale "
            f"{then.scale!r}, which is that of the snapshot's {then.rows} rows"
        )
    if last >= table.rows:
        return f"row {last} was trained and would be lost: give at least {last + 1} rows"
    return ""


def _model_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    if change := first_change(then.get("rowOptimizer"), now.get("rowOptimizer"), "model.rowOptimizer"):
        return change  # before the tables' state, which changes with it
    old = {table["name"]: table | TableMeta.from_json(table).to_json() for table in then.get("tables", ())}
    new = {table["name"]: table for table in now["tables"]}
    if odd := sorted(old.keys() ^ new.keys()):
        return f"table {odd[0]} is {'gone' if odd[0] in old else 'new'}"
    for name, table in new.items():
        if change := first_change(old[name], _as_said_by(old[name], table), f"table {name}"):
            return change
    if list(old) != list(new):
        return "the order of the tables"
    rest_then = {key: value for key, value in then.items() if key != "tables"}
    rest_now = {key: value for key, value in now.items() if key != "tables"}
    return first_change(rest_then, rest_now, "model")


def _as_said_by(then: Any, now: Any) -> Any:
    """A document without what an older one did not say yet."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        said = {key: value for key, value in now.items() if key in then or key not in _SAID_SINCE}
        return {key: _as_said_by(then.get(key), value) for key, value in said.items()}
    if _is_list(then) and _is_list(now) and len(then) == len(now):
        return [_as_said_by(old, new) for old, new in zip(then, now, strict=True)]
    return now


def first_change(then: Any, now: Any, path: str) -> str | None:
    """The first place where two JSON documents differ, in words; None where they are equal."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted(then.keys() | now.keys()):
            if change := first_change(then.get(key), now.get(key), f"{path}.{key}"):
                return change
        return None
    if _is_list(then) and _is_list(now):
        documents = any(isinstance(each, Mapping) for each in now)
        if len(then) == len(now) and (documents or len(str(now)) > _SHORT):
            changes = (
                first_change(a, b, f"{path}[{_called(a, i)}]") for i, (a, b) in enumerate(zip(then, now, strict=True))
            )
            return next((change for change in changes if change), None)
        if documents:
            return f"{path}: {_first_odd(then, now)}; there were {len(then)} and there are {len(now)}"
    return None if json.dumps(then) == json.dumps(now) else f"{path} was {_short(then)} and is {_short(now)}"


def _called(entry: Any, place: int) -> Any:
    """What people know a list's entry by."""
    return entry.get("name", place) if isinstance(entry, Mapping) else place


def _first_odd(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first name that only one of two lists of another length has, in words."""
    names, kept = [each["name"] for each in then], {each["name"] for each in now}
    gone = next((name for name in names if name not in kept), None)
    new = next((each["name"] for each in now if each["name"] not in names), None)
    return f"{new} is new" if gone is None else f"{gone} is gone"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
