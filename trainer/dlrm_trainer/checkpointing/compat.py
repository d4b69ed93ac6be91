"""Check that a snapshot has the job's model and data. Tables may have another number of rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dlrm_api.errors import SnapshotError
from dlrm_api.model import TableSpec
from dlrm_checkpointer import CutMeta, TableMeta, table_scale

HOW_TO_FIX = "undo the change, or set another spec.checkpoint.uri to start from step 0"

_OPTIONAL_KEYS = frozenset({"columns", "content", "dense", "hash", "pooling"})
"""Keys that snapshots of earlier versions lack; compared only if the snapshot has them."""
_OF_SOME_FILES = frozenset({"digest", "etag"})
"""Keys of a file that are compared only if both sides have them: a file may have moved to another kind of store."""
_MAX_VALUE_CHARACTERS = 80
"""Longest value in a message."""


def check_data(then: Mapping[str, Any], fingerprint: Mapping[str, Any], where: str) -> None:
    """Refuse a snapshot of other data: its reader position would name other samples.

    ``then`` is the fingerprint of the snapshot ``where``. A file that was only touched is the same.

    Raises:
        SnapshotError: the data changed; names the part.
    """
    now = _comparable(then, fingerprint)
    if "files" in then and "files" in now:
        pairs = {entry["name"]: entry for entry in then["files"]}
        now = now | {"files": [_file_beside(pairs.get(entry["name"], {}), entry) for entry in now["files"]]}
        others = {entry["name"]: entry for entry in now["files"]}
        then = dict(then) | {"files": [_file_beside(others.get(name, {}), entry) for name, entry in pairs.items()]}
    if change := first_change(then, now, "data"):
        raise SnapshotError(f"{where}: the data changed since the snapshot: {change}; {HOW_TO_FIX}")


def _file_beside(other: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can be compared of a file's entry with that of another time."""
    left_out = {"modified", *(_OF_SOME_FILES - other.keys())}
    # The ETag of an object that was uploaded in parts depends on their size too.
    if _parts(entry) != _parts(other):
        left_out.add("etag")
    return {key: value for key, value in entry.items() if key not in left_out}


def _parts(entry: Mapping[str, Any]) -> str:
    return str(entry.get("etag", "")).strip('"').partition("-")[2]


def check_model(
    meta: CutMeta, last_rows: Mapping[str, int], model: Mapping[str, Any], tables: Sequence[TableSpec], where: str
) -> bool:
    """Refuse a snapshot of another model. Tables may have grown, or shrunk if no trained row is lost.

    ``last_rows`` are the last rows ever updated of each table that has one, and ``model`` is the ``model_document`` of
    the job. Returns whether a table has another number of rows, or other values of each row, than in the snapshot
    ``where``.

    Raises:
        SnapshotError: names the table or parameter that changed, and what permits another number of rows or ids.
    """
    then = {table.name: table for table in meta.tables}
    for table in tables:
        if table.name in then and then[table.name].is_unique != table.is_unique:
            kind = "unique" if table.is_unique else "fixed"
            raise SnapshotError(
                f"{where}: embedding.hash of table {table.name} is {table.embedding.hash}, and was not: convert the "
                f"snapshot (dlrmctl snapshots convert STORE TARGET --table {table.name}={kind}) and set "
                "spec.checkpoint.restoreFrom to the result, or undo the change"
            )
    resized = [table for table in tables if table.name in then and then[table.name].rows != table.rows]
    for table in resized:
        if problem := _resizing_problem(table, then[table.name], last_rows.get(table.name, -1)):
            raise SnapshotError(f"{where}: cannot resize table {table.name} to {table.rows} rows: {problem}")
    kept = {table.name: {"rows"} for table in resized}
    for table in tables:
        old = then.get(table.name)
        # Rows begin without scores, or forget them, and get sizes that the table has.
        if old and (old.row_values, old.sizes) != (table.embedding.row_values, table.sizes):
            kept.setdefault(table.name, set()).update(("rowValues", "sizes"))
    tables_now = [
        _with_keys(each, then[each["name"]].to_json(), kept[each["name"]]) if each["name"] in kept else each
        for each in model["tables"]
    ]
    now = dict(model) | {"tables": tables_now}
    if change := _model_change(_without_companions(meta.model), _without_companions(now)):
        raise SnapshotError(f"{where}: the model changed since the snapshot: {change}; {HOW_TO_FIX}")
    for table in tables:
        shared = next((each.rows for each in meta.tables if each.shared_of == table.name), None)
        if shared is not None and table.embedding.shared_rows not in (None, shared):
            raise SnapshotError(
                f"{where}: cannot change embedding.sharedRows of table {table.name} to {table.embedding.shared_rows}: "
                f"ids would read other rows; keep the {shared} of the snapshot"
            )
    # Counters of sights begin at 0 if the snapshot has none of their size, and shared rows if it has none.
    return bool(kept) or _companions(meta.model) != _companions(model)


def _with_keys(document: Mapping[str, Any], other: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a document with some keys as in another, or without them."""
    own = {key: value for key, value in document.items() if key not in keys}
    return own | {key: other[key] for key in keys if key in other}


def _is_companion(table: Mapping[str, Any]) -> bool:
    """Tell whether a table is one of counters or shared rows, which a table's options decide on."""
    return "countsOf" in table or "sharedOf" in table


def _companions(model: Mapping[str, Any]) -> dict[str, int]:
    return {table["name"]: table["rows"] for table in model.get("tables", ()) if _is_companion(table)}


def _without_companions(model: Mapping[str, Any]) -> dict[str, Any]:
    return dict(model) | {"tables": [table for table in model.get("tables", ()) if not _is_companion(table)]}


def _resizing_problem(table: TableSpec, then: TableMeta, last: int) -> str:
    """Return why a table cannot have another number of rows; empty if it can."""
    buckets = table.key_buckets
    if buckets is not None:
        if buckets.count != then.buckets:
            return f"its ids would be in other buckets; set embedding.buckets {then.buckets}, as in the snapshot"
    elif table.embedding.hash != "none":
        return (
            f"embedding.hash {table.embedding.hash} would give each id another row; keep the {then.rows} rows of the "
            "snapshot"
        )
    if table_scale(table.initializer, table.rows) != then.scale:
        return (
            "its rows would have other initial values; set initializer.scale "
            f"{then.scale!r}, the scale of the snapshot's {then.rows} rows"
        )
    if buckets is None and last >= table.rows:
        return f"row {last} was trained and would be lost; set at least {last + 1} rows"
    return ""


def _model_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    # Before the tables: their state changes with the optimizer.
    if change := first_change(then.get("rowOptimizer"), now.get("rowOptimizer"), "model.rowOptimizer"):
        return change
    old = {table["name"]: table | TableMeta.from_json(table).to_json() for table in then.get("tables", ())}
    new = {table["name"]: table for table in now["tables"]}
    if odd := sorted(old.keys() ^ new.keys()):
        return f"table {odd[0]} was {'removed' if odd[0] in old else 'added'}"
    for name, table in new.items():
        if change := first_change(old[name], _comparable(old[name], table), f"table {name}"):
            return change
    if list(old) != list(new):
        return "the order of the tables"
    rest_then = {key: value for key, value in then.items() if key != "tables"}
    rest_now = {key: value for key, value in now.items() if key != "tables"}
    return first_change(rest_then, rest_now, "model")


def _comparable(then: Any, now: Any) -> Any:
    """Return the new document without optional keys that the old one lacks."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        kept = {key: value for key, value in now.items() if key in then or key not in _OPTIONAL_KEYS}
        return {key: _comparable(then.get(key), value) for key, value in kept.items()}
    if _is_list(then) and _is_list(now) and len(then) == len(now):
        return [_comparable(old, new) for old, new in zip(then, now, strict=True)]
    return now


def first_change(then: Any, now: Any, path: str) -> str | None:
    """Describe the first difference of two JSON documents; return None if they are equal."""
    return next(changes(then, now, path), None)


def changes(then: Any, now: Any, path: str) -> Iterator[str]:
    """Describe each difference of two JSON documents."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted(then.keys() | now.keys()):
            yield from changes(then.get(key), now.get(key), f"{path}.{key}" if path else key)
        return
    if _is_list(then) and _is_list(now):
        documents = any(isinstance(each, Mapping) for each in now)
        if len(then) == len(now) and (documents or len(str(now)) > _MAX_VALUE_CHARACTERS):
            for place, (a, b) in enumerate(zip(then, now, strict=True)):
                yield from changes(a, b, f"{path}[{_label(a, place)}]")
            return
        if documents:
            yield f"{path}: {_first_unmatched(then, now)}; there were {len(then)} and there are {len(now)}"
            return
    if json.dumps(then) != json.dumps(now):
        yield f"{path} was {_short(then)} and is {_short(now)}"


def _label(entry: Any, index: int) -> Any:
    return entry.get("name", index) if isinstance(entry, Mapping) else index


def _first_unmatched(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    names, kept = [each["name"] for each in then], {each["name"] for each in now}
    removed = next((name for name in names if name not in kept), None)
    added = next((each["name"] for each in now if each["name"] not in names), None)
    return f"{added} was added" if removed is None else f"{removed} was removed"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 3]}..."
