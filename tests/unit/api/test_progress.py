"""Reports of pods are untrusted: figures fit status and metrics, or the whole report is rejected."""

import json
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from dlrm_api.fields import MAX_EXACT
from dlrm_api.progress import MAX_UNIX_SECONDS, CheckpointerProgress, CutResponse, Progress, TerminationMessage

SNAPSHOT = {"step": 1, "kind": "full", "bits": 8, "bytes": 1, "uri": "s3://b/p", "time": 0}
ABSURD = (
    "1" + "0" * 400,
    "-1",
    "1e300",
    "1e999",
    "NaN",
    "Infinity",
    str(MAX_EXACT + 1),
    '"x"',
    "[]",
    "{}",
    "[" * 100_000,
)


def answer(field: str, value: str) -> str:
    """An answer of one field, as JSON that Python itself would not write."""
    return f'{{"{field}": {value}}}'


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize(
    "field", ["attempt", "step", "samples", "epoch", "evaluatedBatches", "worldSize", "totalSteps"]
)
def test_a_count_that_no_status_can_hold_is_no_answer(field: str, value: str) -> None:
    with pytest.raises(ValidationError):
        Progress.model_validate_json(answer(field, value))


@pytest.mark.parametrize("value", ABSURD)
def test_a_snapshot_at_no_step_or_no_time_is_no_answer(value: str) -> None:
    for field in ("step", "bytes", "time"):
        snapshot = answer(
            "lastSnapshot", json.dumps(SNAPSHOT | {field: 0}).replace(f'"{field}": 0', f'"{field}": {value}')
        )
        with pytest.raises(ValidationError):
            CheckpointerProgress.model_validate_json(snapshot)
    with pytest.raises(ValidationError):
        CutResponse.model_validate_json(answer("step", value))


@pytest.mark.parametrize("value", ABSURD)
def test_a_termination_message_with_an_absurd_figure_is_none(value: str) -> None:
    text = f'{{"exitCode": 65, "reason": "BadData", "message": "m", "rank": {value}}}'

    assert TerminationMessage.decode(text) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', '{"exitCode": 1' + "0" * 400 + ', "reason": "x"}', "\0", "{" * 9_000]
)
def test_a_termination_message_of_any_text_is_read_without_an_error(text: str) -> None:
    assert TerminationMessage.decode(text) is None


def test_the_last_moment_is_one_that_a_timestamp_can_say() -> None:
    assert datetime.fromtimestamp(MAX_UNIX_SECONDS, UTC).year == 9999
