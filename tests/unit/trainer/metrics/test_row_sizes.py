"""Counters of rows of several sizes: those of a run, and as they are served."""

from __future__ import annotations

import numpy as np
import torch

from dlrm_api.dimensions import ROW_BYTES
from dlrm_testing.trainer.reference import slice_of
from dlrm_testing.trainer.sized_runs import OPTIMIZER, PERIOD, RATE, SAMPLES, SEED, batch, gradient_of, model, plan
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, place
from dlrm_trainer.embedding.unique import MaintenancePeriod
from dlrm_trainer.metrics.row_sizes import SizeMetrics, sizes_report
from dlrm_trainer.metrics.tiers import RankCounters, SharedCounters

STEPS = 24


def test_a_run_shows_what_its_rows_take() -> None:
    spec = model(0.5)
    placement, collectives = place(spec, plan(spec, 1), 1), Collectives(0, 1, lambda: "")
    options = EmbeddingOptions(optimizer=OPTIMIZER, seed=SEED, global_batch_size=SAMPLES, tier_dir=None)
    embeddings, period = Embeddings(placement, collectives, options), MaintenancePeriod.begin(PERIOD, None)
    counters = RankCounters(placement, 0, SharedCounters(plan(spec, 1), [0]).blocks[0])
    embeddings.begin_period(period)
    for part in embeddings.local:
        part.start(SEED)
    for number in range(STEPS):
        each = slice_of(spec, batch(spec, number), [0, SAMPLES], 0)
        each = type(each)(**{**vars(each), "number": number})
        pooled = embeddings.pool(embeddings.prepare(embeddings.send(each).result(), updates=True))
        width, buffer = embeddings.features(pooled).shape[1], torch.zeros(embeddings.gradient_elements)
        gradient = torch.from_numpy(gradient_of(number, width))
        embeddings.update(embeddings.send_gradients(pooled, gradient, buffer), RATE)
        if (number + 1) % PERIOD == 0:
            period = embeddings.maintain(number + 1, period)
    counters.copy_from(embeddings.tables)
    embeddings.close()

    narrow, wide = sizes_report(placement, OPTIMIZER, [counters.block])
    families = {family.name: family for family in SizeMetrics(placement, OPTIMIZER, [counters]).collect()}

    assert (narrow.dim, wide.dim) == (16, 24)
    assert narrow.full_bytes == (60 + 90) * (16 + 1) * 4
    for use in (narrow, wide):
        held = sum(rows * (4 * columns + 4 + 4) for columns, rows in use.rows.items())
        assert use.kept_bytes == use.full_bytes // (4 * use.dim + 4) * ROW_BYTES + held
    assert narrow.kept_bytes + wide.kept_bytes <= 0.5 * (narrow.full_bytes + wide.full_bytes) * 9 / 8
    assert narrow.grown_rows + wide.grown_rows > 0
    assert narrow.shrunk_rows + wide.shrunk_rows > 0
    rows = families["dlrm_trainer_sized_rows"].samples
    assert {each.labels["columns"]: each.value for each in rows if each.labels["dim"] == "16"} == {
        str(columns): count for columns, count in narrow.rows.items()
    }
    assert families["dlrm_trainer_sized_cut_off_utility"].samples[0].value > 0


def test_jobs_of_full_rows_have_no_series() -> None:
    spec = model(None)
    placement = place(spec, plan(spec, 1), 1)
    counters = RankCounters(placement, 0, SharedCounters(plan(spec, 1), [0]).blocks[0])

    assert not list(SizeMetrics(placement, OPTIMIZER, [counters]).collect())
    assert not np.any(counters.block)
