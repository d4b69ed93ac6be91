"""What other libraries make of the files: tables in memory, ids as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.loopback import Service
from benchmarks.samples import DENSE, IDS

NAMES = ("label", *DENSE, *IDS)
MISSING_ID = 2**32
_DIGITS = np.zeros(256, dtype=np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


@dataclass(frozen=True)
class Origin:
    """Locate a file."""

    uri: str
    """A path, or ``s3://bucket/key``."""
    service: Service | None = None

    @property
    def storage_options(self) -> dict[str, str]:
        """Return the location in the form that polars takes."""
        if self.service is None:
            return {}
        return {
            "aws_endpoint_url": self.service.endpoint,
            "aws_access_key_id": self.service.access_key,
            "aws_secret_access_key": self.service.secret_key,
            "aws_region": self.service.region,
            "aws_allow_http": "true",
        }

    @property
    def filesystem(self) -> tuple[pa.fs.FileSystem, str]:
        """Return pyarrow's file system and the path in it."""
        if self.service is None:
            return pa.fs.LocalFileSystem(), self.uri
        service = pa.fs.S3FileSystem(
            access_key=self.service.access_key,
            secret_key=self.service.secret_key,
            endpoint_override=self.service.endpoint,
            region=self.service.region,
        )
        return service, self.uri.removeprefix("s3://")


@dataclass(frozen=True)
class Decoded:
    """Hold a file's content; missing dense values are 0, missing ids ``MISSING_ID``."""

    labels: NDArray[Any]
    dense: NDArray[np.float32]
    """(13, rows)."""
    ids: NDArray[np.int64]
    """(26, rows)."""


@dataclass(frozen=True)
class Columns:
    """Decoded columns, as the library holds them."""

    num_rows: int
    column: Callable[[str], Any]
    """A column as an Arrow array."""

    def contents(self) -> Decoded:
        """Return the decoded content, for comparison; not timed."""

        def filled(name: str, value: int) -> NDArray[Any]:
            column = self.column(name)
            array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            return np.asarray(array.cast(pa.float64()).fill_null(value).to_numpy(zero_copy_only=False))

        return Decoded(
            labels=filled("label", 0),
            dense=np.stack([filled(name, 0) for name in DENSE]).astype(np.float32),
            ids=np.stack([filled(name, MISSING_ID) for name in IDS]).astype(np.int64),
        )


def polars_parquet(origin: Origin) -> Columns:
    """Decode the whole file on all threads."""
    import polars

    frame = polars.read_parquet(origin.uri, storage_options=origin.storage_options or None)
    return Columns(frame.height, lambda name: frame[name].to_arrow())


def pyarrow_parquet(origin: Origin) -> Columns:
    """Decode the whole file on all threads."""
    filesystem, path = origin.filesystem
    table = pq.read_table(path, filesystem=filesystem)
    return Columns(table.num_rows, table.column)


def duckdb_parquet(origin: Origin) -> Columns:
    """Decode the whole file on all threads."""
    return _duckdb(f"select * from read_parquet('{origin.uri}')")


def polars_tsv(origin: Origin) -> Columns:
    """Read as text and integers, then hexadecimal to numbers."""
    import polars

    kinds = {name: polars.String if name in IDS else polars.Int64 for name in NAMES}
    how: dict[str, Any] = {"separator": "\t", "has_header": False, "schema": kinds}
    scanned = polars.scan_csv(origin.uri, **how, storage_options=origin.storage_options or None)
    frame = scanned.collect().with_columns(polars.col(*IDS).str.to_integer(base=16, dtype=polars.UInt32))
    return Columns(frame.height, lambda name: frame[name].to_arrow())


def pyarrow_tsv(origin: Origin) -> Columns:
    """Read as text and integers, then hexadecimal to numbers, vectorised."""
    kinds = {name: pa.string() if name in IDS else pa.int64() for name in NAMES}
    filesystem, path = origin.filesystem
    stream: Any
    with filesystem.open_input_stream(path) as stream:
        table = pa.csv.read_csv(
            stream,
            pa.csv.ReadOptions(column_names=list(NAMES)),
            pa.csv.ParseOptions(delimiter="\t", quote_char=False),
            pa.csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""]),
        )
    ids: dict[str, Any] = {
        name: pa.chunked_array([_from_hexadecimal(part) for part in table[name].chunks]) for name in IDS
    }
    return Columns(table.num_rows, lambda name: ids[name] if name in ids else table[name])


def duckdb_tsv(origin: Origin) -> Columns:
    """Read as text and integers, then hexadecimal to numbers."""
    kinds = ", ".join(f"'{name}': '{'VARCHAR' if name in IDS else 'BIGINT'}'" for name in NAMES)
    numbers = ", ".join(f"('0x' || {name})::UINTEGER AS {name}" for name in IDS)
    source = f"read_csv('{origin.uri}', delim='\t', header=false, quote='', columns={{{kinds}}})"
    return _duckdb(f"select label, {', '.join(DENSE)}, {numbers} from {source}")


FILES_ALONE = ("duckdb",)
"""Would have to install something to read S3."""
DECODERS: dict[str, dict[str, Callable[[Origin], Columns]]] = {
    "parquet": {"polars": polars_parquet, "pyarrow": pyarrow_parquet, "duckdb": duckdb_parquet},
    "criteo-tsv": {"polars": polars_tsv, "pyarrow": pyarrow_tsv, "duckdb": duckdb_tsv},
}


def _duckdb(query: str) -> Columns:
    import duckdb

    relation: Any = duckdb.sql(query)
    table = relation.to_arrow_table()
    return Columns(table.num_rows, table.column)


def _from_hexadecimal(text: Any) -> Any:
    """Ids of eight digits, straight from the array's bytes."""
    present = text.drop_null()
    start = present.offset
    offsets = np.frombuffer(present.buffers()[1], np.int32)[start : start + len(present) + 1]
    digits = _DIGITS[np.frombuffer(present.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]].reshape(-1, 8)
    pairs = digits[:, 0::2] << np.uint8(4) | digits[:, 1::2]
    ids = np.zeros(len(text), np.uint32)
    valid = text.is_valid().to_numpy(zero_copy_only=False)
    ids[valid] = np.ascontiguousarray(pairs).view(">u4")[:, 0]
    return pa.array(ids, mask=~valid)
