"""What a job says of its model as a whole: features over all tables, and the settings that decide how it is trained."""

import copy
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job
from dlrm_api.model import ModelSpec
from dlrm_testing.operator.operator_cluster import job_document

Object = dict[str, Any]


def settings_of(changes: Object) -> Object:
    document = copy.deepcopy(job_document("demo"))
    for section, fields in changes.items():
        document["spec"].setdefault(section, {}).update(fields)
    return parse_job(document).spec.settings()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"newFiles": "refuse", "prefetchBytes": "1Gi"}},
        {"training": {"evalEverySteps": 10}},
        {"trainer": {"replicas": 3}},
        {"checkpoint": {"uri": "s3://bucket/other"}},
    ],
)
def test_where_and_how_data_is_read_is_no_setting_of_the_training(changes: Object) -> None:
    assert settings_of(changes) == settings_of({})


@pytest.mark.parametrize(
    "changes", [{"data": {"globalBatchSize": 128}}, {"training": {"seed": 9}}, {"model": {"bottomMlp": [16, 4]}}]
)
def test_what_changes_a_trained_value_is_a_setting(changes: Object) -> None:
    assert settings_of(changes) != settings_of({})


def test_too_many_features_over_all_tables_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_api.job.MAX_FEATURES", 1)

    with pytest.raises(InvalidSpecError, match="at most 1 features over all tables, got 2"):
        parse_job(job_document("demo"))


WIDE, NARROW = {"rows": 9, "dim": 16}, {"rows": 9, "dim": 8}
BOTTOM = {"denseFeatures": ["x"], "bottomMlp": [32, 8]}


@pytest.mark.parametrize(
    ("table", "group", "rest", "width"),
    [
        (WIDE, NARROW | {"project": True}, {}, 16),
        (NARROW | {"project": True}, WIDE, {}, 16),
        (WIDE | {"project": True}, NARROW, BOTTOM, 8),
        (WIDE | {"project": True}, WIDE | {"project": True}, BOTTOM, 8),
    ],
)
def test_dot_takes_tables_of_another_dim_that_project(table: Object, group: Object, rest: Object, width: int) -> None:
    model = {"tables": [{"name": "t", **table}], "tableGroups": [{"name": "g", "count": 2, "template": group}], **rest}

    assert ModelSpec.model_validate(model).common_width == width


@pytest.mark.parametrize(
    ("tables", "rest"),
    [
        ([WIDE, NARROW], {}),
        ([WIDE | {"project": True}, NARROW], {}),
        ([WIDE, NARROW], BOTTOM),
        ([WIDE, WIDE | {"project": True}], {"interaction": "dcn"}),
    ],
)
def test_other_dims_without_project_and_project_without_dot_are_refused(tables: list[Object], rest: Object) -> None:
    model = {"tables": [{"name": f"t{i}", **table} for i, table in enumerate(tables)], **rest}

    with pytest.raises(ValueError, match=r"interaction.*project|project.*interaction"):
        ModelSpec.model_validate(model)
