"""Which files of Delta and Iceberg tables are read, at which version, and which tables are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile as ManifestEntry
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent, ManifestFile
from pyiceberg.table import Table

from dlrm_api.errors import BadDataError, DLRMError, NoInputError
from dlrm_api.fields import S3Spec
from dlrm_stores import locations
from dlrm_stores.data_files import DataFile
from dlrm_stores.delta import find_delta
from dlrm_stores.iceberg import find_iceberg
from dlrm_stores.locations import Places
from dlrm_testing.checkpointer.fixtures import s3_store

HERE = Places(S3Spec(), None)
Commit = Callable[..., None]


def rows(*ids: int, day: str = "1") -> pa.Table:
    return pa.table({"label": [n % 2 for n in ids], "C1": list(ids), "day": [day] * len(ids)})


def ids_in(files: list[DataFile]) -> list[int]:
    found: list[int] = []
    for file in files:
        with file.open() as opened:
            found += pq.read_table(opened).column("C1").to_pylist()
    return sorted(found)


def refused(
    find: Any, uri: object, problem: str, version: int | None = None, kind: type[DLRMError] = BadDataError
) -> None:
    with pytest.raises(kind, match=problem) as error:
        find(HERE, str(uri), version)
    assert str(uri) in str(error.value)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A table of four versions: two appends, a removal, and an append."""
    table = tmp_path / "delta table"
    write_deltalake(table, rows(0, 1, 2))
    write_deltalake(table, rows(3, 4), mode="append")
    DeltaTable(table).delete("C1 = 1")
    write_deltalake(table, rows(5), mode="append")
    return table


@pytest.mark.parametrize(
    ("version", "ids"), [(0, [0, 1, 2]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 3, 4]), (None, [0, 2, 3, 4, 5])]
)
def test_a_delta_table_gives_the_rows_of_a_version(delta: Path, version: int | None, ids: list[int]) -> None:
    read, files = find_delta(HERE, f"{delta}/", version)

    assert ids_in(files) == ids
    assert (read.version, read.newest) == (3 if version is None else version, 3)


def test_a_delta_table_is_read_from_a_checkpoint_once_older_commits_are_gone(delta: Path) -> None:
    table = DeltaTable(delta)
    table.create_checkpoint()
    for old in range(3):
        (delta / f"_delta_log/{old:020}.json").unlink()
    write_deltalake(delta, rows(6), mode="append")

    assert ids_in(find_delta(HERE, str(delta), 3)[1]) == [0, 2, 3, 4, 5]
    assert ids_in(find_delta(HERE, str(delta), None)[1]) == [0, 2, 3, 4, 5, 6]
    refused(find_delta, delta, "no longer has version 2", 2, NoInputError)
    refused(find_delta, delta, "no longer has version 9", 9, NoInputError)


def test_partitions_of_a_delta_table_are_found_under_any_name(tmp_path: Path) -> None:
    for number, day in enumerate(["a b", "c/d", "50%", "é"]):
        write_deltalake(tmp_path / "t", rows(number, day=day), mode="append", partition_by=["day"])

    files = find_delta(HERE, str(tmp_path / "t"), None)[1]

    assert ids_in(files) == [0, 1, 2, 3]
    assert {file.table and file.table.partitioned_by for file in files} == {frozenset({"day"})}


@pytest.fixture
def commit(delta: Path) -> Commit:
    def write(*actions: dict[str, Any]) -> None:
        number = len(list((delta / "_delta_log").glob("*.json")))
        lines = "\n".join(json.dumps(action) for action in actions)
        (delta / f"_delta_log/{number:020}.json").write_text(lines)

    return write


def action(table: Path, kind: str) -> dict[str, Any]:
    lines = (table / "_delta_log/00000000000000000000.json").read_text().splitlines()
    return next(found[kind] for found in map(json.loads, lines) if kind in found)


def protocol(*features: str) -> dict[str, Any]:
    names = [*features]
    return {
        "protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names, "writerFeatures": names}
    }


def test_deletion_vectors_are_refused_where_there_are_any(delta: Path, commit: Commit) -> None:
    commit(protocol("deletionVectors"))
    assert ids_in(find_delta(HERE, str(delta), None)[1]) == [0, 2, 3, 4, 5]

    added = action(delta, "add")
    vector = {"storageType": "u", "pathOrInlineDv": "vBn[lx{q8@P<9BNH/isA", "offset": 1, "sizeInBytes": 36}
    commit({"add": added | {"deletionVector": vector | {"cardinality": 1}}})
    refused(find_delta, delta, "deletion vectors are not supported")


def test_column_mapping_and_unknown_features_of_delta_are_refused(delta: Path, commit: Commit) -> None:
    metadata = action(delta, "metaData")
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"]):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
    mapping = {"schemaString": json.dumps(schema), "configuration": {"delta.columnMapping.mode": "name"}}
    commit({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata | mapping})
    refused(find_delta, delta, "column mapping is not supported")
    commit(protocol("fancyRows"))
    refused(find_delta, delta, "fancyRows")


def test_damage_and_loss_in_a_delta_table_name_the_file(delta: Path, tmp_path: Path) -> None:
    refused(find_delta, tmp_path, "no _delta_log", kind=NoInputError)
    _, [file, *_] = find_delta(HERE, str(delta), None)
    path = Path(file.name)
    path.write_bytes(path.read_bytes() + b"!")
    refused(find_delta, delta, f"{path.name}: expected .* bytes")
    path.unlink()
    refused(find_delta, delta, f"file not found: .*{path.name}", kind=NoInputError)
    (delta / "_delta_log/00000000000000000003.json").write_text("{not json")
    refused(find_delta, delta, "cannot read the table's log at version 3")


@pytest.fixture
def catalog(tmp_path: Path) -> SqlCatalog:
    (tmp_path / "warehouse").mkdir()
    catalog = SqlCatalog("test", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("ads")
    return catalog


@pytest.fixture
def iceberg(catalog: SqlCatalog) -> Table:
    """A table of two appends and a removal."""
    table = catalog.create_table("ads.clicks", schema=rows(0).schema)
    table.append(rows(0, 1, 2))
    table.append(rows(3, 4))
    table.delete("C1 == 1")
    return table


def folder_of(table: Table) -> Path:
    return Path(table.location().removeprefix("file://"))


def test_an_iceberg_table_gives_the_rows_of_a_snapshot(iceberg: Table) -> None:
    folder, snapshots = folder_of(iceberg), [each.snapshot_id for each in iceberg.snapshots()]

    read, files = find_iceberg(HERE, str(folder), None)
    assert ids_in(files) == [0, 2, 3, 4]
    assert read.version == read.newest == snapshots[-1]
    read, files = find_iceberg(HERE, f"file://{folder}", snapshots[1])
    assert ids_in(files) == [0, 1, 2, 3, 4]
    assert (read.version, read.newest) == (snapshots[1], snapshots[-1])
    assert ids_in(find_iceberg(HERE, iceberg.metadata_location, None)[1]) == [0, 2, 3, 4]
    refused(find_iceberg, folder, "snapshot 7 has expired", 7, NoInputError)


def test_an_iceberg_table_without_rows_has_no_files(catalog: SqlCatalog) -> None:
    table = catalog.create_table("ads.empty", schema=rows(0).schema)

    assert find_iceberg(HERE, str(folder_of(table)), None)[1] == []


def test_two_newest_metadata_files_of_iceberg_are_refused(iceberg: Table, tmp_path: Path) -> None:
    refused(find_iceberg, tmp_path, "Iceberg table not found", kind=NoInputError)
    newest = Path(iceberg.metadata_location.removeprefix("file://"))
    other = newest.with_name(newest.name.replace("-", "-0", 1))
    shutil.copy(newest, other)
    refused(find_iceberg, folder_of(iceberg), f"two files .* {newest.name}")
    other.unlink()
    newest.write_text("{}")
    with pytest.raises(BadDataError, match=f"{newest.name}: damaged"):
        find_iceberg(HERE, str(folder_of(iceberg)), None)


def manifest_of(monkeypatch: pytest.MonkeyPatch, content: ManifestContent, form: FileFormat) -> None:
    """pyiceberg writes neither delete files nor other formats than Parquet: change what it reads."""
    fetch = ManifestFile.fetch_manifest_entry

    def fetched(self: ManifestFile, *arguments: Any, **more: Any) -> Any:
        entries = fetch(self, *arguments, **more)
        for entry in entries:
            entry.data_file = ManifestEntry.from_args(
                content=DataFileContent.DATA,
                file_path=entry.data_file.file_path,
                file_format=form,
                partition=entry.data_file.partition,
                record_count=1,
                file_size_in_bytes=1,
            )
        return entries

    monkeypatch.setattr(ManifestFile, "content", property(lambda _: content))
    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", fetched)


@pytest.mark.parametrize(
    ("content", "form", "problem"),
    [
        (ManifestContent.DELETES, FileFormat.PARQUET, "delete files are not supported"),
        (ManifestContent.DATA, FileFormat.ORC, "ORC"),
    ],
)
def test_delete_files_and_other_file_formats_of_iceberg_are_refused(
    iceberg: Table, monkeypatch: pytest.MonkeyPatch, content: ManifestContent, form: FileFormat, problem: str
) -> None:
    manifest_of(monkeypatch, content, form)

    refused(find_iceberg, folder_of(iceberg), problem)


def test_a_name_in_metadata_may_have_the_scheme_of_hadoop() -> None:
    names = {"s3a://b/k/x y%20": "s3://b/k/x y%20", "file:/a/b": "/a/b", "file:///a b": "/a b", "/a:b": "/a:b"}

    assert {uri: locations.plain_name(uri) for uri in names} == names
    with pytest.raises(NoInputError, match="unsupported URI: gs://"):
        locations.plain_name("gs://b/k")


@pytest.mark.cluster
def test_tables_in_s3_give_the_same_rows(
    delta: Path, iceberg: Table, catalog: SqlCatalog, versitygw: Any, tmp_path: Path
) -> None:
    store = s3_store(versitygw, tmp_path / "keys", "lake")
    for path in delta.rglob("*.*"):
        store.put(f"delta/{path.relative_to(delta)}", path.read_bytes())
    properties = {
        "s3.endpoint": versitygw.endpoint,
        "s3.access-key-id": versitygw.access_key,
        "s3.secret-access-key": versitygw.secret_key,
        "s3.region": "us-east-1",
    }
    there = SqlCatalog("s3", uri=f"sqlite:///{tmp_path}/s3.db", warehouse="s3://lake/ice", **properties)
    there.create_namespace("ads")
    table = there.create_table("ads.clicks", schema=rows(0).schema)
    table.append(rows(7, 8))
    places = Places(S3Spec(endpoint=versitygw.endpoint), tmp_path / "keys")

    assert ids_in(find_delta(places, f"{store.uri}/delta", None)[1]) == [0, 2, 3, 4, 5]
    assert ids_in(find_delta(places, f"{store.uri}/delta/", 1)[1]) == [0, 1, 2, 3, 4]
    assert ids_in(find_iceberg(places, table.location(), None)[1]) == [7, 8]
    with pytest.raises(NoInputError, match=f"Delta table not found: {store.uri}"):
        find_delta(places, store.uri, None)
