"""Test the sidecar's reports."""

from __future__ import annotations

import pytest

from dlrm_checkpointer.status import Status


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("dlrm_checkpointer_commits_total", "kind", ["full", "increment"]),
        ("dlrm_checkpointer_store_repeats_total", "reason", ["throttled", "failed", "broken", "credentials"]),
    ],
)
def test_counters_begin_at_0_so_that_their_first_event_is_an_increase(name: str, label: str, values: list[str]) -> None:
    registry = Status().registry

    assert [registry.get_sample_value(name, {label: value}) for value in values] == [0] * len(values)
