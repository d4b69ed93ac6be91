"""Each registry has exactly the names that the API's types offer."""

from typing import Any, get_args

import pytest

from dlrm_api import row_optimizers, tiers, wire


@pytest.mark.parametrize(
    ("names", "table"),
    [
        pytest.param(tiers.Tier, tiers.TIERS, id="tiers"),
        pytest.param(wire.Codec, wire.CODECS, id="codecs"),
        pytest.param(row_optimizers.RowOptimizerKind, row_optimizers.ROW_OPTIMIZERS, id="row-optimizers"),
    ],
)
def test_registry_holds_every_name_in_order(names: Any, table: Any) -> None:
    assert tuple(table) == get_args(names)
