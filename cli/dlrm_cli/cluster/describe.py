"""``dlrmctl describe``: the job, its pods and its Events, looked up and shown."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from dlrm_api.errors import NoPermissionError
from dlrm_cli.cluster.connection import Connection
from dlrm_cli.cluster.describing import Page, Seen, page_lines
from dlrm_cli.cluster.facts import Object
from dlrm_cli.cluster.grid import print_lines


def describe_job(connection: Connection, name: str) -> None:
    """Print the job's page; what the user may not look at is said where it would stand.

    Raises:
        NoInputError: there is no such job.
    """
    job = connection.job(name)
    pods = _allowed(lambda: connection.pods(name))
    events = _allowed(lambda: connection.events(name))
    print_lines(page_lines(Page(job=job, pods=pods, events=events), datetime.now(UTC)))


def _allowed(look: Callable[[], list[Object]]) -> Seen:
    """What is found; the refusal where the user may not look."""
    try:
        return look()
    except NoPermissionError as error:
        return str(error)
