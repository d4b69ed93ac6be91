"""What grows with ranks, files, rows or jobs: one real part among simulated ones, and a JSON line for each result."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from benchmarks import (
    scale_cut,
    scale_losses,
    scale_operator,
    scale_plan,
    scale_ranks,
    scale_rows,
    scale_start,
    scale_step,
)
from benchmarks.measure import Result

RESULTS: Mapping[str, Callable[[bool], Iterator[Result]]] = {
    **{f"step/{ranks}": partial(scale_step.host_time, ranks) for ranks in scale_step.MAX_HOST_MS},
    "step/data-parallel": scale_step.replica_time,
    "losses": scale_losses.agreement,
    "operator/pods": scale_operator.pods,
    "operator/jobs": scale_operator.jobs,
    "operator/polls": scale_operator.polls,
    "operator/suspend": scale_operator.suspend,
    "start": scale_start.start,
    "restore": scale_start.restore,
    "commit": scale_start.commit,
    **{f"cut/{rows}": partial(scale_cut.pause, rows) for rows in scale_cut.MAX_PAUSE_MS},
    **{f"pick/{segments}": partial(scale_rows.pick, segments) for segments in scale_rows.MAX_PICK_US},
    "rows": scale_rows.rows,
    **scale_plan.RESULTS,
    "ranks/meet": scale_ranks.meeting,
    "ranks/exchange": scale_ranks.exchange,
}
"""By the name that ``--only`` matches; each is told whether to be quick."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help=f"one of {', '.join(RESULTS)}, or a pattern")
    options = parser.parse_args(arguments)
    for name, measure in RESULTS.items():
        if fnmatch.fnmatch(name, options.only):
            for result in measure(options.quick):
                result.show("scale", name)


if __name__ == "__main__":
    main()
