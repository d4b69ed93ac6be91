from __future__ import annotations

import pytest
from benchmarks.scm_nodes import GROUPS, MODELS, Published, groups_of


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tables_have_the_published_parameters_and_dims(model: Published) -> None:
    groups, tables = groups_of(model), model.tables // GROUPS

    assert sum(dim * rows * tables for dim, rows in groups) == pytest.approx(model.parameters, rel=1e-3)
    dims = [dim for dim, _ in groups]
    assert model.min_dim <= min(dims)
    assert max(dims) <= model.max_dim
    assert sum(dims) / GROUPS == pytest.approx(model.mean_dim, rel=0.05)
