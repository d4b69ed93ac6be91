"""The commands that look after jobs in a cluster."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_cli.cluster.client import Connection

cluster = typer.Typer()


class Form(enum.StrEnum):
    """Forms of jobs."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class Part(enum.StrEnum):
    """Containers of a trainer pod."""

    TRAINER = "trainer"
    CHECKPOINTER = "checkpointer"


Name = Annotated[str, typer.Argument(metavar="JOB", help="Name of the DLRMJob.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Names; all jobs by default.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NS", help="Namespace; the context's own by default.")
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; the current one by default.")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="[$KUBECONFIG, else ~/.kube/config]")
]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is so.")]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Longest time to wait.")]


@cluster.command()
def get(
    names: Names = None,
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    selector: Annotated[str | None, typer.Option("--selector", "-l", help="Only jobs with these labels.")] = None,
    output: Annotated[Form, typer.Option("--output", "-o", help="Form of the jobs.")] = Form.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with each job that changes.")] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs in the cluster: phase, step, speed, quality, newest snapshot, time left."""
    from dlrm_api.errors import UsageError
    from dlrm_cli.cluster.get import GetOptions, get_jobs

    _check_everywhere(everywhere, names, namespace)
    if names and selector:
        raise UsageError("--selector goes with no names: leave one of them out")
    options = GetOptions(
        names=tuple(names or ()), everywhere=everywhere, selector=selector, form=output.value, watch=watch
    )
    with _endless():
        get_jobs(_connection(namespace, context, kubeconfig), options)


@cluster.command()
def describe(job: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show all there is to know of one job on one page."""
    from dlrm_cli.cluster.describe import describe_job

    describe_job(_connection(namespace, context, kubeconfig), job)


@cluster.command()
def logs(
    job: Name,
    container: Annotated[Part, typer.Option("--container", "-c", help="Whose log.")] = Part.TRAINER,
    replica: Annotated[int | None, typer.Option(min=0, metavar="N", help="Pod of this index; 0 by default.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="The pod that holds this rank.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All pods, each line after its pod's name.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt; the newest by default.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, over restarts, until the job ends.")
    ] = False,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of the container's life before this.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the last lines.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DURATION", help="Only what is newer: 30s, 10m, 2h.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Each line after its time.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of a job's pods: of pod 0 where nothing else is said."""
    from dlrm_api.errors import UsageError
    from dlrm_cli.cluster.logs import Choice, LogOptions, follow_logs, print_logs
    from dlrm_cli.documents import seconds

    if follow and previous:
        raise UsageError("--previous has ended and can't be followed: leave --follow out")
    options = LogOptions(
        choice=Choice(replica=replica, rank=rank, everyone=everyone, attempt=attempt),
        container=container.value,
        previous=previous,
        timestamps=timestamps,
        tail=tail,
        since_s=None if since is None else seconds("--since", since),
    )
    with _endless():
        (follow_logs if follow else print_logs)(_connection(namespace, context, kubeconfig), job, options)


@cluster.command()
def suspend(
    job: Name,
    wait: Wait = False,
    timeout: Timeout = "15m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Have a job cut, commit and give its nodes back."""
    _set_suspend(job, True, timeout if wait else None, namespace, context, kubeconfig)


@cluster.command()
def resume(
    job: Name,
    wait: Wait = False,
    timeout: Timeout = "15m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Have a suspended job go on from the step that it holds, or a failed one start again from its newest snapshot."""
    _set_suspend(job, False, timeout if wait else None, namespace, context, kubeconfig)


@cluster.command()
def top(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Show its pods; all jobs by default.")] = None,
    everywhere: Everywhere = False,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show how jobs, or one job's pods, train now; anew every two seconds."""
    from dlrm_cli.cluster.top import show_top

    _check_everywhere(everywhere, job, namespace)
    with _endless():
        show_top(_connection(namespace, context, kubeconfig), job, everywhere=everywhere, once=once)


@cluster.command()
def report(
    what: Annotated[
        str, typer.Argument(metavar="JOB_OR_WORKDIR", help="Work directory of dlrmctl run, or the name of a job.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write one HTML page about a run: loss, speed, memory tiers, snapshots, restarts, plan against measured."""
    from dlrm_cli.report.page import write_report

    print(write_report(what, output, lambda: _connection(namespace, context, kubeconfig)))


@contextmanager
def _endless() -> Iterator[None]:
    """What goes on until it is interrupted has done its work then, and says nothing."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _check_everywhere(everywhere: bool, names: object, namespace: str | None) -> None:
    from dlrm_api.errors import UsageError

    if everywhere and (names or namespace):
        raise UsageError("--all-namespaces goes with neither names nor --namespace: leave one of them out")


def _set_suspend(
    job: str,
    wanted: bool,
    timeout: str | None,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    from dlrm_cli.cluster.lifecycle import set_suspend
    from dlrm_cli.documents import seconds

    timeout_s = None if timeout is None else seconds("--timeout", timeout)
    set_suspend(_connection(namespace, context, kubeconfig), job, wanted, timeout_s)


def _connection(namespace: str | None, context: str | None, kubeconfig: str | None) -> Connection:
    from dlrm_cli.cluster.client import Connection, Place

    return Connection(Place(kubeconfig=kubeconfig, context=context, namespace=namespace))
