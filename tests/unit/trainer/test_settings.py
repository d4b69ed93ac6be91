from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dlrm_api.errors import UsageError
from dlrm_api.names import Env, Port
from dlrm_trainer.settings import Settings, read_settings


def test_an_empty_environment_is_that_of_a_pod() -> None:
    settings = read_settings({})

    assert settings == Settings()
    assert (settings.bind, settings.trainer_port, settings.master_port) == ("0.0.0.0", Port.TRAINER, Port.RENDEZVOUS)
    assert settings.handoff_dir is None


def test_every_variable_is_read_and_an_empty_one_counts_as_unset() -> None:
    settings = read_settings(
        {Env.REPLICA: "2", Env.GRACE_S: "7.5", Env.HANDOFF_DIR: "/dev/shm/x", Env.WORK_DIR: "", Env.TRAINER_PORT: "0"}
        | {Env.PROFILE: "1"}
    )

    assert (settings.replica, settings.grace_s, settings.trainer_port) == (2, 7.5, Port.TRAINER)
    assert (settings.handoff_dir, settings.work_dir) == (Path("/dev/shm/x"), None)
    assert settings.profile


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
def test_each_setting_has_its_variable(name: str) -> None:
    settings = read_settings({getattr(Env, name.upper()): "1"})

    assert [each.name for each in fields(Settings) if getattr(settings, each.name) != each.default] == [name]


@pytest.mark.parametrize("value", ["http", "nan", "inf"])
def test_a_value_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(UsageError, match="invalid DLRM_MASTER_PORT"):
        read_settings({Env.MASTER_PORT: value})
