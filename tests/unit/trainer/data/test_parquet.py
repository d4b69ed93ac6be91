"""Test the Parquet reader: columns by name, bags, nulls, a bounded cache, located errors."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import HealthCheck, given, settings

from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError
from dlrm_api.model import TableSpec
from dlrm_checkpointer import id_seed
from dlrm_kernels.hashing import hash_texts, ids_of_keys, keys_of_ids, mix64
from dlrm_stores.data_files import LocalFile
from dlrm_testing.trainer.hashed_ids import rows_of_ids
from dlrm_testing.unique_tables import spec_with_unique
from dlrm_trainer.data import Reader, open_reader
from dlrm_trainer.data.batch_builder import hashing_of
from dlrm_trainer.data.index import index_files
from dlrm_trainer.data.parquet import Columns, ParquetSource, column_indexer

Write = Callable[..., str]

COLUMNS: dict[str, Any] = {
    "label": pa.array([0, 1, 0, 1, 1], pa.int8()),
    "price": pa.array([1.5, None, -2.0, 0.0, 4.0]),
    "user": pa.array([3, 1, None, 0, 2]),
    "films": pa.array([[5, 6], [], None, [7], [8, 8, 9]]),
}


def open_source(paths: list[Path], bags: list[str], budget: int) -> ParquetSource:
    hashings = [hashing_of(TableSpec(name=bag, rows=10, dim=4), 0) for bag in bags]
    columns = Columns(label="label", dense=["price"], bags=bags, weights=[None] * len(bags), hashings=hashings)
    files = [LocalFile(path) for path in paths]
    return ParquetSource(files, index_files(column_indexer(columns), files, ""), columns, budget)


TABLES = [{"name": "user", "rows": 4, "dim": 4}, {"name": "films", "rows": 10, "dim": 4, "maxLookups": 3}]


@pytest.fixture
def open_file(make_spec: Any) -> Callable[..., Reader]:
    def open_with(uri: str, tables: list[dict[str, Any]] | None = None, **data: Any) -> Reader:
        document = {"format": "parquet", "train": {"uris": [uri]}, "globalBatchSize": 8, "virtualShards": 1}
        document |= {"shuffle": {"windowRows": 0}} | data
        return open_reader(make_spec(document, tables or TABLES, ["price"]), "train", 0, 1)

    return open_with


def test_scalars_and_lists_become_bags_and_nulls_become_empty_ones(write_parquet: Write, open_file: Any) -> None:
    batch = open_file(write_parquet(COLUMNS), dense={"missing": 9.0}).read(0)

    assert batch.labels.tolist() == [0, 1, 0, 1, 1]
    assert batch.dense[:, 0].tolist() == [1.5, 9.0, -2.0, 0.0, 4.0]
    assert batch.lengths.tolist() == [[1, 1, 0, 1, 1], [2, 0, 0, 1, 3]]
    assert batch.values.tolist() == [3, 1, 0, 2, 5, 6, 7, 8, 8, 9]


def test_log1p_of_negative_values_is_that_of_zero(write_parquet: Write, open_file: Any) -> None:
    batch = open_file(write_parquet(COLUMNS), dense={"transform": "log1p"}).read(0)

    np.testing.assert_allclose(batch.dense[:, 0], np.log1p([1.5, 0, 0, 0, 4.0]), rtol=1e-6)


def test_features_are_found_under_other_column_names(write_parquet: Write, open_file: Any) -> None:
    columns = {"clicked": COLUMNS["label"], "p": COLUMNS["price"], "u": COLUMNS["user"], "f": COLUMNS["films"]}
    mapping = {"label": "clicked", "rename": {"price": "p", "user": "u", "films": "f"}}

    batch = open_file(write_parquet(columns), columns=mapping).read(0)

    assert batch.values.tolist() == [3, 1, 0, 2, 5, 6, 7, 8, 8, 9]


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.dictionary(pa.int8(), pa.int64())]
)
def test_every_integer_type_holds_ids(kind: pa.DataType, write_parquet: Write, open_file: Any) -> None:
    column = pa.array([3, 1, None, 0, 2])
    column = column.dictionary_encode().cast(kind) if isinstance(kind, pa.DictionaryType) else column.cast(kind)

    batch = open_file(write_parquet(COLUMNS | {"user": column})).read(0)

    assert batch.values[:4].tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint8())])
def test_every_list_type_holds_bags(kind: pa.DataType, write_parquet: Write, open_file: Any) -> None:
    batch = open_file(write_parquet(COLUMNS | {"films": COLUMNS["films"].cast(kind)})).read(0)

    assert batch.values[4:].tolist() == [5, 6, 7, 8, 8, 9]


def test_lists_of_fixed_size_hold_bags(write_parquet: Write, open_file: Any) -> None:
    films = pa.array([[1, 2], [3, 4], None, [5, 6], [7, 8]], pa.list_(pa.int64(), 2))

    batch = open_file(write_parquet(COLUMNS | {"films": films})).read(0)

    assert batch.lengths[1].tolist() == [2, 2, 0, 2, 2]
    assert batch.values[4:].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_any_order_over_files_and_row_groups_equals_the_plain_rows(write_parquet: Write, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bags = [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(200)]
    users, prices = rng.integers(0, 9, 200), rng.random(200).astype(np.float32)
    for number, name in enumerate(("a.parquet", "b.parquet")):
        part = slice(100 * number, 100 * number + 100)
        columns = {"label": np.zeros(100, np.int8), "price": prices[part], "user": users[part], "films": bags[part]}
        write_parquet(columns, name, row_group_size=7)
    order = rng.permutation(200)[:150]
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]

    for budget in (0, 1 << 30):
        (raw,) = open_source(files, ["user", "films"], budget).batches([order])

        assert raw.dense[:, 0].tolist() == prices[order].tolist()
        assert raw.ids.tolist() == users[order].tolist() + [i for row in order for i in bags[row]]
        assert raw.lengths[1].tolist() == [len(bags[row]) for row in order]


def test_decoded_row_groups_stay_within_their_budget(write_parquet: Write, tmp_path: Path) -> None:
    columns = {"label": np.zeros(1_000, np.int8), "price": np.zeros(1_000), "user": np.zeros(1_000, np.int64)}
    write_parquet(columns, row_group_size=100)
    source = open_source([tmp_path / "data.parquet"], ["user"], 10_000)

    source.batches([np.arange(1_000)], ahead=np.arange(1_000))

    assert 0 < source._decoded.held_bytes <= 10_000


BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "label of 2": ({"label": [0, 1, 2, 1, 1]}, r"data\.parquet: row 2: invalid column label: .* 2$"),
    "null label": ({"label": [0, 1, 0, None, 1]}, r"row 3: invalid column label: .* None$"),
    "text label": ({"label": list("01011")}, r"data\.parquet: invalid column label: .*string"),
    "NaN": ({"price": [0.0, 1.0, 2.0, 3.0, float("nan")]}, r"row 4: invalid column price: .*null.* nan$"),
    "infinity": ({"price": [0.0, 1.0, 2.0, float("-inf"), 3.0]}, r"row 3: invalid column price: .* -inf$"),
    "beyond float32": ({"price": [0.0, 1e300, 2.0, 3.0, 4.0]}, r"row 1: invalid column price: .* 1e\+300$"),
    "text ids": ({"user": list("abcde")}, r"invalid column user: .*embedding\.hash: unique.* string$"),
    "fractions as ids": ({"user": [0.5, 1, 2, 3, 0]}, r"invalid column user: .*double"),
    "null in a bag": ({"films": [[1], [], [2, None], [], []]}, r"row 2: invalid column films: .*null.* \[2, None\]$"),
    "id too large": (
        {"user": [0, 4, 1, 2, 9]},
        r"row 1: .* table user .* got 4; raise rows to at least 10.*unique or mix",
    ),
    "negative id": (
        {"user": [0, 1, -7, 2, 3]},
        r"row 2: .* table user .* 0 to 3, got -7; .*embedding\.hash: unique or",
    ),
    "bag too long": ({"films": [[1], [], [], [1] * 4, []]}, r"row 3: .* table films .* 3 ids \(maxLookups .* got 4$"),
    "id in a bag": ({"films": [[], [1, 2], [3, 10], [1], []]}, r"row 2: .* table films .* got 10;"),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_value_is_named_with_file_row_and_column(case: str, write_parquet: Write, open_file: Any) -> None:
    changed, message = BAD_COLUMNS[case]
    path = write_parquet(COLUMNS | changed)

    with pytest.raises(BadDataError, match=message):
        open_file(path).read(0)


@pytest.mark.parametrize(("missing", "left"), [("user", "label, price, films"), ("label", "price, user, films")])
def test_a_missing_column_is_named_with_those_that_exist(
    missing: str, left: str, write_parquet: Write, open_file: Any
) -> None:
    columns = {name: values for name, values in COLUMNS.items() if name != missing}

    with pytest.raises(BadDataError, match=rf"data\.parquet: column not found: {missing}; .*rename.* {left}$"):
        open_file(write_parquet(columns))


def test_a_column_that_is_there_twice_is_named(write_parquet: Write, open_file: Any) -> None:
    path = write_parquet(COLUMNS)
    table = pq.read_table(path)
    pq.write_table(table.append_column("user", table["user"]), path)

    with pytest.raises(BadDataError, match=r"data\.parquet: ambiguous column user"):
        open_file(path)


class PlainKeys(encryption.KmsClient):  # type: ignore[misc]
    """Keys that wrap nothing."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_called_so(plaintext_footer: bool, write_parquet: Write, open_file: Any) -> None:
    path = write_parquet(COLUMNS)
    table = pq.read_table(path)
    settings = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["user"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(lambda _: PlainKeys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)

    with pytest.raises(BadDataError, match=r"data\.parquet: encrypted"):
        open_file(path).read(0)


def test_renaming_a_feature_that_the_model_lacks_is_refused(write_parquet: Write, open_file: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.data\.columns\.rename\.usr"):
        open_file(write_parquet(COLUMNS), columns={"rename": {"usr": "user"}})


@pytest.mark.parametrize("damage", ["cut", "text", "flipped"])
def test_a_damaged_file_is_refused_by_name(damage: str, write_parquet: Write, open_file: Any) -> None:
    path = Path(write_parquet(COLUMNS))
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[4:200] = bytes(196)
    path.write_bytes({"cut": content[:-20], "text": b"label,price\n0,1\n", "flipped": bytes(flipped)}[damage])

    words = {"flipped": r"cannot decode rows 0 to 2 \(row group 0\)"}.get(damage, "not a Parquet file")
    with pytest.raises(BadDataError, match=r"data\.parquet: " + words):
        open_file(str(path)).read(0)


def test_a_file_without_rows_is_no_training_data(write_parquet: Write, open_file: Any) -> None:
    path = write_parquet({name: values.slice(0, 0) for name, values in COLUMNS.items()})

    with pytest.raises(BadDataError, match=r"data\.parquet: the training data has no rows"):
        open_file(path)


def test_a_file_that_vanishes_while_training_is_named(write_parquet: Write, open_file: Any) -> None:
    path = write_parquet(COLUMNS)
    reader = open_file(path)
    Path(path).unlink()

    with pytest.raises(NoInputError, match=r"file not found: .*data\.parquet"):
        reader.read(0)


@pytest.mark.parametrize("hashing", ["modulo", "mix"])
def test_hashed_ids_of_any_size_and_sign_find_a_row(hashing: str, write_parquet: Write, open_file: Any) -> None:
    tables = [TABLES[0] | {"embedding": {"hash": hashing}}, TABLES[1]]
    users = pa.array([-1, 2**63 - 1, -(2**63), 0, 4])

    values = open_file(write_parquet(COLUMNS | {"user": users}), tables).read(0).values[:5]

    assert int(values.min()) >= 0
    assert int(values.max()) < 4
    if hashing == "modulo":
        assert values.tolist() == [(2**64 - 1) % 4, (2**63 - 1) % 4, 2**63 % 4, 0, 0]


@pytest.mark.parametrize("hashing", ["none", "modulo", "mix"])
@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint32(), pa.int64()])
def test_ids_of_any_type_find_the_same_row_of_a_table_above_4_billion_rows(
    kind: pa.DataType, hashing: Any, write_parquet: Write, open_file: Any
) -> None:
    rows, ids = 2**33, np.arange(200)
    columns = {"label": ids % 2, "price": ids * 1.0, "user": pa.array(ids).cast(kind)}
    table = {"name": "user", "rows": rows, "dim": 4, "embedding": {"hash": hashing}}

    batch = open_file(write_parquet(columns, row_group_size=64), [table], globalBatchSize=200).read(0)

    np.testing.assert_array_equal(batch.values.numpy(), rows_of_ids(ids, rows, hashing)[0])


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 1_000])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int16(), pa.float16()])
def test_nulls_are_told_from_values_in_every_type(
    kind: pa.DataType, rows: int, write_parquet: Write, open_file: Any
) -> None:
    random = np.random.default_rng(rows)
    prices = [None if random.random() < 0.4 else float(random.integers(-99, 99)) for _ in range(rows)]
    columns = {"label": [1] * rows, "price": pa.array(prices).cast(kind), "user": [1] * rows}
    path = write_parquet(columns, row_group_size=300)

    batch = open_file(path, TABLES[:1], dense={"missing": 0.5}, globalBatchSize=1_000).read(0)

    assert batch.dense[:, 0].tolist() == [0.5 if price is None else price for price in prices]


def test_a_page_whose_checksum_is_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    columns = {"label": [0, 1] * 50, "price": np.zeros(100), "user": np.arange(100)}
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False, write_page_checksum=True)
    body = path.read_bytes()
    row = body.index(np.int64(77).tobytes())
    path.write_bytes(body[:row] + np.int64(78).tobytes() + body[row + 8 :])

    with pytest.raises(BadDataError, match=r"rows 0 to 99 \(row group 0\).*CRC"):
        open_source([path], ["user"], 0).batches([np.arange(100)])


@given(st.sampled_from(["none", "snappy", "zstd"]), st.sampled_from(["1.0", "2.0"]), st.data())
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
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

    try:
        (raw,) = open_source([path], ["user"], 0).batches([np.arange(300)])
    except BadDataError:
        return

    table = pq.read_table(path)
    assert raw.ids.tolist() == table["user"].drop_null().to_pylist()
    assert np.array_equal(raw.dense[:, 0], table["price"].to_numpy(), equal_nan=True)


@pytest.mark.slow
def test_a_footer_of_any_size_is_read(tmp_path: Path, open_file: Any) -> None:
    table = pa.table(COLUMNS).replace_schema_metadata({b"pandas": b"y" * 101_000_000})
    pq.write_table(table, tmp_path / "large.parquet")

    assert open_file(str(tmp_path / "large.parquet")).num_samples == 5


def test_a_row_group_above_the_budget_is_named_with_its_size(
    write_parquet: Write, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"label": np.zeros(1_000, np.int8), "price": np.zeros(1_000), "user": np.arange(1_000)}
    path = Path(write_parquet(columns, "a.parquet", 1_000))

    open_source([path], ["user"], budget=100)

    [record] = [each for each in caplog.records if "row group exceeds data.prefetchBytes" in each.message]
    assert (record.__dict__["rows"], record.__dict__["decoded_bytes"]) == (1_000, 1_000 * (2 * 4 + 8))


def read_unique(make_spec: Any, path: str, rows: int, max_lookups: int = 1) -> Any:
    document = {"format": "parquet", "train": {"uris": [path]}, "globalBatchSize": rows, "virtualShards": 1}
    table = {"name": "user", "rows": 100, "dim": 4, "maxLookups": max_lookups}
    spec = make_spec(document | {"shuffle": {"windowRows": 0}}, [table], ["price"])
    return open_reader(spec_with_unique(spec, {"user": 1}), "train", 0, 1).read(0)


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint32(), pa.int64(), pa.list_(pa.int64())])
def test_ids_without_bound_become_keys_that_name_them(kind: pa.DataType, write_parquet: Write, make_spec: Any) -> None:
    ids = np.arange(200)
    if kind not in (pa.uint8(), pa.uint32()):
        ids[:3] = 2**62, 2**63 - 1, 10**18
    held = pa.array([[id_] for id_ in ids.tolist()] if pa.types.is_list(kind) else ids)
    path = write_parquet({"label": ids % 2, "price": ids * 1.0, "user": held.cast(kind)}, row_group_size=64)

    keys = read_unique(make_spec, path, 200).values.numpy()

    assert (keys >= 0).all()
    assert len(np.unique(keys)) == 200
    assert ids_of_keys(keys.view(np.uint64), np.uint64(id_seed(0, "user"))).tolist() == ids.tolist()


def test_negative_ids_and_those_of_64_bits_are_hashed_to_63(write_parquet: Write, make_spec: Any) -> None:
    signed = write_parquet({"label": [0, 1], "price": [0.0, 1.0], "user": [-1, -(2**63)]}, "signed.parquet")
    wide = pa.array([2**64 - 1, 2**63], pa.uint64())
    unsigned = write_parquet({"label": [0, 1], "price": [0.0, 1.0], "user": wide}, "unsigned.parquet")

    keys = [read_unique(make_spec, path, 2).values.tolist() for path in (signed, unsigned)]

    assert keys[0] == keys[1]
    assert all(0 <= key < 2**63 - 1 for key in keys[0])
    hashed = (mix64(np.array([2**64 - 1, 2**63], np.uint64)) >> np.uint64(1)).astype(np.uint64)
    assert keys_of_ids(hashed, np.uint64(id_seed(0, "user"))).tolist() == keys[0]


def test_the_one_id_without_a_key_is_named(write_parquet: Write, make_spec: Any) -> None:
    [missing] = ids_of_keys(np.array([2**63 - 1], np.uint64), np.uint64(id_seed(0, "user"))).tolist()
    path = write_parquet({"label": [0, 1], "price": [0.0, 1.0], "user": [5, missing]})

    with pytest.raises(BadDataError, match=rf"row 1.*table user \(column user\): id {missing} "):
        read_unique(make_spec, path, 2)


TEXTS = ["", "a", "user-17", "a", "Zürich", None, "x" * 100, "nobody"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.string()),
        pa.list_(pa.string(), 1),
        pa.large_list(pa.large_string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=str,
)
def test_text_becomes_keys_by_its_bytes_alone(kind: pa.DataType, write_parquet: Write, make_spec: Any) -> None:
    count = len(TEXTS)
    bags = [[text] if text is not None and hasattr(kind, "value_field") else text for text in TEXTS]
    columns = {"label": [0] * count, "price": [1.0] * count, "user": pa.array(bags, kind)}
    texts = [text.encode() for text in TEXTS if text is not None]
    ids = np.empty(len(texts), np.int64)
    hash_texts(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]), ids)

    batch = read_unique(make_spec, write_parquet(columns), count)

    assert batch.lengths.tolist() == [[text is not None for text in TEXTS]]
    assert batch.values.tolist() == keys_of_ids(ids.view(np.uint64), np.uint64(id_seed(0, "user"))).tolist()
    assert len(set(batch.values.tolist())) == len(set(texts))


def test_bags_of_text_hold_no_null(write_parquet: Write, make_spec: Any) -> None:
    columns = {"label": [0, 1], "price": [0.0, 1.0], "user": [["a", "b"], ["c", None]]}

    with pytest.raises(BadDataError, match=r"row 1: invalid column user: .*null.* \['c', None\]$"):
        read_unique(make_spec, write_parquet(columns), 2, max_lookups=2)
