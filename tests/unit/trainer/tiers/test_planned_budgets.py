"""A planned hierarchy that is full of rows keeps to the bytes that its plan said, tier by tier."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_api.tiers import TIER_BUFFER_BYTES
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.types import ShardRows
from dlrm_planner import plan_job
from dlrm_testing.trainer.gangs import small_job
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner

ROWS, DIM = 200_000, 64
PIECE = 40_000


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "column_block"), [(0, DIM), (8, DIM), (0, DIM // 4)])
@pytest.mark.parametrize(
    "budgets",
    [{"ddr": "164Mi", "block": "1Gi"}, {"ddr": "164Mi", "scm": "1Gi"}, {"ddr": "164Mi", "scm": "20Mi", "block": "1Gi"}],
)
def test_rows_of_every_table_fit_the_planned_bytes(
    tmp_path: Path, budgets: dict[str, str], ways: int, column_block: int
) -> None:
    tables = [{"name": f"t{i}", "rows": ROWS, "dim": DIM, "columnBlock": column_block} for i in range(2)]
    model = {"tables": tables, "interaction": "dcn", "topMlp": [1], "denseFeatures": [], "bottomMlp": []}
    job = small_job(tmp_path, model=model, trainer={"tierBudgets": budgets, "cache": {"ways": ways}})
    plan = plan_job(job.spec)
    learner = Learner(job.spec, place(job.spec.model, plan, 1), Collectives(0, 1, lambda: ""), tmp_path)
    learner.start(0)

    for part in learner.embeddings.tables.parts():
        for first in range(0, ROWS, PIECE):
            ids = np.arange(first, first + PIECE)
            rows, state = np.ones((PIECE, part.shard.width), np.float32), np.ones((PIECE, 1), np.float32)
            part.restore(code_rows(ShardRows(shard=part.shard, row_ids=ids, rows=rows, state=state), 32))
    kept: dict[str, int] = {}
    for group in learner.embeddings.tables.groups:
        assert group.stack is not None
        for tier, size in group.stack.bytes_kept.items():
            kept[tier] = kept.get(tier, 0) + size
    learner.embeddings.close()

    planned = dict(plan.ranks[0].bytes_per_tier)
    planned["ddr"] -= plan.handoff_bytes[0] + TIER_BUFFER_BYTES
    assert set(kept) == set(planned)
    for tier, size in kept.items():
        assert size <= 1.05 * planned[tier], (tier, kept, planned)
