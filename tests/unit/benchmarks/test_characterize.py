from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.characterize import BASE, SWEEPS, Line, settings_of, write


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_changes_one_size_of_the_base(sweep: str) -> None:
    settings = settings_of(sweep)

    assert BASE in settings
    assert len(set(settings)) == len(SWEEPS[sweep])
    for setting in settings:
        assert {name for name, value in vars(setting).items() if value != getattr(BASE, name)} <= {sweep}


def test_every_setting_has_a_line_in_the_csv_and_every_sweep_a_plot(tmp_path: Path) -> None:
    lines = [
        Line(sweep=sweep, setting=each, measured_s=0.1, predicted_s=0.11, spread=0.0, bound="compute")
        for sweep in ("batch", "placement")
        for each in settings_of(sweep)
    ]

    write(lines, tmp_path)

    read = list(csv.DictReader((tmp_path / "characterization.csv").read_text().splitlines()))
    assert [(each["sweep"], each["error"]) for each in read] == [(line.sweep, "0.1") for line in lines]
    drawn = (tmp_path / "images" / "characterization.svg").read_text()
    assert all(title in drawn for title in ("samples of a batch", "placement"))
    assert "dense features" not in drawn
