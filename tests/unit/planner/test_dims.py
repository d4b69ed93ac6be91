"""Advised dims: within the budget, narrower for larger tables, and a model that is valid."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_planner import DimAdvice, advise_dims
from dlrm_planner.tables import read_tables

WIDTH = 64
rows = st.integers(1, 10**9)
options = st.one_of(
    st.fixed_dictionaries(
        {"rows": rows}, optional={"dtype": st.just("fp16"), "columnBlock": st.sampled_from([16, 32])}
    ),
    st.fixed_dictionaries({"rows": rows, "columnBlock": st.just(16), "pin": st.just({"sharding": "column"})}),
    st.fixed_dictionaries({"rows": rows, "embedding": st.just({"hash": "unique"})}),
).map(lambda table: {"dim": WIDTH, **table})
models = st.tuples(
    st.lists(options, min_size=2, max_size=4), st.none() | options, st.booleans(), st.sampled_from(["dot", "dcn"])
)
optimizers = st.sampled_from(["rowwise-adagrad", "adam"])
shares = st.floats(0, 1)


def job_spec(model: tuple[Any, ...], optimizer: str) -> DLRMJobSpec:
    tables, group, has_bottom, interaction = model
    document: dict[str, Any] = {
        "interaction": interaction, "tables": [{"name": f"t{i}", **table} for i, table in enumerate(tables)],
    }  # fmt: skip
    if group is not None:
        document["tableGroups"] = [{"name": "g", "count": 3, "template": group}]
    if has_bottom:
        document |= {"denseFeatures": ["x"], "bottomMlp": [WIDTH]}
    spec = {
        "model": document,
        "data": {"format": "synthetic"},
        "training": {"rowOptimizer": {"kind": optimizer}},
        "checkpoint": {"uri": "file:///snapshots"},
    }
    return parse_job({"metadata": {"name": "job"}, "spec": spec}).spec


def with_dims(spec: DLRMJobSpec, advice: DimAdvice) -> DLRMJobSpec:
    """Take the advice, and check the model as a manifest is."""
    document = spec.model_dump(mode="json", exclude_unset=True)
    declared = [
        *document["model"]["tables"],
        *(group["template"] for group in document["model"].get("tableGroups", ())),
    ]
    for table, advised in zip(declared, advice.tables, strict=True):
        table |= {"dim": advised.advised_dim, "project": advised.project}
    return parse_job({"metadata": {"name": "job"}, "spec": document}).spec


def bytes_of(spec: DLRMJobSpec) -> int:
    return sum(size.resident for size in read_tables(spec).whole)


def advice_at(spec: DLRMJobSpec, share: float) -> tuple[DimAdvice, int]:
    """Return the advice, and its budget: of the smallest dims at a share of 0, of the declared ones at 1."""
    least = smallest(spec)
    budget = least + int(share * (bytes_of(spec) - least))
    return advise_dims(spec, budget), budget


def smallest(spec: DLRMJobSpec) -> int:
    with pytest.raises(InfeasiblePlanError) as refused:
        advise_dims(spec, 0)
    return next(int(word) for word in str(refused.value).split() if word.isdigit())


@given(models, optimizers, shares)
def test_advised_tables_are_valid_and_take_what_is_said(model: Any, optimizer: str, share: float) -> None:
    spec = job_spec(model, optimizer)

    advice, budget = advice_at(spec, share)

    narrowed = with_dims(spec, advice)
    assert bytes_of(narrowed) == advice.bytes <= budget
    assert advice.declared_bytes == bytes_of(spec)
    assert all(4 <= table.advised_dim <= WIDTH for table in advice.tables)
    # The same budget narrows them no more.
    again = advise_dims(narrowed, budget)
    assert [table.advised_dim for table in again.tables] == [table.advised_dim for table in advice.tables]


@given(models, optimizers, shares, shares)
def test_a_larger_budget_narrows_no_table(model: Any, optimizer: str, one: float, other: float) -> None:
    spec = job_spec(model, optimizer)

    (less, _), (more, _) = (advice_at(spec, share) for share in sorted((one, other)))

    assert all(a.advised_dim <= b.advised_dim for a, b in zip(less.tables, more.tables, strict=True))


@given(models, optimizers)
def test_the_declared_dims_are_advised_if_they_fit(model: Any, optimizer: str) -> None:
    spec = job_spec(model, optimizer)

    advice = advise_dims(spec, bytes_of(spec))

    assert {table.advised_dim for table in advice.tables} == {WIDTH}
    assert not any(table.project for table in advice.tables)
    assert advice.projection_parameters == 0


def test_dims_follow_rows_to_the_power_of_minus_three_tenths() -> None:
    tables = [{"rows": count, "dim": 4_000} for count in (10**3, 10**6, 10**8)]
    spec = job_spec((tables, None, False, "dot"), "sgd")

    small, middle, large = advise_dims(spec, bytes_of(spec) // 20).tables

    assert small.advised_dim > middle.advised_dim > large.advised_dim
    assert middle.advised_dim / large.advised_dim == pytest.approx(100**0.3, rel=0.05)
    # The widest table gives the dot interaction its width.
    assert [table.project for table in (small, middle, large)] == [False, True, True]
