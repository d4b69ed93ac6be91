"""What the operator takes at 5,000 jobs, in small: a tenth of the jobs, and a few seconds of polls."""

from collections.abc import Callable, Iterator

import pytest
from benchmarks import scale_operator
from benchmarks.measure import Result

pytestmark = pytest.mark.slow

BUSY_MACHINE = 2.0
"""Other processes on its cores make processor time longer."""


@pytest.mark.parametrize(
    "measure", [scale_operator.pods, scale_operator.jobs, scale_operator.polls, scale_operator.suspend]
)
def test_an_operator_of_many_jobs_keeps_its_limits(measure: Callable[[bool], Iterator[Result]]) -> None:
    results = list(measure(True))

    assert results
    for result in results:
        slack = BUSY_MACHINE if result.metric in ("relist_cpu_s", "cores") else 1.0
        assert result.limit is not None
        assert 0 < result.value <= result.limit * slack, result
