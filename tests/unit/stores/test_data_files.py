"""Data files: what a URI stands for, and which files are the same as before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_api.fields import S3Spec
from dlrm_stores import data_files, locations
from dlrm_stores.base import ObjectInfo
from dlrm_stores.data_files import LocalFile, files_named
from dlrm_stores.locations import find_files, find_objects

PARQUET = [".parquet"]


def make(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    return paths


def identified(path: Path, content: bytes = b"0123456789") -> LocalFile:
    path.write_bytes(content)
    file = LocalFile(path)
    file.digest = file.compute_digest()
    return file


def write_later(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))


def test_a_touched_file_is_the_same_and_is_read_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = identified(tmp_path / "a.parquet")
    reads: list[Path] = []
    real = LocalFile.compute_digest
    monkeypatch.setattr(LocalFile, "compute_digest", lambda self: reads.append(self.path) or real(self))
    write_later(file.path, b"0123456789")

    for _ in range(3):
        file.check()

    assert reads == [file.path]


@pytest.mark.parametrize("content", [b"9123456789", b"0123", b"0123456789abc"])
def test_an_edited_file_is_refused_also_if_it_has_as_many_bytes(tmp_path: Path, content: bytes) -> None:
    file = identified(tmp_path / "a.parquet")
    write_later(file.path, content)

    with pytest.raises(BadDataError, match=r"a\.parquet: changed after this run found it"):
        file.check()


def test_a_touched_file_whose_content_was_never_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"0123456789")
    file = LocalFile(tmp_path / "a.parquet")
    write_later(file.path, b"0123456789")

    with pytest.raises(BadDataError, match="changed"):
        file.check()


def test_of_a_large_file_samples_tell_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_HASHED_BYTES", 1 << 20)
    content = bytearray(os.urandom(4 << 20))
    file = identified(tmp_path / "a.parquet", bytes(content))
    content[2 << 20] ^= 1
    write_later(file.path, bytes(content))

    with pytest.raises(BadDataError, match="changed"):
        file.check()


def test_links_and_second_names_count_once(tmp_path: Path) -> None:
    a, b = make(tmp_path / "data", "a.parquet", "b.parquet")
    (tmp_path / "data/0.parquet").symlink_to(a)
    os.link(b, tmp_path / "data/c.parquet")

    found, left_out = find_files([str(tmp_path / "data"), str(tmp_path / "data/0.parquet")], PARQUET)

    assert found == [a, b]
    assert {Path(each.name).name: each.reason for each in left_out} == {
        "0.parquet": f"the same file as {a}",
        "c.parquet": f"the same file as {b}",
    }


def test_partitions_and_capitals_are_read_and_private_folders_are_named(tmp_path: Path) -> None:
    wanted = make(tmp_path, "A.PARQUET", "_day=1/p.parquet", "day=2/p.parquet")
    make(tmp_path, "_tmp/p.parquet", "notes.csv")

    found, left_out = find_files([str(tmp_path)], PARQUET)

    assert found == wanted
    assert [(Path(each.name).name, each.reason) for each in left_out] == [
        ("_tmp", "hidden directory"),
        ("notes.csv", "its name does not end in .parquet"),
    ]


@pytest.mark.parametrize("uri", ["{0}", "{0}/*.parquet", "{0}/**"])
def test_a_link_to_a_file_that_is_not_there_is_refused(tmp_path: Path, uri: str) -> None:
    make(tmp_path, "a.parquet")
    (tmp_path / "b.parquet").symlink_to(tmp_path / "not-fetched")

    with pytest.raises(NoInputError, match=r"b\.parquet, a link to .*not-fetched; fetch the file"):
        find_files([uri.format(tmp_path)], PARQUET)


def test_a_name_that_is_not_utf8_is_refused_with_its_bytes(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/donn\xe9es.parquet")).touch()

    with pytest.raises(BadDataError, match=r"donn\\xe9es\.parquet is not UTF-8; rename the file"):
        find_files([str(tmp_path)], PARQUET)


TABLES = {
    "Delta": "_delta_log/00000000000000000000.json",
    "Hudi": ".hoodie/hoodie.properties",
    "Iceberg": "metadata/v1.metadata.json",
}


@pytest.mark.parametrize(("kind", "metadata"), TABLES.items())
@pytest.mark.parametrize("uri", ["{0}", "{0}/day=1", "{0}/*/*.parquet", "{0}/day=1/p.parquet"])
def test_files_of_a_table_format_are_refused_however_they_are_named(
    tmp_path: Path, kind: str, metadata: str, uri: str
) -> None:
    make(tmp_path, "day=1/p.parquet", metadata)

    with pytest.raises(BadDataError, match=f"belongs to the {kind} table {tmp_path}"):
        find_files([uri.format(tmp_path)], PARQUET)


@pytest.mark.parametrize(("kind", "metadata"), TABLES.items())
@pytest.mark.parametrize("uri", ["t", "t/day=1", "t/*/*.parquet", "t/day=1/p.parquet"])
def test_objects_of_a_table_format_are_refused_however_they_are_named(
    kind: str, metadata: str, uri: str, bucket: Callable[..., None]
) -> None:
    bucket("t/day=1/p.parquet", f"t/{metadata}")

    with pytest.raises(BadDataError, match=f"belongs to the {kind} table s3://bucket/t/"):
        find_objects([f"s3://bucket/{uri}"], PARQUET, S3Spec(), None)


def test_a_folder_that_is_merely_called_metadata_is_no_table(tmp_path: Path, bucket: Callable[..., None]) -> None:
    names = ("metadata/p.parquet", "metadata/info.json")
    make(tmp_path, *names)
    bucket(*names)

    assert find_files([str(tmp_path)], PARQUET)[0] == [tmp_path / names[0]]
    assert [each.name for each in find_objects(["s3://bucket"], PARQUET, S3Spec(), None)[0]] == [
        "s3://bucket/metadata/p.parquet"
    ]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the names of a bucket's objects."""

    def hold(*names: str) -> None:
        held = [ObjectInfo(key=name, size=1, modified=0.0) for name in sorted(names)]

        def listed(_store: object, prefix: str, limit: int | None = None) -> list[ObjectInfo]:
            return [each for each in held if each.key.startswith(prefix)][:limit]

        monkeypatch.setattr(locations, "list_objects", listed)

    return hold


def test_known_files_are_found_again_when_others_change_the_common_folder(tmp_path: Path) -> None:
    make(tmp_path, "day=2/a.parquet", "day=2/b.parquet")
    make(tmp_path, "day=1/a.parquet", "day=3/c.parquet")
    files = [LocalFile(path) for path in sorted(tmp_path.rglob("*.parquet"))]

    found = files_named(files, ["a.parquet", "b.parquet"], [9, 9])

    assert [file.path.relative_to(tmp_path).as_posix() for file in found or ()] == [
        "day=2/a.parquet",
        "day=2/b.parquet",
    ]
    assert files_named(files, ["a.parquet", "gone.parquet"], [9, 9]) is None


def test_of_several_folders_with_the_known_names_that_with_the_known_sizes_is_taken(tmp_path: Path) -> None:
    make(tmp_path, "day=1/a.parquet", "day=2/a.parquet")
    (tmp_path / "day=2/a.parquet").write_bytes(b"longer than its name")
    files = [LocalFile(path) for path in sorted(tmp_path.rglob("*.parquet"))]

    [found] = files_named(files, ["a.parquet"], [20]) or []

    assert found.path == tmp_path / "day=2/a.parquet"
