"""Which attempt a launcher runs; with real processes in ``test_launcher``."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_api.errors import DeviceError
from dlrm_trainer.assignment import note_launch, take_assignment
from dlrm_trainer.settings import Settings


def settings_in(folder: Path) -> Settings:
    return Settings(attempt=3, gang_secret="shared", assignment=folder / "assigned", launched=folder / "launched")


def test_the_first_launcher_of_a_pod_runs_the_pods_attempt(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)

    assert take_assignment(settings, note_launch(settings)) == settings
    assert note_launch(settings) == 3


def test_a_launcher_whose_predecessor_only_noted_itself_waits_too(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    note_launch(settings)
    (tmp_path / "assigned").write_text("5")

    second = take_assignment(settings, note_launch(settings))

    assert second.attempt == 5
    assert second.gang_secret not in ("", "shared")
    assert note_launch(settings) == 5


def test_a_launcher_that_is_never_restarted_needs_no_files() -> None:
    settings = replace(Settings(), attempt=3)

    assert take_assignment(settings, note_launch(settings)) == settings


def test_a_note_that_cannot_be_written_ends_the_launcher(tmp_path: Path) -> None:
    with pytest.raises(DeviceError):
        note_launch(replace(settings_in(tmp_path), launched=tmp_path / "missing" / "launched"))
