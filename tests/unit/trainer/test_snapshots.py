from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dlrm_api.errors import DLRMError, InvalidSpecError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.model import DimensionSpec, EmbeddingOptions
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.format.chain import Chain, SnapshotBase, load_chain
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import Durable
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import CutMeta, ShardId, ShardRows, SnapshotName, TableMeta, load_rows
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.upload import Upload, WritePlan
from dlrm_stores import ObjectStore, StoreOptions
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import check_piece
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.trainer.gangs import hand_plan, job_document, small_job
from dlrm_trainer.checkpointing.compat import check_data, check_model, first_change
from dlrm_trainer.checkpointing.restore import begin_from, live_digest, model_document, restore
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.checkpoint import ResidentPart, table_meta
from dlrm_trainer.evaluate import evaluate
from dlrm_trainer.learner import Learner

ALONE = Collectives(0, 1, lambda: "")


class Memory:
    """A snapshot that was never written anywhere."""

    def __init__(self, pieces: list[ShardRows], dense: dict[str, Any], tables: Sequence[TableMeta], step: int) -> None:
        self.pieces, self.arrays, self.step = pieces, dense, step
        self.tables = {table.name: table for table in tables}

    def shard_codes(self, shards: Sequence[ShardId]) -> Iterator[tuple[int, CodedRows]]:
        for number, shard in enumerate(shards):
            for each in self.pieces:
                if each.shard.table == shard.table:
                    yield from ((number, coded) for coded in code_rows(each, 32, table=self.tables[shard.table]))

    def dense(self) -> dict[str, Any]:
        return self.arrays


def learner_of(job: DLRMJob) -> Learner:
    learner = Learner(job.spec, place(job.spec.model, hand_plan(job), 1), ALONE)
    learner.start(job.spec.training.seed)
    return learner


def train(job: DLRMJob, learner: Learner, start: int, stop: int) -> None:
    reader = open_reader(job.spec, "train", 0, 1)
    for number in range(start, stop):
        prepared = learner.prepare(learner.send(reader.read(number)))
        learner.apply(learner.compute(prepared, reader.global_count(number)), factor=1.0)
    reader.close()


def digest_of(job: DLRMJob, learner: Learner) -> str:
    return live_digest(learner, ALONE)


def part_of(learner: Learner, table: str) -> ResidentPart:
    (part,) = (part for part in learner.embeddings.local if part.table.name == table)
    assert isinstance(part, ResidentPart)
    return part


def cut_of(job: DLRMJob, learner: Learner) -> Memory:
    pieces = [load_rows(piece) for piece in learner.embeddings.saved.changed_rows()]
    tables = [table_meta(each, job.spec.training.seed, "rowwise-adagrad") for each in job.spec.model.all_tables()]
    return Memory(pieces, learner.dense.arrays(), tables, step=6)


@pytest.mark.parametrize("kind", ["adagrad", "adam", "sgd"])
def test_training_from_a_cut_ends_with_the_bytes_of_training_through(tmp_path: Path, kind: str) -> None:
    job = small_job(tmp_path, training={"denseOptimizer": {"kind": kind}})
    whole, second = learner_of(job), learner_of(job)

    train(job, whole, 0, 6)
    cut = cut_of(job, whole)
    train(job, whole, 6, 14)
    restore(second, cut, ALONE)  # type: ignore[arg-type]
    train(job, second, 6, 14)

    assert digest_of(job, second) == digest_of(job, whole)


def test_a_cut_holds_exactly_the_rows_ever_updated_in_consistent_pieces(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    learner, fresh = learner_of(job), learner_of(job)

    train(job, learner, 0, 3)

    pieces = cut_of(job, learner).pieces
    seed, tables = job.spec.training.seed, job.spec.model.all_tables()
    metas = {table.name: table_meta(table, seed, "rowwise-adagrad") for table in tables}
    for piece in pieces:
        check_piece(piece, metas[piece.shard.table])
    for part, start in zip(learner.embeddings.local, fresh.embeddings.local, strict=True):
        assert isinstance(part, ResidentPart)
        assert isinstance(start, ResidentPart)
        saved = [row for piece in pieces if piece.shard == part.shard for row in piece.row_ids.tolist()]
        changed = np.flatnonzero((part.weight != start.weight).any(dim=1).numpy())
        assert set(changed) <= set(saved)
        assert set(np.flatnonzero(part.state[:, 0].numpy())) <= set(saved)
        assert len(saved) < part.table.rows
    assert len(pieces) == 4


@pytest.mark.parametrize("committed", [None, 8])
def test_a_cut_without_a_parent_holds_rows_updated_before_a_restore(tmp_path: Path, committed: int | None) -> None:
    job = small_job(tmp_path)
    first, second, third = (learner_of(job) for _ in range(3))
    train(job, first, 0, 6)
    restore(second, cut_of(job, first), ALONE)  # type: ignore[arg-type]
    restored = cut_of(job, second).pieces
    train(job, second, 6, 8)
    if committed is not None:
        second.embeddings.saved.begin_cut(committed, 6)
        second.embeddings.saved.begin_cut(committed + 1, committed)
    train(job, second, 8, 10)

    second.embeddings.saved.begin_cut(10, None)
    restore(third, cut_of(job, second), ALONE)  # type: ignore[arg-type]

    assert restored == []
    assert digest_of(job, third) == digest_of(job, second)


def test_an_evaluation_changes_no_byte_and_marks_no_row(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    learner = learner_of(job)
    train(job, learner, 0, 3)
    digest, rows = digest_of(job, learner), sum(len(piece.row_ids) for piece in cut_of(job, learner).pieces)

    reader = open_reader(job.spec, "eval", 0, 1)

    metrics = evaluate(learner, reader.iterate(0, reader.batches_per_epoch), ALONE, step=3)

    assert metrics is not None
    assert metrics.samples == 500
    assert digest_of(job, learner) == digest
    assert sum(len(piece.row_ids) for piece in cut_of(job, learner).pieces) == rows


def test_an_evaluation_holds_the_activations_of_a_micro_batch_alone(tmp_path: Path) -> None:
    seen: list[int] = []
    whole, pieces = (learner_of(small_job(tmp_path, training=more)) for more in ({}, {"microBatchSize": 20}))
    pieces.model.top.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    batch = open_reader(small_job(tmp_path).spec, "eval", 0, 1).read(0)

    scores = pieces.logits(batch)

    assert seen == [20, 20, 20, 4]
    torch.testing.assert_close(scores, whole.logits(batch))


def changed(tmp_path: Path, section: str, **values: Any) -> DLRMJob:
    document = job_document(tmp_path)
    document["spec"][section] |= values
    return parse_job(document)


def with_table(tmp_path: Path, **values: Any) -> DLRMJob:
    tables = [dict(table) for table in job_document(tmp_path)["spec"]["model"]["tables"]]
    tables[1] |= values
    return changed(tmp_path, "model", tables=tables)


def check(meta: CutMeta, job: DLRMJob, last_rows: dict[str, int] | None = None) -> bool:
    """Whether the snapshot's tables have other sizes in the job; raises where it does not fit."""
    model = model_document(job.spec, learner_of(job))
    return check_model(meta, last_rows or {}, model, job.spec.model.all_tables(), "file:///store/m.json")


def test_a_table_may_get_more_rows_or_lose_ones_that_were_never_trained(tmp_path: Path) -> None:
    same = {"initializer": {"scale": 0.25}}
    job = with_table(tmp_path, **same)
    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model=model_document(job.spec, learner_of(job)))

    assert check(meta, with_table(tmp_path, rows=500, **same), {"bags": 119})
    assert check(meta, with_table(tmp_path, rows=100, **same), {"bags": 99})
    assert not check(meta, job, {"bags": 119})


@pytest.mark.parametrize(
    ("values", "last_row", "problem"),
    [
        ({"rows": 100}, 110, "row 110 was trained and would be lost; set at least 111 rows"),
        ({"rows": 200, "initializer": {}}, 5, "set initializer.scale 0.25, the scale of the snapshot's 120 rows"),
        ({"rows": 200, "embedding": {"hash": "mix"}}, 5, "embedding.hash mix would give each id another row"),
    ],
)
def test_another_number_of_rows_is_refused_if_it_changes_trained_rows(
    tmp_path: Path, values: Any, last_row: int, problem: str
) -> None:
    job = with_table(tmp_path, initializer={"scale": 0.25})
    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model=model_document(job.spec, learner_of(job)))
    other = with_table(tmp_path, **({"initializer": {"scale": 0.25}} | values))

    with pytest.raises(SnapshotError) as caught:
        check(meta, other, {"bags": last_row})

    assert f"table bags to {values['rows']} rows: " in str(caught.value)
    assert problem in str(caught.value)


def with_sizes(job: DLRMJob, *sizes: int) -> DLRMJob:
    """The job whose table ``bags`` has rows of these sizes; all columns without any."""
    options = EmbeddingOptions(dimension=DimensionSpec(keep_bytes=0.9, sizes=sizes)) if sizes else EmbeddingOptions()
    model = job.spec.model
    tables = [t.model_copy(update={"embedding": options}) if t.name == "bags" else t for t in model.tables]
    spec = job.spec.model_copy(update={"model": model.model_copy(update={"tables": tuple(tables)})})
    return job.model_copy(update={"spec": spec})


def rows_of(learner: Learner, rows: list[int]) -> NDArray[np.float32]:
    (part,) = (part for part in learner.embeddings.local if part.table.name == "bags")
    return load_rows(part.in_place(np.array(rows))).rows


@pytest.mark.parametrize(("then", "now"), [((), (4, 8)), ((4, 8), ()), ((4, 8), (8,)), ((4, 8), (4, 8))])
def test_a_table_may_get_or_lose_sizes_of_its_rows(tmp_path: Path, then: Any, now: Any) -> None:
    """No row loses a column: those that it did not have are 0."""
    job, other = (with_sizes(small_job(tmp_path), *sizes) for sizes in (then, now))
    old, new = learner_of(job), learner_of(other)
    train(job, old, 0, 6)
    cut = cut_of(job, old)
    meta = CutMeta(step=6, samples=64, world_size=1, attempt=1, model=model_document(job.spec, old))

    is_changed = check_model(meta, {}, model_document(other.spec, new), other.spec.model.all_tables(), "here")
    restore(new, cut, ALONE, mark=is_changed)  # type: ignore[arg-type]

    trained = [row for piece in cut.pieces if piece.shard.table == "bags" for row in piece.row_ids.tolist()]
    assert is_changed == (then != now)
    np.testing.assert_array_equal(rows_of(new, trained), rows_of(old, trained))
    saved = [piece for piece in cut_of(other, new).pieces if piece.shard.table == "bags"]
    assert sorted(row for piece in saved for row in piece.row_ids.tolist()) == (sorted(trained) if is_changed else [])
    train(other, new, 6, 8)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda path: with_table(path, name="bag", features=["bags"]), "table bag was added"),
        (lambda path: with_table(path, initializer={"kind": "zero"}), "table bags.scale was"),
        (lambda path: with_table(path, dtype="fp16"), "table bags.dtype was fp32 and is fp16"),
        (lambda path: with_table(path, embedding={"hash": "mix"}), "table bags.hash was none and is mix"),
        (lambda path: with_table(path, pooling="sum"), "table bags.pooling was mean and is sum"),
        (
            lambda path: changed(path, "training", rowOptimizer={"kind": "adam"}),
            "model.rowOptimizer was rowwise-adagrad and is adam",
        ),
        (lambda path: changed(path, "model", topMlp=[8, 1]), "model.dense.top.layers.0.bias was [16] and is [8]"),
        (lambda path: changed(path, "training", denseOptimizer={"kind": "adam"}), "model.denseOptimizer was adagrad"),
        (lambda path: changed(path, "training", seed=4), "table users.seed was 3 and is 4"),
    ],
)
def test_another_model_is_refused_by_the_name_of_what_changed(tmp_path: Path, edit: Any, named: str) -> None:
    job, other = small_job(tmp_path), edit(tmp_path)
    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model=model_document(job.spec, learner_of(job)))

    with pytest.raises(SnapshotError) as caught:
        check(meta, other)

    assert named in str(caught.value)
    assert "spec.checkpoint.uri" in str(caught.value)


def test_shared_rows_may_come_and_go_but_not_change_their_number(tmp_path: Path) -> None:
    unique = {"hash": "unique", "buckets": 2}
    without, job, other = (
        with_table(tmp_path, embedding={**unique, **more})
        for more in ({}, *({"unknown": "shared", "sharedRows": rows} for rows in (8, 10)))
    )
    learner = learner_of(small_job(tmp_path))

    def fits(then: DLRMJob, now: DLRMJob) -> bool:
        meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model=model_document(then.spec, learner))
        return not check_model(meta, {}, model_document(now.spec, learner), now.spec.model.all_tables(), "store")

    assert fits(job, job)
    assert not fits(job, without)
    assert not fits(without, job)
    with pytest.raises(SnapshotError, match=r"embedding\.sharedRows of table bags to 10: .* keep the 8"):
        fits(job, other)


def test_tables_whose_ids_became_unique_need_a_conversion(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    model = model_document(job.spec, learner_of(job))
    unique = {"hash": "unique", "ids": "unique", "buckets": 1, "rowValues": ["touched"]}
    tables = [table | unique if table["name"] == "bags" else table for table in model["tables"]]
    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model={**model, "tables": tables})

    with pytest.raises(SnapshotError, match=r"table bags .*--table bags=fixed\) and set spec\.checkpoint\.restoreFrom"):
        check(meta, job)


def test_an_old_snapshot_without_state_type_and_hash_fits_the_same_model(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    model = model_document(job.spec, learner_of(job))
    since = ("stateColumns", "dtype", "hash", "pooling")
    older = [{key: table[key] for key in table if key not in since} for table in model["tables"]]

    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model={**model, "tables": older})

    assert not check(meta, job)


def test_changed_data_is_refused_and_an_unchanged_job_is_not(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    model = model_document(job.spec, learner_of(job))
    fingerprint = {"samples": 10, "files": [{"name": "a", "bytes": 5}]}
    meta = CutMeta(step=1, samples=64, world_size=1, attempt=1, model=model)

    check_data(fingerprint, fingerprint, "here")
    assert not check(meta, job)
    with pytest.raises(SnapshotError, match=r"data\.files\[a\]\.bytes was 5 and is 6"):
        check_data(fingerprint, {"samples": 10, "files": [{"name": "a", "bytes": 6}]}, "here")


@pytest.mark.parametrize(
    ("days", "change"),
    [
        (range(41), "day_40.tsv was added; there were 40 and there are 41"),
        (range(39), "day_39.tsv was removed; there were 40 and there are 39"),
        ([*range(20), *range(21, 40), 50, 51], "day_20.tsv was removed; there were 40 and there are 41"),
    ],
)
def test_files_that_came_or_went_are_named_however_many_there_are(days: Sequence[int], change: str) -> None:
    then, now = ([{"name": f"day_{day}.tsv", "bytes": 9, "rows": 1} for day in found] for found in (range(40), days))

    assert first_change({"files": then}, {"files": now}, "data") == f"data.files: {change}"


def test_an_old_snapshot_without_columns_and_dense_fits_the_same_data() -> None:
    then = {"samples": 10}
    now = {"samples": 10, "columns": {"label": "click"}, "dense": {"transform": "none", "missing": 0.0}}

    check_data(then, now, "here")
    check_data(now, now, "here")
    with pytest.raises(SnapshotError, match=r"data\.columns\.label was click and is like"):
        check_data(now, now | {"columns": {"label": "like"}}, "here")


def test_an_old_snapshot_without_file_content_fits_the_same_data() -> None:
    file = {"name": "a", "bytes": 5, "rows": 1}
    older, newer = ({"files": [each]} for each in (file, file | {"content": "1f"}))

    check_data(older, {"files": [file | {"content": "2e"}]}, "here")
    check_data(newer, {"files": [file | {"content": "1f"}]}, "here")
    with pytest.raises(SnapshotError, match=r"data\.files\[a\]\.content was 1f and is 2e"):
        check_data(newer, {"files": [file | {"content": "2e"}]}, "here")
    with pytest.raises(SnapshotError, match=r"data\.files\[a\]\.bytes was 5 and is 6"):
        check_data(older, {"files": [file | {"bytes": 6, "content": "2e"}]}, "here")


@pytest.mark.parametrize(
    ("then", "now", "change"),
    [
        ({"digest": "1f", "modified": 1}, {"digest": "1f", "modified": 2}, ""),
        ({"digest": "1f"}, {"digest": "2e"}, r"digest was 1f and is 2e"),
        ({"digest": "1f"}, {"etag": '"2e"'}, ""),
        ({"etag": '"1f"'}, {"etag": '"2e"'}, r"etag was \"1f\" and is \"2e\""),
        ({"etag": '"1f-3"'}, {"etag": '"2e-4"'}, ""),
        ({"etag": '"1f-3"'}, {"etag": '"2e-3"'}, r"etag was"),
    ],
)
def test_a_file_is_other_data_only_if_its_content_is_known_to_differ(
    then: dict[str, Any], now: dict[str, Any], change: str
) -> None:
    file = {"name": "a", "bytes": 5, "rows": 1, "content": "cc"}

    if change:
        with pytest.raises(SnapshotError, match=change):
            check_data({"files": [file | then]}, {"files": [file | now]}, "here")
    else:
        check_data({"files": [file | then]}, {"files": [file | now]}, "here")


def test_of_long_lists_the_first_value_that_changed_is_named() -> None:
    then = {"bags": [f"feature_{number}" for number in range(100)]}
    now = {"bags": [*then["bags"][:70], "other", *then["bags"][71:]]}

    assert first_change(then, now, "data.columns") == "data.columns.bags[70] was feature_70 and is other"


def test_lists_and_tuples_of_json_are_the_same() -> None:
    assert first_change({"a": [1, [2, 3]]}, {"a": (1, (2, 3))}, "x") is None
    assert first_change({"a": [1]}, {"a": [1, 2]}, "x") == "x.a was [1] and is [1, 2]"
    assert first_change({"a": 1}, {}, "x") == "x.a was 1 and is absent"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda plan: plan.model_copy(update={"world_size": 2}), "plan.worldSize: expected 1, the job's ranks, got 2"),
        (lambda plan: plan.model_copy(update={"tables": plan.tables[1:]}), "table users is not in the plan"),
        (lambda plan: plan.model_copy(update={"tables": plan.tables[::-1]}), "in the model's order"),
        (lambda plan: _with_shard(plan, column_end=4), "table users: expected whole column blocks"),
        (
            lambda plan: _with_shard(plan, row_end=5),
            "table users: rows 5 to 900 of columns from 0 on are not the table's, or are in no shard",
        ),
        (lambda plan: _with_shard(plan, rank=3), "table users: expected ranks from 0 to 0"),
        (
            lambda plan: _with_table(plan, column_blocks=(0, 4, 8)),
            "table users: the job has column blocks with edges (0, 8); replan the job",
        ),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused_by_field_and_table(tmp_path: Path, edit: Any, named: str) -> None:
    job = small_job(tmp_path)

    with pytest.raises(InvalidSpecError) as caught:
        place(job.spec.model, edit(hand_plan(job)), 1)

    assert named in str(caught.value)


def _with_table(plan: Any, **values: Any) -> Any:
    return plan.model_copy(update={"tables": (plan.tables[0].model_copy(update=values), *plan.tables[1:])})


def _with_shard(plan: Any, **values: Any) -> Any:
    return _with_table(plan, ranges=(plan.tables[0].shards[0].model_copy(update=values),))


def commit(job: DLRMJob, learner: Learner, step: int, folder: Path, store: FileStore) -> None:
    """A snapshot of a learner, as the job's checkpointer would make it."""
    writer, inbox = HandoffWriter(folder, 0, None), Inbox(folder, range(1))
    meta = CutMeta(
        step=step,
        samples=0,
        world_size=1,
        attempt=1,
        time=0.0,
        reader={},
        model=model_document(job.spec, learner),
        metrics={},
    )
    owned = [part.shard for part in learner.embeddings.saved]
    writer.hand_over(meta, learner.embeddings.saved.changed_rows(), learner.dense.arrays(), owned=owned, timeout_s=0)
    way = WritePlan(bits=32, basis=SnapshotBase(kind="full"))
    Upload(store, inbox.open(inbox.ready()[0]), Durable(), way, on_put=lambda _: None, on_read=lambda _: None).run()
    assert try_commit(store, step, 1, 1)
    writer.close("done")
    inbox.close()


def test_rows_of_several_sizes_have_one_digest_in_memory_and_in_a_snapshot(tmp_path: Path) -> None:
    job, store = with_sizes(small_job(tmp_path), 4, 8), FileStore(tmp_path / "other")
    learner, second = learner_of(job), learner_of(job)
    train(job, learner, 0, 3)
    commit(job, learner, 3, tmp_path / "pod", store)
    snapshot = Snapshot(store, load_chain(store, SnapshotName(3, 1)))

    restore(second, snapshot, ALONE)

    assert snapshot_digest(snapshot) == digest_of(job, learner) == digest_of(job, second)


@pytest.mark.parametrize(
    ("gone", "opens", "error"),
    [
        ("manifests/ chunks/", False, TemporaryError),
        ("manifests/ chunks/", True, TemporaryError),
        ("chunks/", False, SnapshotError),
        ("chunks/", True, SnapshotError),
    ],
)
def test_a_foreign_snapshot_is_retried_if_retired_and_not_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, opens: bool, error: type[DLRMError]
) -> None:
    job, store = small_job(tmp_path), FileStore(tmp_path / "other")
    learner, fresh = learner_of(job), learner_of(job)
    train(job, learner, 0, 3)
    commit(job, learner, 3, tmp_path / "pod", store)

    def retire() -> None:
        store.delete_all([info.key for prefix in gone.split() for info in store.list(prefix)])

    def opened(store: ObjectStore, name: SnapshotName) -> Chain:
        if opens:
            found = load_chain(store, name)
        retire()
        return found if opens else load_chain(store, name)

    monkeypatch.setattr("dlrm_trainer.checkpointing.restore.load_chain", opened)
    parts: Any = SimpleNamespace(job=job, learner=fresh, gang=SimpleNamespace(rank=0, collectives=ALONE))

    with pytest.raises(error, match="restoreFrom: .* step 3 was retired" if error is TemporaryError else "missing"):
        begin_from(parts, store.uri, StoreOptions())
