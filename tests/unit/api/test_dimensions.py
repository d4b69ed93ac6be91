"""Bytes of rows of several sizes follow one formula, and a share that cannot be kept is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.dimensions import MAX_SIZES, SlabBytes, default_sizes
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job

widths = st.integers(1, 1_024).map(lambda quarter: 4 * quarter)
tables = st.builds(SlabBytes, dim=widths, state_bytes=st.sampled_from([0, 4]), keep=st.floats(0.001, 1))


@given(dim=widths)
def test_default_sizes_are_near_a_quarter_and_a_half(dim: int) -> None:
    sizes = default_sizes(dim)

    assert sizes[-1] == dim
    assert len(sizes) <= MAX_SIZES
    assert all(one < other for one, other in pairwise((0, *sizes)))
    assert all(size % 4 == 0 and min(abs(size - dim / parts) for parts in (1, 2, 4)) <= 3 for size in sizes)


@given(table=tables, rows=st.integers(1, 2**40), less=st.floats(0.001, 1))
def test_keeping_less_never_takes_more(table: SlabBytes, rows: int, less: float) -> None:
    smaller = SlabBytes(dim=table.dim, state_bytes=table.state_bytes, keep=table.keep * less)

    assert smaller.budget(rows) <= table.budget(rows)
    assert smaller.planned(rows) <= table.planned(rows) <= rows * (table.row + table.slab_row(table.dim))


@given(table=tables, rows=st.integers(1, 2**40))
def test_the_budget_with_all_that_rows_take_is_the_share(table: SlabBytes, rows: int) -> None:
    share = rows * table.plain_row * table.keep

    if table.min_keep < table.keep < 1:
        assert table.budget(rows) + rows * table.row <= share + 1e-3 * rows
        assert table.planned(rows) <= rows * table.row + (share - rows * table.row) * 9 / 8 + 2
    if table.keep == 1:
        assert table.planned(rows) == rows * (table.row + table.slab_row(table.dim))


@pytest.mark.parametrize(("dim", "quarter", "eighth"), [(16, 32, 24), (32, 48, 32), (64, 80, 48), (128, 144, 80)])
def test_a_row_of_part_of_its_columns_takes_all_that_is_documented(dim: int, quarter: int, eighth: int) -> None:
    table = SlabBytes(dim=dim, state_bytes=4, keep=1)

    assert table.plain_row == 4 * dim + 4
    assert table.row + table.slab_row(dim // 4) == quarter
    assert table.row + table.slab_row(dim // 8) == eighth


@pytest.mark.parametrize(("dim", "least"), [(16, 0.118), (64, 0.031)])
def test_the_error_names_the_least_share_that_works(dim: int, least: float) -> None:
    def job(share: float) -> dict:
        table = {"name": "t", "rows": 9, "dim": dim, "embedding": {"dimension": {"keepBytes": share}}}
        return {
            "apiVersion": "dlrm.dev/v1alpha1",
            "kind": "DLRMJob",
            "metadata": {"name": "job"},
            "spec": {
                "model": {"topMlp": [1], "tables": [table, {"name": "u", "rows": 9, "dim": dim}]},
                "data": {"format": "synthetic"},
                "checkpoint": {"uri": "s3://bucket/job"},
            },
        }

    with pytest.raises(InvalidSpecError, match=f"keepBytes.*at least {least}"):
        parse_job(job(least - 0.001))
    assert parse_job(job(least)).spec.model.tables[0].sizes == (dim // 4, dim // 2, dim)
    assert parse_job(job(1))
