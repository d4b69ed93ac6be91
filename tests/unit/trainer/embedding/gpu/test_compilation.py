from __future__ import annotations

import re

import pytest

from dlrm_api.row_optimizers import RowOptimizerKind, state_values
from dlrm_api.tiers import RowDtype
from dlrm_kernels.replacement import LFU, LRU, MIXED
from dlrm_kernels.row_updates import KINDS
from dlrm_testing.trainer.triton_programs import Compiled, compiled
from dlrm_trainer.embedding.gpu import dirty_rows, message_packing
from dlrm_trainer.embedding.gpu.row_directory import BLOCK_WORDS, WAYS, admit_to_sets, find_in_sets, warps
from dlrm_trainer.embedding.gpu.row_updates import OPTIONS, RUN, sum_runs, update_each

MAX_SHARED_BYTES = 48 << 10
"""What a GPU gives to any kernel."""
LOOKUPS = {"rows": "*i32", "order": "*i64", "bags": "*i32", "gradient": "*fp32", "run_sums": "*fp32"}
LOOKUPS |= dict.fromkeys(("count", "stride", "samples", "first_column"), "i32")
WEIGHTED = {"weights": "*fp32"}
HALVES = {"weight": "*fp16", "keys": "*i64", "first_columns": "*i64", "numbers": "*i64"}
each_capability = pytest.mark.parametrize("capability", [80, 90])


def check(kernel: Compiled) -> None:
    # None of these rounds as the host does.
    assert re.findall(r"\b\S*(?:fma|approx|full|ftz)\S*", kernel.ptx) == []
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert kernel.spilled_bytes == 0


def check_update(capability: int, kind: RowOptimizerKind, dtype: RowDtype, dim: int, *, plain: bool = False) -> None:
    types = {"weight": "*fp32", "state": "*fp32"}
    types |= LOOKUPS | ({} if plain else WEIGHTED) | (HALVES if dtype == "fp16" else {})
    types |= dict.fromkeys(("rate", "eps", "strength", "intervals"), "fp32")
    constants = {"kind": KINDS[kind], "beta1": 0.9, "beta2": 0.999, "regularized": not plain, "run_length": RUN}
    constants |= {"state_width": state_values(kind, dim), "dim": dim, "block": max(8, 1 << (dim - 1).bit_length())}

    check(compiled(update_each, types, constants, OPTIONS, capability))


@each_capability
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "dim", "plain"), [("fp32", 128, True), ("fp16", 12, False)])
def test_updates_compile_for_gpus_without_spills_and_with_the_hosts_arithmetic(
    capability: int, kind: RowOptimizerKind, dtype: RowDtype, dim: int, plain: bool
) -> None:
    check_update(capability, kind, dtype, dim, plain=plain)


@pytest.mark.slow
@each_capability
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("dim", [4, 256, 1_024])
def test_updates_of_rows_of_any_dim_compile_for_gpus(
    capability: int, kind: RowOptimizerKind, dtype: RowDtype, dim: int
) -> None:
    check_update(capability, kind, dtype, dim)


@each_capability
@pytest.mark.parametrize("dim", [4, 1_024])
@pytest.mark.parametrize("weights", [{}, WEIGHTED], ids=["plain", "weighted"])
def test_sums_of_long_rows_compile_for_gpus(capability: int, dim: int, weights: dict[str, str]) -> None:
    types = LOOKUPS | weights
    constants = {"run_length": RUN, "dim": dim, "block": max(8, dim)}

    check(compiled(sum_runs, types, constants, OPTIONS, capability))


SETS = dict.fromkeys(("tags", "firsts", "sizes", "chosen", "rows"), "*i64") | {"words": "*i32", "batch": "i32"}
each_ways = pytest.mark.parametrize(
    "ways", [WAYS, pytest.param(1, marks=pytest.mark.slow), pytest.param(1_024, marks=pytest.mark.slow)]
)


@each_capability
@each_ways
@pytest.mark.parametrize("pins", [False, True])
def test_finding_rows_in_sets_compiles_for_gpus(capability: int, ways: int, pins: bool) -> None:
    constants = {"ways": ways, "block": max(1, BLOCK_WORDS // ways), "pins": pins}
    options = {"num_warps": 4, "enable_fp_fusion": False}

    check(compiled(find_in_sets, SETS | {"slots": "*i64", "count": "i32"}, constants, options, capability))


@each_capability
@each_ways
@pytest.mark.parametrize("policy", [LRU, LFU, MIXED])
def test_admitting_rows_to_sets_compiles_for_gpus(capability: int, ways: int, policy: int) -> None:
    types = SETS | dict.fromkeys(("ends", "targets", "leaving", "counts"), "*i64")
    options = {"num_warps": warps(ways), "enable_fp_fusion": False}

    check(compiled(admit_to_sets, types, {"policy": policy, "ways": ways}, options, capability))


SIDE = {"table": "*i64", "columns": "*i64", "places": "*i64", "pieces": "i32"}
SOURCE = {"source": "*fp32", **{f"source_{name}": kind for name, kind in SIDE.items()}}
CAME = {"message": "*i32", "out": "*fp32"}


@each_capability
def test_largest_values_of_messages_compile_for_gpus(capability: int) -> None:
    types = {"array": "*fp32", "largest": "*i32"} | SIDE

    check(compiled(message_packing.find_largest, types, {}, message_packing.OPTIONS, capability))


@each_capability
@pytest.mark.parametrize("columns", [4, 128])
def test_packing_compiles_for_gpus(capability: int, columns: int) -> None:
    types = {"array": "*fp32", "largest": "*i32", "wanted": "fp32", "message": "*i32", "check": "*fp32"} | SIDE
    constants = {"block_rows": message_packing.TILE // columns, "block_columns": columns}

    check(compiled(message_packing.pack, types, constants, message_packing.OPTIONS, capability))


@each_capability
@pytest.mark.parametrize("sums", [False, True])
def test_unpacking_compiles_for_gpus(capability: int, sums: bool) -> None:
    check(compiled(message_packing.unpack, CAME | SIDE | SOURCE, {"sums": sums}, message_packing.OPTIONS, capability))


@each_capability
@pytest.mark.parametrize("columns", [4, 128])
def test_sums_of_parts_compile_for_gpus(capability: int, columns: int) -> None:
    types = CAME | SIDE | SOURCE | {"split": "*i64", "count": "i32", "stride": "i32"}
    options = message_packing.SUM_OPTIONS

    check(compiled(message_packing.sum_parts, types, {"block_columns": columns}, options, capability))


@each_capability
def test_marks_of_rows_compile_for_gpus(capability: int) -> None:
    types = {"words": "*i32", "count": "*i64", "ids": "*i64", "described": "*i64", "columns": "i32"}

    check(compiled(dirty_rows.mark_rows, types, {"block": dirty_rows.LOOKUPS}, dirty_rows.OPTIONS, capability))
