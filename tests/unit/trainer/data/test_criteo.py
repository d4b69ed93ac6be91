"""Test the Criteo reader: exact values, any order, and errors that name line and column."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from dlrm_api.errors import BadDataError
from dlrm_kernels.parsing import MISSING_ID
from dlrm_stores.data_files import LocalFile
from dlrm_testing.trainer.hashed_ids import rows_of_ids
from dlrm_trainer.checkpointing.compat import first_change
from dlrm_trainer.data import Reader, criteo, open_reader
from dlrm_trainer.data.criteo import COLUMNS, CriteoSource
from dlrm_trainer.data.index import Indexer, index_files

DENSE, SPARSE = COLUMNS[1:14], COLUMNS[14:]


def line(label: str = "0", dense: str = "7", sparse: str = "0a1b2c3d", **fields: str) -> str:
    values = {"label": label, **dict.fromkeys(DENSE, dense), **dict.fromkeys(SPARSE, sparse), **fields}
    return "\t".join(values[name] for name in COLUMNS) + "\n"


def source(*paths: Path, lenient: bool = False, part_bytes: int = criteo.PART_BYTES, **more: Any) -> CriteoSource:
    files = [LocalFile(path) for path in paths]
    indexer = Indexer(read_blocks=criteo.find_lines, checks="", part_bytes=part_bytes)
    return CriteoSource(files, index_files(indexer, files, ""), DENSE, SPARSE, lenient, **more)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_lines(*lines: str) -> Path:
        path = tmp_path / "day.tsv"
        path.write_text("".join(lines), newline="")
        return path

    return write_lines


FIELD = st.one_of(st.just(""), st.integers(-(10**15) + 1, 10**15 - 1).map(str))
ID = st.one_of(
    st.just(""), st.integers(0, 2**32 - 1).map(lambda i: f"{i:08x}"), st.integers(0, 999).map(lambda i: f"{i:X}")
)


@given(st.lists(st.tuples(st.sampled_from("01"), FIELD, ID), min_size=1, max_size=20), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=60)
def test_fields_are_parsed_as_python_parses_them(rows: list[tuple[str, str, str]], ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.tsv"
        path.write_text("".join(line(row[0], I3=row[1], C9=row[2]).replace("\n", ending) for row in rows), newline="")

        raw = next(iter(source(path).batches([np.arange(len(rows))])))

    assert raw.labels.tolist() == [float(row[0]) for row in rows]
    np.testing.assert_array_equal(raw.dense[:, 2], np.float32([float(row[1]) if row[1] else math.nan for row in rows]))
    assert raw.ids.reshape(26, -1)[8].tolist() == [int(row[2], 16) if row[2] else MISSING_ID for row in rows]


def test_rows_come_back_in_the_order_asked_for_from_several_files(tmp_path: Path) -> None:
    for name, labels in (("a.tsv", "010"), ("b.tsv", "11")):
        (tmp_path / name).write_text("".join(line(label, I1=str(i)) for i, label in enumerate(labels)))
    lines = source(tmp_path / "a.tsv", tmp_path / "b.tsv")

    raw = next(iter(lines.batches([np.array([4, 0, 1, 3])])))

    assert raw.labels.tolist() == [1, 0, 1, 1]
    assert raw.dense[:, 0].tolist() == [1, 0, 1, 0]
    assert [{key: file[key] for key in ("name", "bytes", "rows")} for file in lines.fingerprint["files"]] == [
        {"name": "a.tsv", "bytes": (tmp_path / "a.tsv").stat().st_size, "rows": 3},
        {"name": "b.tsv", "bytes": (tmp_path / "b.tsv").stat().st_size, "rows": 2},
    ]


def test_rewritten_files_are_other_data_and_copies_are_the_same(tmp_path: Path) -> None:
    def fingerprint(folder: str, labels: str) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = [tmp_path / folder / name for name in ("a.tsv", "b.tsv")]
        for path, label in zip(paths, labels, strict=True):
            path.write_text(line(label) * 3)
        return source(*paths).fingerprint

    before = fingerprint("here", "01")

    assert fingerprint("copied", "01") == before
    assert first_change(before, fingerprint("here", "00"), "data").startswith("data.files[b.tsv].content was ")
    assert first_change(before, fingerprint("here", "10"), "data").startswith("data.files[a.tsv].content was ")


def test_empty_fields_are_missing_values_and_a_missing_id_has_its_own_row(write: Any, tmp_path: Path) -> None:
    path = write(line(I2="", C3=""), line(I2="-2", C3="ffffffff"))

    raw = next(iter(source(path).batches([np.array([0, 1])])))

    assert math.isnan(raw.dense[0, 1])
    assert raw.dense[1, 1] == -2
    ids = raw.ids.reshape(26, 2)
    assert ids[2].tolist() == [MISSING_ID, 0xFFFFFFFF]


def test_a_last_line_without_newline_and_carriage_returns_are_read(write: Any, tmp_path: Path) -> None:
    path = write(line("1").replace("\n", "\r\n"), line("1", C26="000000ff").rstrip("\n"))

    raw = next(iter(source(path).batches([np.array([0, 1])])))

    assert raw.labels.tolist() == [1, 1]
    assert raw.ids.reshape(26, 2)[25].tolist() == [0x0A1B2C3D, 0xFF]


BAD_LINES = {
    "too few fields": (line().rsplit("\t", 2)[0] + "\n", r"day\.tsv:2: expected 40 .* got 38; .*data\.lenient: true"),
    "too many fields": (line().rstrip("\n") + "\tx\n", r"day\.tsv:2: expected 40 fields .* got 41$"),
    "a blank line": ("\n", r"day\.tsv:2: expected 40 fields .* got 1;"),
    "a label of 2": (line("2"), r"day\.tsv:2: invalid column label \(field 1\): .* got '2'$"),
    "no label": (line(""), r"day\.tsv:2: invalid column label \(field 1\): .* got ''$"),
    "a word for a number": (line(I5="nan"), r"day\.tsv:2: invalid column I5 \(field 6\): .* got 'nan'$"),
    "a fraction": (line(I13="1.5"), r"column I13 \(field 14\): .* got '1\.5'$"),
    "a lone minus": (line(I1="-"), r"column I1 \(field 2\): .* got '-'$"),
    "an endless number": (line(I1="9" * 16), r"column I1 \(field 2\): .* 15 digits, got '9{16}'$"),
    "a bad hex digit": (line(C7="0a1b2c3g"), r"day\.tsv:2: invalid column C7 \(field 21\): .* got '0a1b2c3g'$"),
    "a long id": (line(C26="0a1b2c3d4"), r"column C26 \(field 40\): .* got '0a1b2c3d4'$"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named_with_its_column(case: str, write: Any, tmp_path: Path) -> None:
    bad, message = BAD_LINES[case]
    lines = source(write(line(), bad, line()))

    with pytest.raises(BadDataError, match=message):
        lines.batches([np.array([2, 1, 0])])


def test_a_lenient_reader_pads_lines_that_lost_trailing_fields(write: Any, tmp_path: Path) -> None:
    short = line("1").rsplit("\t", 3)[0] + "\n"
    lines = source(write(line(), short), lenient=True)

    ids = next(iter(lines.batches([np.array([0, 1])]))).ids.reshape(26, 2)

    assert ids[22:, 1].tolist() == [0x0A1B2C3D] + [MISSING_ID] * 3
    assert ids[22:, 0].tolist() == [0x0A1B2C3D] * 4


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()

    with pytest.raises(BadDataError, match=r"empty\.tsv: empty file"):
        source(tmp_path / "empty.tsv")


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("bzip2", bz2.compress),
        ("xz", lzma.compress),
        ("zstd", partial(pa.compress, codec="zstd", asbytes=True)),
        ("lz4", partial(pa.compress, codec="lz4", asbytes=True)),
    ],
)
def test_a_compressed_file_is_refused_by_what_it_is(name: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "packed.tsv").write_bytes(pack(b"0\t1\n" * 9))

    with pytest.raises(BadDataError, match=rf"packed\.tsv: compressed file \({name}\)"):
        source(tmp_path / "packed.tsv")


def test_many_files_are_read_and_none_stays_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"part-{number:03}.tsv" for number in range(200)]
    for number, path in enumerate(paths):
        path.write_text(line(I1=str(number)))
    before = len(list(Path("/proc/self/fd").iterdir()))

    lines = source(*paths)

    assert next(iter(lines.batches([np.arange(200)]))).dense[:, 0].tolist() == [*range(200)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    lines.close()


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


@given(
    files=st.lists(LENGTHS, min_size=1, max_size=3), cell=st.integers(1, 40), chunk=st.integers(1, 3), data=st.data()
)
@settings(max_examples=60)
def test_lines_are_found_again_whatever_the_size_of_blocks(
    files: list[list[int]], cell: int, chunk: int, data: Any
) -> None:
    """Blank lines, lines over many blocks, last lines without a newline, and files that are read in parts."""
    texts = ["\n".join("x" * length for length in lengths) for lengths in files]
    texts = [text + "\n" if data.draw(st.booleans()) or not text else text for text in texts]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo, "CELL_BYTES", cell)
        patch.setattr(criteo, "_CHUNK_BYTES", chunk * cell)
        paths = [Path(folder) / f"{number}.tsv" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        part_bytes = cell * data.draw(st.integers(1, 5))
        lines = source(*paths, cells=data.draw(st.integers(1, 3)), part_bytes=part_bytes)

        found = []
        for number in range(lines.num_blocks):
            block = lines.block(number)
            begins, ends = block.spans(np.arange(block.starts.size - 1))
            found += [block.text[begin:end].tobytes().decode() for begin, end in zip(begins, ends, strict=True)]

    assert found == [each for text in texts for each in text.removesuffix("\n").split("\n")]
    assert lines.num_samples == len(found)


def test_building_an_index_takes_memory_for_a_piece_of_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "day.tsv"
    path.write_bytes(b"\n" * (4 << 20))
    monkeypatch.setattr(criteo, "CELL_BYTES", 1 << 14)
    monkeypatch.setattr(criteo, "_CHUNK_BYTES", 1 << 16)
    file = LocalFile(path)
    tracemalloc.start()

    with file.open() as opened:
        blocks = criteo.find_lines(file, opened, 0, file.size)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert blocks.rows.tolist() == [1 << 14] * 256
    assert blocks.starts.tolist() == [number << 14 for number in range(256)]


def test_criteos_own_lines_are_read_as_a_plain_parser_reads_them(shared_data: Path, make_spec: Any) -> None:
    path = shared_data / "criteo-1k.tsv"
    data = {"format": "criteo-tsv", "train": {"uris": [str(path)]}, "dense": {"transform": "log1p"}}
    spec = make_spec(data | {"globalBatchSize": 1_000, "virtualShards": 1, "shuffle": {"windowRows": 0}})

    batch = open_reader(spec, "train", 0, 1).read(0)

    fields = [text.split("\t") for text in path.read_text().splitlines()]
    assert batch.labels.tolist() == [float(row[0]) for row in fields]
    assert int(batch.labels.sum()) == 205
    dense = np.array([[max(int(x), 0) if x else 0 for x in row[1:14]] for row in fields])
    np.testing.assert_allclose(batch.dense.numpy(), np.log1p(dense), rtol=1e-6)
    ids = np.array([[int(x, 16) if x else MISSING_ID for x in row[14:]] for row in fields]).T.reshape(-1)
    assert batch.values.tolist() == rows_of_ids(ids, 1_000, "mix")[0].tolist()


def test_an_epoch_of_criteos_own_lines_has_each_once_at_any_world_size(shared_data: Path, make_spec: Any) -> None:
    uris = [(shared_data / "criteo-1k.tsv").as_uri()]
    spec = make_spec({"format": "criteo-tsv", "train": {"uris": uris}, "globalBatchSize": 192, "virtualShards": 64})

    def epoch(reader: Reader) -> list[list[int]]:
        return [batch.sample_ids.tolist() for batch in reader.iterate(0, reader.batches_per_epoch)]

    alone = epoch(open_reader(spec, "train", 0, 1))
    ranks = [epoch(open_reader(spec, "train", rank, 3)) for rank in range(3)]

    assert alone == [list(chain(*slices)) for slices in zip(*ranks, strict=True)]
    assert sorted(chain(*alone)) == list(range(1_000))
