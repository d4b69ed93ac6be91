"""What tables that are split by rows take of a pod's memory in a step, counted by hand."""

from __future__ import annotations

import math

from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import ShardRange, TablePlan


def range_bytes(spec: DLRMJobSpec, planned: TablePlan, shard: ShardRange) -> int:
    """Pooled rows and gradients of the whole batch, and messages, beyond a like part of what plans count anyway."""
    found = next(table for table in spec.model.all_tables() if table.name == planned.name)
    share = (shard.row_end - shard.row_start) / found.rows
    copies = 2 + 2 * (1 - (1 - share) ** found.lookups) - 4 / len(planned.shards)
    return math.ceil(max(copies, 0.0) * 4 * found.dim * len(found.sources) * spec.data.global_batch_size)
