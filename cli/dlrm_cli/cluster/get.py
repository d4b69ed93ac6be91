"""``dlrmctl get``: jobs as a table, JSON or YAML, once or as they change."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dlrm_api.errors import TemporaryError
from dlrm_cli.cluster.connection import Connection
from dlrm_cli.cluster.facts import Object, job_facts
from dlrm_cli.cluster.grid import Row, line, print_lines, widths
from dlrm_cli.cluster.listing import header, job_row

RETRY_S = 2.0
"""Between the end of a watch and the next list: a server that ends each at once is not to be flooded."""


@dataclass(frozen=True, kw_only=True)
class GetOptions:
    """What is asked for."""

    names: tuple[str, ...] = ()
    everywhere: bool = False
    selector: str | None = None
    form: str = "table"
    """table, wide, json, yaml or name."""
    watch: bool = False


def get_jobs(connection: Connection, options: GetOptions) -> None:
    """Print the jobs; with ``watch`` go on with each that changes, until interrupted.

    Raises:
        NoInputError: a job that was named is not there.
    """
    if options.watch:
        _follow(connection, options)
        return
    if options.names:
        jobs = [connection.job(name) for name in options.names]
    else:
        jobs, _ = connection.jobs(everywhere=options.everywhere, selector=options.selector)
    if options.form not in ("table", "wide"):
        print(document(jobs, options.form, alone=len(options.names) == 1), end="")
    elif jobs:
        rows = [header(everywhere=options.everywhere, wide=options.form == "wide"), *_rows(jobs, options)]
        columns = widths(rows)
        print_lines([line(row, columns) for row in rows])
    else:
        where = "any namespace" if options.everywhere else f"namespace {connection.namespace}"
        print(f"no DLRMJobs in {where}")


def document(jobs: Sequence[Object], form: str, *, alone: bool) -> str:
    """The objects as JSON, as YAML, or their names, without who wrote which field; several are a List, as kubectl's."""
    if form == "name":
        return "".join(f"dlrmjob.dlrm.dev/{job['metadata']['name']}\n" for job in jobs)
    shown = [_without_managers(job) for job in jobs]
    body = shown[0] if alone else {"apiVersion": "v1", "kind": "List", "items": shown}
    if form == "json":
        return json.dumps(body, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(body, sort_keys=False)


def _without_managers(job: Object) -> Object:
    return {**job, "metadata": {key: value for key, value in job["metadata"].items() if key != "managedFields"}}


def _rows(jobs: Iterable[Object], options: GetOptions) -> list[Row]:
    now, wide = datetime.now(UTC), options.form == "wide"
    return [job_row(job_facts(job), now, everywhere=options.everywhere, wide=wide) for job in jobs]


def _follow(connection: Connection, options: GetOptions) -> None:
    """A line a change, under columns that only grow: as kubectl does, so that it can be piped."""
    columns: tuple[int, ...] = ()
    for job in _changes(connection, options):
        if options.form in ("table", "wide"):
            rows = _rows([job], options)
            if not columns:
                rows.insert(0, header(everywhere=options.everywhere, wide=options.form == "wide"))
            columns = widths(rows, columns)
            print_lines([line(row, columns) for row in rows])
        else:
            separator = "---\n" if options.form == "yaml" else ""
            print(separator + document([job], options.form, alone=True), end="", flush=True)


def _changes(connection: Connection, options: GetOptions) -> Iterator[Object]:
    """Each version of each job once; a watch that ends is begun anew from a list."""
    shown: dict[str, str] = {}

    def wanted(job: Object) -> bool:
        meta = job["metadata"]
        fits = not options.names or meta["name"] in options.names
        return fits and shown.get(meta["uid"]) != meta["resourceVersion"]

    first = True
    while True:
        try:
            if first and options.names:
                for name in options.names:
                    connection.job(name)
            jobs, version = connection.jobs(everywhere=options.everywhere, selector=options.selector)
            for job in filter(wanted, jobs):
                shown[job["metadata"]["uid"]] = job["metadata"]["resourceVersion"]
                yield job
            for job in connection.watch_jobs(version, everywhere=options.everywhere, selector=options.selector):
                if wanted(job):
                    shown[job["metadata"]["uid"]] = job["metadata"]["resourceVersion"]
                    yield job
        except TemporaryError:
            if first:
                raise
        first = False
        time.sleep(RETRY_S)
