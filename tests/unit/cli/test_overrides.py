"""``--set`` and ``--data``: what they change, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import UsageError
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_cli.documents import with_data, with_overrides


def body() -> dict[str, Any]:
    return {
        "kind": "DLRMJob",
        "metadata": {"name": "small"},
        "spec": {
            "model": {"tables": [{"name": "C1", "rows": 10, "dim": 4}, {"name": "C2", "rows": 20, "dim": 4}]},
            "training": {"maxSteps": 5},
            "data": {"epochs": 4, "format": "criteo-tsv", "train": {"uris": ["/data/a.tsv"]}},
            "checkpoint": {"uri": "file:///tmp/small", "interval": "10m"},
        },
    }


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("spec.trainer.replicas=2", lambda job: job.spec.trainer.replicas == 2),
        ("spec.training.rowOptimizer.eps=0.5", lambda job: job.spec.training.row_optimizer.eps == 0.5),
        ("spec.model.tables[1].rows=7", lambda job: job.spec.model.tables[1].rows == 7),
        ("spec.data.train.uris=[/x, /y]", lambda job: job.spec.data.train.uris == ("/x", "/y")),
        ("spec.data.columns.rename.C1=user_id", lambda job: job.spec.data.columns.rename == {"C1": "user_id"}),
        ("spec.checkpoint.interval=null", lambda job: job.spec.checkpoint.interval is None),
        ("spec.training.maxSteps=null", lambda job: job.spec.training.max_steps is None),
        ("spec.data.epochs=null", lambda job: job.spec.data.epochs == 1),
        ("spec.lifecycle.restart.backoff=1s", lambda job: job.spec.lifecycle.restart.backoff == 1.0),
        (
            "spec.trainer.podTemplate.metadata.labels.team=ads",
            lambda job: job.spec.trainer.pod_template.metadata == {"labels": {"team": "ads"}},
        ),
        (
            "spec.trainer.resources.limits[nvidia.com/gpu]=1",
            lambda job: job.spec.trainer.resources.limits == {"nvidia.com/gpu": "1"},
        ),
        ("metadata.labels[example.com/team]=ads", lambda job: job.metadata.labels == {"example.com/team": "ads"}),
        ("metadata.name=other", lambda job: job.metadata.name == "other"),
        ("spec.training.deterministic=true", lambda job: job.spec.training.deterministic is True),
    ],
)
def test_a_setting_changes_its_field_with_the_type_of_its_yaml_value(setting: str, read: Any) -> None:
    original = body()

    job = parse_job(with_overrides(original, [setting]))

    assert read(job)
    assert original == body()


@pytest.mark.parametrize(
    ("setting", "items"),
    [
        ("env[0].value='2'", [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "TZ", "value": "UTC"}]),
        ("env[1].value=null", [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "TZ"}]),
        ("env[1]={name: LANG}", [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "LANG"}]),
    ],
)
def test_a_setting_inside_a_free_form_list_leaves_the_rest_of_it(setting: str, items: list[dict[str, str]]) -> None:
    original = body()
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "TZ", "value": "UTC"}]
    original["spec"]["trainer"] = {"podTemplate": {"container": {"env": env}}}

    changed = with_overrides(original, [f"spec.trainer.podTemplate.container.{setting}"])

    assert changed["spec"]["trainer"]["podTemplate"]["container"]["env"] == items


def test_the_last_of_several_settings_wins() -> None:
    changed = with_overrides(body(), ["spec.data.epochs=2", "spec.data.epochs=3"])

    assert changed["spec"]["data"]["epochs"] == 3


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("spec.trainer.replcas=2", "replicas, objective, processesPerReplica"),
        ("trainer.replicas=2", "apiVersion, kind, metadata, spec"),
        ("maxSteps=3", "apiVersion, kind, metadata, spec"),
        ("spec.model.tables[5].rows=1", "spec.model.tables has no element [5]"),
        ("spec.model.tables.rows=1", "spec.model.tables[0]"),
        ("spec.data.epochs.more=1", "spec.data.epochs is a single value"),
        ("spec.data.epochs", "spec.path=value"),
        ("spec..data=1", "spec.model.tables[0].rows"),
        ("=1", "spec.model.tables[0].rows"),
        ("spec.data.epochs=[1", "spec.data.epochs"),
        ("spec.data.train.uris[3]=/x", "spec.data.train.uris has no element [3]"),
        ("status.phase=Running", "no field status"),
        ("spec.trainer.podTemplate.container.env[0].value=2", "podTemplate.container.env has no element [0]"),
        ("spec.trainer.podTemplate.spec.volumes.name=a", "spec.trainer.podTemplate.spec.volumes[0]"),
        ("spec.data.train[uris=1", "spec.model.tables[0].rows"),
    ],
)
def test_a_wrong_path_is_named_with_what_is_there(setting: str, words: str) -> None:
    original = body()
    original["spec"]["trainer"] = {"podTemplate": {"spec": {"volumes": [{"name": "disk"}]}}}

    with pytest.raises(UsageError) as caught:
        with_overrides(original, [setting])

    assert words in str(caught.value)


def leaves(model: Any, path: str) -> list[str]:
    paths = []
    for name, info in model.model_fields.items():
        here = f"{path}.{info.alias or name}"
        paths += leaves(info.annotation, here) if hasattr(info.annotation, "model_fields") else [here]
    return paths


@given(st.sampled_from(leaves(DLRMJobSpec, "spec")), st.integers(-5, 5))
def test_every_field_of_the_spec_can_be_set(path: str, value: int) -> None:
    changed: Any = with_overrides(body(), [f"{path}={value}"])

    for step in path.split("."):
        changed = changed[step]
    assert changed == value


def test_data_replaces_evaluation_files_that_the_job_does_not_set() -> None:
    changed = with_data(body(), "/mine.tsv", None)

    assert changed["spec"]["data"]["train"]["uris"] == ["/mine.tsv"]
    assert changed["spec"]["data"]["eval"]["uris"] == ["/mine.tsv"]


def test_data_leaves_other_evaluation_files_alone() -> None:
    original = with_overrides(body(), ["spec.data.eval.uris=[/data/b.tsv]"])

    changed = with_data(original, "/mine.tsv", None)

    assert changed["spec"]["data"]["eval"]["uris"] == ["/data/b.tsv"]


def test_evaluation_data_alone_leaves_the_training_files_alone() -> None:
    changed = with_data(body(), None, "file:///b.tsv")

    assert changed["spec"]["data"]["train"]["uris"] == ["/data/a.tsv"]
    assert changed["spec"]["data"]["eval"]["uris"] == ["file:///b.tsv"]


@pytest.mark.parametrize(("options", "named"), [(("", None), "--data"), ((None, ""), "--eval-data")])
def test_an_empty_uri_is_refused_for_it_would_name_the_current_folder(
    options: tuple[str | None, str | None], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        with_data(body(), *options)
