"""Test reading from an S3 service: the same batches, only the bytes needed, and named errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tenacity import wait_none

from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_api.names import Env
from dlrm_cluster.ports import free_port
from dlrm_stores import locations
from dlrm_stores.base import ObjectInfo
from dlrm_stores.data_files import S3Object
from dlrm_stores.locations import find_files, find_objects
from dlrm_stores.s3 import S3Store
from dlrm_trainer.data import Reader, open_reader

TABLES = [{"name": "user", "rows": 5_000, "dim": 4}, {"name": "film", "rows": 5_000, "dim": 4}]
ROWS, GROUP_ROWS = 4_000, 100


class Bucket:
    """A bucket of a real S3 server."""

    def __init__(self, server: Any, keys: Path) -> None:
        self.server, self.keys = server, keys
        self.client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )
        self.client.create_bucket(Bucket="data")
        self.write_keys(server.secret_key)

    def write_keys(self, secret: str) -> None:
        self.keys.mkdir(exist_ok=True)
        (self.keys / "accessKeyId").write_text(self.server.access_key)
        (self.keys / "secretAccessKey").write_text(secret)

    def put(self, key: str, path: Path) -> None:
        self.client.put_object(Bucket="data", Key=key, Body=path.read_bytes())


@pytest.fixture
def bucket(versitygw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(versitygw, tmp_path / "keys")
    monkeypatch.setenv(Env.DATA_CREDENTIALS_DIR, str(bucket.keys))
    return bucket


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each range that is read."""
    real, lengths = S3Store.get_range_of, []

    def counted(self: S3Store, key: str, etag: str, start: int, length: int) -> bytes | None:
        lengths.append(length)
        return real(self, key, etag, start, length)

    monkeypatch.setattr(S3Store, "get_range_of", counted)
    return lengths


@pytest.fixture
def opened(make_spec: Any) -> Callable[..., Reader]:
    def open_with(uri: str, bucket: Bucket | None = None, world_size: int = 1, **data: Any) -> Reader:
        document = {"format": "parquet", "train": {"uris": [uri]}, "globalBatchSize": 200, "virtualShards": 4}
        if bucket is not None:
            document["s3"] = {"endpoint": bucket.server.endpoint}
        criteo = data.get("format") == "criteo-tsv"
        spec = make_spec(document | data, None if criteo else TABLES, None if criteo else ["price"])
        return open_reader(spec, "train", 0, world_size)

    return open_with


def write_rows(path: Path, first: int = 0) -> Path:
    random = np.random.default_rng(first)
    columns = {
        "label": random.integers(0, 2, ROWS).astype(np.int8),
        "price": random.random(ROWS),
        "user": np.arange(ROWS),
        "unread": [random.bytes(500) for _ in range(ROWS)],
        "film": random.integers(0, 5_000, ROWS),
    }
    pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS)
    return path


def write_lines(path: Path, lines: int = 40_000) -> Path:
    random = np.random.default_rng(0)
    fields = random.integers(0, 2**32, (lines, 26), dtype=np.uint64)
    path.write_text("".join("1" + "\t7" * 13 + "".join(f"\t{field:08x}" for field in row) + "\n" for row in fields))
    return path


def check_same(ours: Reader, theirs: Reader) -> None:
    for number, batch in enumerate(ours.iterate(0, ours.batches_per_epoch)):
        expected = theirs.read(number)
        for field in ("sample_ids", "dense", "labels", "lengths", "values"):
            assert torch.equal(getattr(batch, field), getattr(expected, field))
    assert number + 1 == theirs.batches_per_epoch


@pytest.mark.parametrize(
    "pattern",
    [
        "**/*.tsv",
        "**",
        "data/**",
        "data/**/?.tsv",
        "data/*/*.tsv",
        "*/**/part-[0-3].tsv",
        "data/**/part-[!0].tsv",
        "data/_temporary/**/*.tsv",
        "data",
    ],
)
def test_a_pattern_means_the_same_of_objects_and_of_files(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skip unfinished and hidden files in both."""
    names = [
        f"data/{name}"
        for name in (
            "a.tsv",
            "_SUCCESS",
            "day=1/b.tsv",
            "day=1/part-0.tsv",
            "day=1/hour=2/part-1.tsv",
            "_temporary/0/task/part-1.tsv",
            "day=1/.spark-staging/part-2.tsv",
            "other/c.csv",
        )
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed = [ObjectInfo(key=name, size=0, modified=0.0) for name in sorted(names)]
    monkeypatch.setattr(
        locations, "list_objects", lambda _, prefix, *_rest: [each for each in listed if each.key.startswith(prefix)]
    )

    found, left_out = find_objects([f"s3://bucket/{pattern}"], [".tsv"], S3Spec(), None)

    expected, left_here = find_files([f"{tmp_path}/{pattern}"], [".tsv"])
    assert sorted(item.path.relative_to("/bucket") for item in found) == [
        path.relative_to(tmp_path) for path in expected
    ]
    # What a pattern does not match is not left out.
    if pattern == "data":
        assert {(each.name.removeprefix("s3://bucket"), each.reason) for each in left_out} == {
            (each.name.removeprefix(str(tmp_path)), each.reason) for each in left_here
        }


def test_two_stars_in_a_piece_of_a_pattern_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "list_objects", lambda *_: [])

    with pytest.raises(NoInputError, match=r"invalid pattern: s3://bucket/day\*\*\.tsv"):
        find_objects(["s3://bucket/day**.tsv"], [".tsv"], S3Spec(), None)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "uri", ["s3://data/days/?.par*", "s3://data/days", "s3://data/days/", "s3://data/**/[ab].parquet"]
)
def test_parquet_objects_give_the_batches_of_files(uri: str, bucket: Bucket, opened: Any, tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for number, name in enumerate(("a", "b")):
        bucket.put(f"days/{name}.parquet", write_rows(tmp_path / "days" / f"{name}.parquet", number))
    bucket.put("days/_metadata.parquet", tmp_path / "days" / "a.parquet")
    bucket.put("other/c.parquet", tmp_path / "days" / "a.parquet")
    bucket.client.put_object(Bucket="data", Key="days/", Body=b"")  # as consoles make a folder
    bucket.put("days-of-old.parquet", tmp_path / "days" / "a.parquet")

    remote, local = opened(uri, bucket), opened(str(tmp_path / "days"))

    assert remote.fingerprint == local.fingerprint
    check_same(remote, local)


@pytest.mark.cluster
def test_lines_of_objects_give_the_batches_of_files_for_a_request_a_block(
    bucket: Bucket, opened: Any, fetched: list[int], tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "day.tsv")
    bucket.put("day.tsv", path)
    assert path.stat().st_size > 2 * 4 << 20

    remote = opened("s3://data/day.tsv", bucket, format="criteo-tsv")

    fetched.clear()  # of the lines' index
    check_same(remote, opened(str(path), format="criteo-tsv"))
    assert min(fetched) > 1_000
    assert sum(fetched) <= path.stat().st_size


@pytest.mark.cluster
def test_a_rank_reads_the_row_groups_and_columns_of_its_slice_alone(
    bucket: Bucket, opened: Any, tmp_path: Path, fetched: list[int]
) -> None:
    path = write_rows(tmp_path / "day.parquet")
    bucket.put("day.parquet", path)
    reader = opened("s3://data/day.parquet", bucket, world_size=4)
    indexing = list(fetched)
    fetched.clear()

    batches = list(reader.iterate(0, reader.batches_per_epoch))

    metadata = pq.read_metadata(path)
    read = [name for name in metadata.schema.names if name != "unread"]
    sizes = [
        metadata.row_group(group).column(place).total_compressed_size
        for group in range(metadata.num_row_groups)
        for place, name in enumerate(metadata.schema.names)
        if name in read
    ]
    assert sum(batch.labels.numel() for batch in batches) == ROWS // 4
    assert len(indexing) <= 3
    assert sum(indexing) <= 2 << 16
    # None only to look whether the object is still the same.
    assert min(fetched) > 1
    assert sum(fetched) <= (2 << 16) + 1.1 * sum(sizes) / 4
    reader.close()


@pytest.mark.cluster
@pytest.mark.parametrize("format_", ["parquet", "criteo-tsv"])
def test_an_object_rewritten_while_training_is_refused_by_its_etag(
    format_: str, bucket: Bucket, opened: Any, tmp_path: Path
) -> None:
    write = write_rows if format_ == "parquet" else write_lines
    bucket.put("day.tsv", write(tmp_path / "day"))
    reader = opened("s3://data/day.tsv", bucket, format=format_)
    (tmp_path / "other").write_bytes((tmp_path / "day").read_bytes() + b"\n")
    bucket.put("day.tsv", tmp_path / "other")

    with pytest.raises(BadDataError, match=r"s3://data/day\.tsv: changed .*ETag"):
        reader.read(0)


@pytest.mark.cluster
def test_an_object_that_goes_while_training_is_named(bucket: Bucket, opened: Any, tmp_path: Path) -> None:
    bucket.put("day.parquet", write_rows(tmp_path / "day.parquet"))
    reader = opened("s3://data/day.parquet", bucket)
    bucket.client.delete_object(Bucket="data", Key="day.parquet")

    with pytest.raises(NoInputError, match=r"object not found: s3://data/day\.parquet"):
        reader.read(0)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://nowhere/day.parquet", r"bucket nowhere at http.* not found; create it, or correct data\.train\.uris"),
        ("s3://data/absent", r"object not found.*\.parquet or \.pq: s3://data/absent"),
        ("s3://data/*.parquet", r"no object matches: s3://data/\*\.parquet; check data\.train\.uris"),
        ("s3://data/[9-0]*", r"invalid pattern: s3://data/\[9-0\]\*; bad character range 9-0"),
        ("s3:///day.parquet", r"invalid URI: s3:///day\.parquet"),
    ],
)
def test_a_uri_that_names_nothing_is_refused(uri: str, message: str, bucket: Bucket, opened: Any) -> None:
    with pytest.raises(NoInputError, match=message):
        opened(uri, bucket)


@pytest.mark.cluster
def test_an_object_whose_name_looks_like_a_pattern_is_found_by_it(bucket: Bucket, opened: Any, tmp_path: Path) -> None:
    bucket.put("day [1]?*.parquet", write_rows(tmp_path / "day.parquet"))

    assert opened("s3://data/day [1]?*.parquet", bucket).num_samples == ROWS


@pytest.mark.cluster
def test_an_empty_object_is_told_as_such_and_not_as_changed(bucket: Bucket, opened: Any, tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    bucket.put("_SUCCESS", tmp_path / "_SUCCESS")

    with pytest.raises(BadDataError, match=r"s3://data/_SUCCESS: not a Parquet file, or .*size is 0 bytes"):
        opened("s3://data/*", bucket)


@pytest.mark.cluster
def test_credentials_that_are_refused_are_named(bucket: Bucket, opened: Any) -> None:
    bucket.write_keys("wrong")

    with pytest.raises(
        NoPermissionError, match=r"bucket data at http.* refused the key for .*spec\.data\.credentialsSecret"
    ):
        opened("s3://data/day.parquet", bucket)


@pytest.mark.cluster
def test_a_damaged_object_is_named_with_its_rows(bucket: Bucket, opened: Any, tmp_path: Path) -> None:
    content = bytearray(write_rows(tmp_path / "day.parquet").read_bytes())
    content[4:200] = bytes(196)
    (tmp_path / "day.parquet").write_bytes(content)
    bucket.put("day.parquet", tmp_path / "day.parquet")
    reader = opened("s3://data/day.parquet", bucket, shuffle={"windowRows": 0})

    with pytest.raises(BadDataError, match=r"s3://data/day\.parquet: cannot decode rows 0 to 99 \(row group 0\)"):
        reader.read(0)


@pytest.mark.cluster
def test_a_service_that_does_not_answer_for_a_while_is_asked_again(
    bucket: Bucket, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("day.parquet", write_rows(tmp_path / "day.parquet"))
    reader = opened("s3://data/day.parquet", bucket)
    real, left = S3Store.get_range_of, [3]

    def throttled(self: S3Store, key: str, etag: str, start: int, length: int) -> bytes | None:
        if left[0]:
            left[0] -= 1
            raise StoreUnavailableError("SlowDown")
        return real(self, key, etag, start, length)

    monkeypatch.setattr(S3Store, "get_range_of", throttled)
    monkeypatch.setattr(S3Object.read.retry, "wait", wait_none())

    batch = reader.read(0)

    assert batch.labels.numel() == 200
    assert left == [0]


def test_an_authority_that_is_absent_is_named_by_its_field(opened: Any, tmp_path: Path) -> None:
    service = {"endpoint": f"https://127.0.0.1:{free_port()}", "caFile": str(tmp_path / "ca.pem")}

    with pytest.raises(NoInputError, match=r"ca\.pem.*spec\.data\.s3\.caFile"):
        opened("s3://data/day.parquet", s3=service)


def test_an_endpoint_that_is_no_url_is_refused(opened: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.data\.s3\.endpoint"):
        opened("s3://data/day.parquet", s3={"endpoint": "minio:9000"})
