"""What a job says of its model as a whole: features over all tables, and the settings that decide how it is trained."""

import copy
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job
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
