"""Documents are read as strictly as the API server reads them, whoever decoded the YAML."""

import datetime
import json
import tracemalloc
from typing import Any

import pytest
import yaml

from dlrm_api.base import read_stored
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.progress import CheckpointerProgress, Progress, TerminationMessage


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("5E-1", 0.5), ("1.5e1", 15.0), ("2", 2.0), ("0.5", 0.5)])
def test_numbers_that_python_s_yaml_takes_for_text_are_numbers(good: dict[str, Any], text: str, value: float) -> None:
    rates = {"learningRate": yaml.safe_load(text)}
    good["DLRMJob"]["spec"]["training"] = {"rowOptimizer": rates, "denseOptimizer": rates}

    training = parse_job(good["DLRMJob"]).spec.training

    assert training.row_optimizer.learning_rate == value
    assert training.dense_optimizer.learning_rate == value


@pytest.mark.parametrize("text", ["fast", "1e", "0x1p3", "1_0", "nan", "inf", "1e999"])
def test_other_text_is_no_number(good: dict[str, Any], text: str) -> None:
    good["DLRMJob"]["spec"]["training"] = {"rowOptimizer": {"learningRate": text}}

    with pytest.raises(InvalidSpecError, match=r"^spec\.training\.rowOptimizer\.learningRate: "):
        parse_job(good["DLRMJob"])


def test_text_that_looks_like_a_number_stays_text_where_text_is_meant(good: dict[str, Any]) -> None:
    good["DLRMJob"]["spec"]["model"]["tables"][0]["name"] = "1e5"
    good["DLRMJob"]["spec"]["training"] = {"rowOptimizer": {"eps": "1e-6"}}

    spec = parse_job(good["DLRMJob"]).spec

    assert spec.model.tables[0].name == "1e5"
    assert spec.training.row_optimizer.eps == 1e-6


@pytest.mark.parametrize(
    ("text", "value"), [("1e6", 10**6), ("1E+3", 1_000), ("1.5e3", 1_500), ("2.0", 2), ("5.", 5), ("3", 3)]
)
def test_whole_numbers_may_be_written_with_a_point_or_an_exponent(good: dict[str, Any], text: str, value: int) -> None:
    spec = good["DLRMJob"]["spec"]
    spec["training"] = {"maxSteps": yaml.safe_load(text)}
    spec["data"]["prefetchBytes"] = float(text)
    spec["trainer"] = {"resources": {"limits": {"cpu": float(text)}}}

    found = parse_job(good["DLRMJob"]).spec

    assert found.training.max_steps == found.data.prefetch_bytes == value
    assert found.trainer.resources.limits == {"cpu": str(value)}


@pytest.mark.parametrize("text", ["1.5", "15e-1", "1e999"])
def test_other_numbers_are_no_whole_ones(good: dict[str, Any], text: str) -> None:
    good["DLRMJob"]["spec"]["training"] = {"maxSteps": yaml.safe_load(text)}

    with pytest.raises(InvalidSpecError, match=r"^spec\.training\.maxSteps: "):
        parse_job(good["DLRMJob"])


NULLS = """
training:
trainer: {replicas: null, cache: {lookahead: null}, podTemplate: {spec: {affinity: null, tolerations: null}}}
lifecycle: {restart: {backoff: null, maxRestarts: null}, suspend: null}
checkpoint: {bits: null, policy: null, restoreBandwidth: null, publish: null, resources: {limits: {cpu: null}}}
"""
"""Sections of which nothing is left, as where all below them is commented out."""


def test_a_field_that_holds_nothing_is_left_out(good: dict[str, Any]) -> None:
    plain = parse_job(good["DLRMJob"])
    for section, fields in yaml.safe_load(NULLS).items():
        there = good["DLRMJob"]["spec"].get(section)
        good["DLRMJob"]["spec"][section] = fields if there is None else there | fields

    assert parse_job(good["DLRMJob"]) == plain


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": None}, "spec.data: this field is required"),
        ({"checkpoint": {"uri": None}}, "spec.checkpoint.uri: this field is required"),
        (
            {"trainer": {"podTemplate": {"spec": {"volumes": [None]}}}},
            "spec.trainer.podTemplate.spec.volumes[0]: must be",
        ),
    ],
)
def test_required_lists_must_not_be_empty(good: dict[str, Any], change: dict[str, Any], says: str) -> None:
    good["DLRMJob"]["spec"] |= change

    with pytest.raises(InvalidSpecError) as refused:
        parse_job(good["DLRMJob"])

    assert str(refused.value).startswith(says)


def test_metadata_of_the_server_passes_through(good: dict[str, Any]) -> None:
    good["DLRMJob"]["metadata"] |= {
        "uid": "u-1",
        "creationTimestamp": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        "managedFields": [{"manager": "kubectl"}],
    }

    job = parse_job(good["DLRMJob"])

    assert job.metadata.model_extra is not None
    assert job.metadata.model_extra["uid"] == "u-1"


def test_a_job_written_as_json_reads_back_equal(good: dict[str, Any]) -> None:
    job = parse_job(good["DLRMJob"])

    assert parse_job(json.loads(job.model_dump_json(exclude_none=True))) == job
    assert parse_job(json.loads(job.model_dump_json())) == job


@pytest.mark.parametrize("document", [None, [], "job", 5, {}])
def test_documents_that_are_not_jobs_are_refused(document: Any) -> None:
    with pytest.raises(InvalidSpecError):
        parse_job(document)


def test_a_model_cannot_be_changed(good: dict[str, Any]) -> None:
    job = parse_job(good["DLRMJob"])

    with pytest.raises(ValueError, match="frozen"):
        job.spec.data.epochs = 5  # type: ignore[misc]


def test_every_problem_is_named_with_its_value(good: dict[str, Any]) -> None:
    good["DLRMJob"]["spec"]["data"] |= {"epochs": 0, "virtualShards": 0}

    with pytest.raises(InvalidSpecError) as refused:
        parse_job(good["DLRMJob"])

    assert refused.value.lines == [
        "spec.data.epochs: must be greater than or equal to 1, got 0",
        "spec.data.virtualShards: must be greater than or equal to 1, got 0",
    ]


def test_of_very_many_problems_some_are_named_and_the_others_counted(good: dict[str, Any]) -> None:
    tables = [{**good["DLRMJob"]["spec"]["model"]["tables"][0], "name": f"t{i}", "rows": 0} for i in range(50)]
    good["DLRMJob"]["spec"]["model"]["tables"] = tables

    with pytest.raises(InvalidSpecError) as refused:
        parse_job(good["DLRMJob"])

    assert len(refused.value.lines) == 20
    assert refused.value.lines[-1].endswith("(and 30 more)")


def test_groups_are_written_out_in_order(good: dict[str, Any]) -> None:
    template = {"rows": 10, "dim": 16, "embedding": {"hash": "mix"}}
    good["DLRMJob"]["spec"]["model"]["tableGroups"] = [{"name": "g", "count": 2, "template": template}]

    model = DLRMJob.model_validate(good["DLRMJob"]).spec.model
    tables = model.all_tables()

    assert [table.name for table in tables] == ["ads", "sites", "g-0", "g-1"]
    assert [feature.column for feature in model.all_features()] == ["C1", "C2", "g-0", "g-1"]
    assert tables[3].embedding.hash == "mix"


def test_stored_job_is_read_without_unknown_fields_which_are_named(good: dict[str, Any]) -> None:
    known = parse_job(good["DLRMJob"])
    good["DLRMJob"]["spec"]["data"]["newField"] = 1
    good["DLRMJob"]["spec"]["model"]["tables"][1]["newField"] = {"a": 1}

    job, unknown = read_stored(DLRMJob, good["DLRMJob"])

    assert job == known
    assert unknown == ("spec.model.tables[1].newField", "spec.data.newField")
    assert good["DLRMJob"]["spec"]["data"]["newField"] == 1


def test_stored_job_with_an_invalid_and_unknown_fields_is_refused(good: dict[str, Any]) -> None:
    good["DLRMJob"]["spec"]["data"] |= {"newField": 1, "epochs": 0}

    with pytest.raises(InvalidSpecError) as refused:
        read_stored(DLRMJob, good["DLRMJob"])

    assert str(refused.value) == "spec.data.epochs: must be greater than or equal to 1, got 0"


def test_unknown_field_of_a_manifest_is_refused_in_spec_and_status(good: dict[str, Any]) -> None:
    for section in ({"spec": {**good["DLRMJob"]["spec"], "newField": 1}}, {"status": {"newField": 1}}):
        with pytest.raises(InvalidSpecError, match=r"newField: unknown field"):
            parse_job({**good["DLRMJob"], **section})


def test_reports_of_other_versions_are_read_as_far_as_known() -> None:
    slowest = '{"rank": 1, "seconds": 2, "medianSeconds": 1, "why": "disk"}'
    progress = Progress.model_validate_json(f'{{"step": 5, "slowest": {slowest}, "gpuBusy": 0.9}}')
    word = CheckpointerProgress.model_validate_json('{"committedStep": 5, "compression": "zstd"}')
    left = TerminationMessage.decode('{"exitCode": 0, "reason": "Done", "step": 5, "host": "a", "progress": {"z": 1}}')

    assert progress.step == 5
    assert word.committed_step == 5
    assert left is not None
    assert left.step == 5


def test_groups_of_a_million_tables_are_refused_without_expansion(good: dict[str, Any]) -> None:
    template = {"rows": 10, "dim": 16}
    groups = [{"name": f"g{i}", "count": 5_000, "template": template} for i in range(256)]
    good["DLRMJob"]["spec"]["model"]["tableGroups"] = groups

    tracemalloc.start()
    with pytest.raises(InvalidSpecError, match=r"^spec\.model: .*tableGroups"):
        parse_job(good["DLRMJob"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 16 * 2**20
