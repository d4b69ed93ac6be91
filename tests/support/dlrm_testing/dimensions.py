"""Tables with rows of several sizes, before jobs may have them."""

import pytest

from dlrm_api.job import NOT_BUILT, DLRMJobSpec


@pytest.fixture
def dimension_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept jobs with ``embedding.dimension``."""
    monkeypatch.setattr(DLRMJobSpec, "rules", tuple(rule for rule in DLRMJobSpec.rules if rule is not NOT_BUILT))
