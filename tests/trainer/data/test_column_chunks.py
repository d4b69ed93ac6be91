"""What decoding of column chunks promises: pyarrow's values whatever the writer chose, and nothing read of damage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings

from dlrm_api.errors import BadDataError
from dlrm_trainer.data.column_chunks import FlatColumns, RowGroup
from dlrm_trainer.data.files import LocalFile
from dlrm_trainer.data.hashing import rows_of_ids
from dlrm_trainer.data.lookups import KEPT, MIX, MODULO, Hashing
from dlrm_trainer.data.pages import PADDING
from dlrm_trainer.data.parquet import ParquetSource
from dlrm_trainer.data.row_group import Columns
from dlrm_trainer.data.snappy import uncompress

KINDS = [
    pa.int8(),
    pa.uint8(),
    pa.int16(),
    pa.int32(),
    pa.uint32(),
    pa.int64(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
]
CODECS = ["none", "snappy", "gzip", "zstd", "brotli"]


@st.composite
def columns(draw: st.DrawFn) -> Any:
    """Values of one type: few or many distinct ones, in runs or not, some of them null."""
    kind, rows = draw(st.sampled_from(KINDS)), draw(st.integers(1, 400))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.integers(0, 2**63, rows) >> draw(st.integers(0, 63))
    if pa.types.is_floating(kind):
        values = random.normal(size=rows) if draw(st.booleans()) else values
    else:
        values = values.astype(np.dtype(kind.to_pandas_dtype()))
    values = np.repeat(values, draw(st.integers(1, 40)))[:rows]
    nulls = random.random(rows) < draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]))
    return pa.array(values, mask=nulls).cast(kind, safe=False)


def opened(path: Path, decode: Any = None) -> Iterator[RowGroup]:
    footer = pq.read_metadata(path)
    flat = FlatColumns(footer, footer.schema.to_arrow_schema(), footer.schema.to_arrow_schema().names)
    for group in range(footer.num_row_groups):
        with path.open("rb", buffering=0) as file:
            yield RowGroup(footer.row_group(group).num_rows, file, flat, group, decode)


@given(
    columns(),
    st.sampled_from(CODECS),
    st.sampled_from(["1.0", "2.0"]),
    st.booleans(),
    st.sampled_from([1, 100, 1 << 20]),
    st.sampled_from([50, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunk_holds_what_pyarrow_reads(
    tmp_path: Path,
    column: Any,
    codec: str,
    version: str,
    dictionary: bool,
    page_bytes: int,
    dictionary_bytes: int,
    checksums: bool,
    nullable: bool,
) -> None:
    path = tmp_path / "data.parquet"
    schema = pa.schema([pa.field("it", column.type, nullable=nullable or bool(column.null_count))])
    pq.write_table(
        pa.table([column], schema),
        path,
        compression=codec,
        data_page_version=version,
        use_dictionary=dictionary,
        data_page_size=page_bytes,
        dictionary_pagesize_limit=dictionary_bytes,
        write_batch_size=7,
        write_page_checksum=checksums,
        row_group_size=150,
    )

    for number, group in enumerate(opened(path)):
        expected = pq.ParquetFile(path).read_row_group(number)["it"].combine_chunks()
        assert group["it"].combine_chunks().equals(expected)
        if column.type == pa.float32():
            floats = np.empty(group.num_rows, np.float32)
            assert group.put_floats("it", floats) == expected.null_count
            assert np.array_equal(floats, expected.to_numpy(zero_copy_only=False), equal_nan=True)


@pytest.mark.parametrize("kind", ["modulo", "mix"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("column", [pa.array([-3, 5, 2**31 - 1], pa.int32()), pa.array([7, 2**64 - 1], pa.uint64())])
def test_ids_are_hashed_as_they_are_decoded(column: Any, dictionary: bool, kind: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"it": column}), tmp_path / "data.parquet", use_dictionary=dictionary)
    hashing = Hashing({"modulo": MODULO, "mix": MIX}[kind], np.uint64(1_001), np.uint64((2**64 - 1) // 1_001))
    rows = np.empty(len(column), np.uint32)

    for group in opened(tmp_path / "data.parquet"):
        assert group.put_ids("it", hashing, rows)

    ids = column.to_numpy().astype(np.int64)
    assert rows.tolist() == rows_of_ids(ids, 1_001, kind)[0].tolist()


@pytest.mark.parametrize("how", [{"compression": "lz4"}, {"column_encoding": "DELTA_BINARY_PACKED"}])
def test_what_is_not_decoded_here_is_left_to_pyarrow(how: dict[str, Any], tmp_path: Path) -> None:
    path, asked = tmp_path / "data.parquet", []
    pq.write_table(pa.table({"it": pa.array([1, 2, 3])}), path, use_dictionary="compression" in how, **how)

    def decode(names: list[str]) -> Any:
        asked.append(names)
        return pq.read_table(path, columns=names)

    (group,) = opened(path, decode)

    assert not group.put_ids("it", KEPT, np.empty(3, np.int64))
    assert group["it"].to_pylist() == [1, 2, 3]
    assert asked == [["it"]]


@given(st.sampled_from(["none", "snappy", "zstd"]), st.sampled_from(["1.0", "2.0"]), st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_damage_is_an_error_or_changes_no_more_than_what_pyarrow_reads(
    tmp_path: Path, codec: str, version: str, data: Any
) -> None:
    path, random = tmp_path / "data.parquet", np.random.default_rng(0)
    price = pa.array(random.integers(0, 9, 300).astype(np.float32), mask=random.random(300) < 0.1)
    table = pa.table({"label": random.integers(0, 2, 300), "price": price, "user": random.integers(0, 40, 300)})
    pq.write_table(table, path, compression=codec, data_page_version=version)
    body, stop = bytearray(path.read_bytes()), pq.read_metadata(path).serialized_size
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(4, len(body) - stop - 9))] = data.draw(st.integers(0, 255))
    path.write_bytes(body)
    kept = Columns(label="label", dense=["price"], bags=["user"], weights=[None], hashings=[KEPT])

    try:
        raw = ParquetSource([LocalFile(path)], kept, 0).batches([np.arange(300)])[0]
    except BadDataError:
        return

    with contextlib.suppress(pa.ArrowException, OSError):  # it may refuse a header's part that says nothing of values
        table = pq.read_table(path)
    assert raw.ids.tolist() == table["user"].drop_null().to_pylist()
    assert np.array_equal(raw.dense[:, 0], table["price"].to_numpy(), equal_nan=True)


def test_a_page_whose_checksum_is_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    columns = {"label": [0, 1] * 50, "user": np.arange(100)}
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False, write_page_checksum=True)
    body = path.read_bytes()
    row = body.index(np.int64(77).tobytes())
    path.write_bytes(body[:row] + np.int64(78).tobytes() + body[row + 8 :])
    kept = Columns(label="label", dense=[], bags=["user"], weights=[None], hashings=[KEPT])

    with pytest.raises(BadDataError, match=r"rows 0 to 99 \(row group 0\) can't be decoded: damaged .*CRC"):
        ParquetSource([LocalFile(path)], kept, 0).batches([np.arange(100)])


@given(st.binary(max_size=2_000), st.integers(1, 40))
@example(b"", 1)
@example(b"a", 40)
@settings(deadline=None)
def test_what_snappy_compressed_comes_back(piece: bytes, times: int) -> None:
    content = piece * times
    packed = pa.Codec("snappy").compress(content, asbytes=True)
    out = np.zeros(len(content) + PADDING, np.uint8)

    assert uncompress(padded(packed), np.uint64(0), np.uint64(len(packed)), out, np.uint64(0), np.uint64(len(content)))
    assert out[: len(content)].tobytes() == content


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200))
@example(bytes([200, 1, 0xFE, 1, 0]), 200)
@settings(deadline=None)
def test_what_is_no_snappy_is_refused_and_writes_nowhere_else(body: bytes, size: int) -> None:
    out = np.zeros(size + 2 * PADDING, np.uint8)

    uncompress(padded(body), np.uint64(0), np.uint64(len(body)), out, np.uint64(0), np.uint64(size))

    assert not out[size + PADDING - 1 :].any()


def padded(body: bytes) -> Any:
    return np.frombuffer(body + bytes(PADDING), np.uint8)
