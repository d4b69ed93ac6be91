"""Check the operator's log lines in both formats."""

import json
import subprocess
import sys

import pytest

WARNS = """
import logging
from dlrm_operator.__main__ import log_events
from dlrm_operator.reconcile.state import JobKey
from dlrm_operator.controller.reconciler import set_log_context

log_events(plain={plain})
set_log_context(JobKey("ads", "demo"), "some uid")
logging.getLogger("dlrm_operator.reconcile").info("phase changed", extra={{"job": "ads/demo", "phase": "Failed"}})
"""


def said(*, plain: bool) -> str:
    program = WARNS.format(plain=plain)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
def test_a_plain_line_ends_with_what_the_event_says_of_itself() -> None:
    (line,) = said(plain=True).splitlines()

    assert line.endswith(" operator INFO phase changed job=ads/demo phase=Failed")


@pytest.mark.slow
def test_a_json_line_has_the_facts_and_the_job_as_fields() -> None:
    (line,) = said(plain=False).splitlines()

    found = json.loads(line)
    assert [found[name] for name in ("message", "job", "phase")] == ["phase changed", "ads/demo", "Failed"]
    assert (found["object"]["name"], found["object"]["uid"]) == ("demo", "some uid")
