"""What the images of dashboards show of a value, and where they mark events."""

import pytest
from hack.draw_dashboards import View, formatted

POINTS = {"result": [{"metric": {}, "values": [[60, "61500"], [120, "61500"], [180, "190000"]]}]}


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.155, "percentunit", 1, "15.5%"),
        (0.012, "s", None, "12 ms"),
        (90.0, "s", None, "1.5 min"),
        (0.0, "s", None, "0 s"),
        (3 * 2**20, "bytes", None, "3 MiB"),
        (2_500.0, "Bps", None, "2.5 kB/s"),
        (2_500.0, "si: samples/s", None, "2.5 ksamples/s"),
        (0.5, "none", 4, "0.5000"),
    ],
)
def test_a_value_is_shown_in_the_unit_of_its_panel(value: float, unit: str, decimals: int | None, text: str) -> None:
    assert formatted(value, unit, decimals) == text


@pytest.mark.parametrize(
    ("is_time", "events"), [(True, [(61.5, 61.5), (190.0, 190.0)]), (False, [(60.0, 180.0)])], ids=["value", "sample"]
)
def test_events_within_a_step_are_one(is_time: bool, events: list[tuple[float, float]]) -> None:
    view = View(ask=lambda *_, **__: POINTS, begin=60, end=240, step_s=10, variables={})

    assert view.events({"expr": "up", "step": "60s", "useValueForTime": is_time}) == events
