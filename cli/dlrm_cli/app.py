"""``dlrmctl``: the command line. The only module that registers commands.

Each command imports what it needs when it runs, so that ``dlrmctl --help`` answers at once.
"""

from __future__ import annotations

import codecs
import errno
import locale
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dlrm_api.errors import RULE_PREFIX, DLRMError, NoInputError, UsageError, visible
from dlrm_api.names import ExitCode
from dlrm_api.process import named_limit
from dlrm_cli.exports import exports
from dlrm_cli.options import (
    AllNamespaces,
    ClusterOptions,
    Commands,
    File,
    GetOptions,
    Hardware,
    Output,
    RunOptions,
    Settings,
    TraceOptions,
)
from dlrm_cli.snapshots import snapshots

if TYPE_CHECKING:
    from dlrm_cli.cluster.client import JobClient

app = Commands(
    name="dlrmctl",
    help="Train deep-learning recommendation models from a DLRMJob manifest, on this machine or on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
snapshots.add_typer(exports)
app.add_typer(snapshots, name="snapshots")
cluster = Commands()
app.add_typer(cluster)
runs = typer.Typer(name="runs", help="Work with runs on this machine.", no_args_is_help=True)
app.add_typer(runs, name="runs")
profiles = typer.Typer(name="profile", help="Work with HardwareProfiles.", no_args_is_help=True)
app.add_typer(profiles, name="profile")

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

YamlOrJson = Literal["yaml", "json"]
TrainerContainer = Literal["trainer", "checkpointer"]

Name = Annotated[str, typer.Argument(metavar="JOB", help="Name of the DLRMJob.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job reaches the requested state.")]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="Longest time to wait.")]


def _check_current_folder() -> None:
    """Refuse to start in a removed folder: relative paths mean nothing there, and torch does not load."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise NoInputError("current folder not found: it was removed; change to another") from error


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"dlrmctl {version('dlrm-operator')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="YAML or JSON files, folders of them, or - for stdin.")
    ],
) -> None:
    """Check every DLRMJob and HardwareProfile of some files."""
    from dlrm_cli.manifests import validate_files

    validate_files(files)


@app.command()
def plan(
    file: File,
    hardware: Hardware = None,
    settings: Settings = None,
    advise_dims: Annotated[
        bool, typer.Option("--advise-dims", help="Advise dims of tables that fit --bytes, instead of planning.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option("--bytes", metavar="BYTES", help="Memory of all tables for --advise-dims, such as 16Gi."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Plan with each of these values, and all combinations with those of other keys: batch, replicas, "
            "hardware, codec, precision, dim, width, tiers.ddr (or another tier), or a field. May be repeated.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="SVG file for the predicted throughput of --what-if.")
    ] = None,
    list_data: Annotated[
        bool, typer.Option("--list-data", help="List the training files, and count what reading them costs a step.")
    ] = False,
    output: Output = "table",
) -> None:
    """Show which embedding table is on which rank, and what that takes."""
    from dlrm_cli.manifests import print_dims, print_plan

    if list_data and (what_if or budget is not None):
        raise UsageError("--list-data cannot be combined with --what-if or --advise-dims")
    if what_if:
        from dlrm_cli.what_if import print_what_if

        if advise_dims or budget is not None:
            raise UsageError("--what-if cannot be combined with --advise-dims or --bytes")
        print_what_if(file, hardware or [], settings or [], what_if, plot=plot, as_json=output == "json")
        return
    if plot is not None:
        raise UsageError("--plot needs --what-if: give the values to compare")

    if advise_dims != (budget is not None):
        raise UsageError("--advise-dims and --bytes must be set together: set both or neither")
    if budget is not None:
        if hardware:
            raise UsageError("--advise-dims cannot be combined with --hardware: the advice depends on the job alone")
        print_dims(file, settings or [], budget, as_json=output == "json")
        return
    print_plan(file, hardware or [], settings or [], as_json=output == "json", with_data=list_data)


@app.command()
def render(
    file: File,
    hardware: Hardware = None,
    settings: Settings = None,
    output: Annotated[YamlOrJson, typer.Option("--output", "-o", help="Output format.")] = "yaml",
) -> None:
    """Print the Kubernetes objects that the operator would create."""
    from dlrm_cli.manifests import print_objects

    print_objects(file, hardware or [], settings or [], as_json=output == "json")


@app.command()
def run(options: RunOptions) -> None:
    """Train the job on this machine. Run the same command again to resume."""
    _check_current_folder()
    from dlrm_cli.run.command import run_job

    raise typer.Exit(run_job(options))


@app.command()
def trace(options: TraceOptions) -> None:
    """Measure how a job's data reuses rows; the planner sizes caches by it."""
    _check_current_folder()
    from dlrm_cli.trace import trace_job

    trace_job(options)


@runs.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of work directories.")] = Path("runs"),
    output: Output = "table",
) -> None:
    """List runs on this machine: state, step, quality and work directory."""
    from dlrm_cli.report.page import print_runs

    print_runs(folder, as_json=output == "json")


@profiles.command()
def measure(
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the profile.")] = "this-machine",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write (default: stdout).")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=FOLDER",
            help="Also measure a slower tier, in a folder of its mount: cxl=, scm= or block=. May be repeated.",
        ),
    ] = None,
) -> None:
    """Measure memory, CPUs, GPUs and slower tiers of this machine as a HardwareProfile to complete by hand."""
    _check_current_folder()
    from dlrm_cli.machine_profile import write_profile

    write_profile(name, out, tier or ())


@profiles.command()
def fit(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Work directories of dlrmctl run --profile on such a machine."),
    ],
    hardware: Annotated[
        Path, typer.Option(metavar="FILE", help="YAML file with the HardwareProfile to refine, which has loops.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    output: Output = "table",
) -> None:
    """Refine a HardwareProfile: scale the trainer's loops so that predictions match what runs measured."""
    _check_current_folder()
    from dlrm_cli.profile_fit import fit_runs

    fit_runs(runs, hardware, out, as_json=output == "json")


@cluster.command()
def get(options: GetOptions, where: ClusterOptions) -> None:
    """List jobs in the cluster: phase, step, speed, quality, newest snapshot, time left."""
    from dlrm_cli.cluster.get import get_jobs

    _check_all_namespaces(options.everywhere, options.names, where.namespace)
    if options.names and options.selector:
        raise UsageError("--selector cannot be combined with job names")
    with _until_interrupted():
        get_jobs(_client(where), options)


@cluster.command()
def describe(job: Name, where: ClusterOptions) -> None:
    """Show details of a job."""
    from dlrm_cli.cluster.describe import describe_job

    describe_job(_client(where), job)


@cluster.command()
def logs(
    job: Name,
    *,
    container: Annotated[TrainerContainer, typer.Option("--container", "-c", help="Container name.")] = "trainer",
    replica: Annotated[int | None, typer.Option(min=0, metavar="N", help="Pod index (default: 0).")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show the pod that runs this rank.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Show all pods, prefixed with the pod name.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt number (default: latest).")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs across restarts until the job ends.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the logs of the previous container instance.")
    ] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Number of recent lines to show.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Show logs newer than this duration, e.g. 30s, 10m, 2h.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Prefix each line with its time.")] = False,
    where: ClusterOptions,
) -> None:
    """Print the logs of a job's pods (default: pod 0)."""
    from dlrm_cli.cluster.logs import LogOptions, PodChoice, follow_logs, print_logs
    from dlrm_cli.documents import parse_duration

    if follow and previous:
        raise UsageError("--follow cannot be combined with --previous")
    options = LogOptions(
        choice=PodChoice(replica=replica, rank=rank, everyone=everyone, attempt=attempt),
        container=container,
        previous=previous,
        timestamps=timestamps,
        tail=tail,
        since_s=None if since is None else parse_duration("--since", since),
    )
    with _until_interrupted():
        (follow_logs if follow else print_logs)(_client(where), job, options)


@cluster.command()
def suspend(job: Name, *, wait: Wait = False, timeout: Timeout = "15m", where: ClusterOptions) -> None:
    """Suspend a job: save a checkpoint, then release its nodes."""
    _set_suspend(job, True, timeout if wait else None, where)


@cluster.command()
def resume(job: Name, *, wait: Wait = False, timeout: Timeout = "15m", where: ClusterOptions) -> None:
    """Resume a suspended job, or retry a failed one, from its newest snapshot."""
    _set_suspend(job, False, timeout if wait else None, where)


@cluster.command()
def wait(
    job: Name,
    *,
    state: Annotated[
        Literal["Finished", "Running", "Suspended", "Succeeded", "Failed"],
        typer.Option("--for", help="Phase to wait for; Finished: until the job succeeds, fail if it fails."),
    ] = "Finished",
    timeout: Timeout = "1h",
    where: ClusterOptions,
) -> None:
    """Wait until a job reaches a phase."""
    from dlrm_cli.cluster.lifecycle import wait_for
    from dlrm_cli.documents import parse_duration

    with _until_interrupted():
        wait_for(_client(where), job, state, parse_duration("--timeout", timeout))


@cluster.command()
def top(
    *,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Show the pods of a job (default: all jobs).")
    ] = None,
    all_namespaces: AllNamespaces = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    where: ClusterOptions,
) -> None:
    """Show how jobs, or one job's pods, train now; refreshed every two seconds."""
    from dlrm_cli.cluster.top import show_top

    _check_all_namespaces(all_namespaces, job, where.namespace)
    with _until_interrupted():
        show_top(_client(where), job, everywhere=all_namespaces, once=once)


@cluster.command()
def report(
    *,
    what: Annotated[
        list[str],
        typer.Argument(metavar="JOB_OR_WORKDIR...", help="Work directories of dlrmctl run, or names of jobs."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")] = Path(
        "report.html"
    ),
    where: ClusterOptions,
) -> None:
    """Write an HTML page about a run: loss, speed, memory tiers, snapshots, restarts, planned against measured.

    With several runs the page compares them side by side.
    """
    from dlrm_cli.report.page import write_report

    print(write_report(what, output, lambda: _client(where)))


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """End without a message on Ctrl-C: a command that runs until then has done its work."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _check_all_namespaces(all_namespaces: bool, names: object, namespace: str | None) -> None:
    if all_namespaces and (names or namespace):
        raise UsageError("--all-namespaces cannot be combined with job names or --namespace")


def _set_suspend(job: str, wanted: bool, timeout: str | None, where: ClusterOptions) -> None:
    from dlrm_cli.cluster.lifecycle import set_suspend
    from dlrm_cli.documents import parse_duration

    timeout_s = None if timeout is None else parse_duration("--timeout", timeout)
    set_suspend(_client(where), job, wanted, timeout_s)


def _client(where: ClusterOptions) -> JobClient:
    from dlrm_cli.cluster.client import JobClient

    return JobClient(where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run dlrmctl and return its exit code. Every error is one line on stderr, and so is every invalid field."""
    if arguments is None:
        use_utf8()
    try:
        return int(app(arguments, prog_name="dlrmctl", standalone_mode=False) or ExitCode.DONE)
    except DLRMError as error:
        return _fail(error.lines, error.exit_code)
    except typer.TyperException as error:
        return _fail([f"{error.format_message().replace(RULE_PREFIX, '')} (see {_help_of(error)})"], ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(["interrupted"], 130)
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # The reader of our output has closed the pipe; typer makes a SystemExit of it.
        sys.stderr.close()
        return int(ExitCode.DONE)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS or error.filename is not None:
            return _fail_unexpected(error)
        # Without this, flushing the rest of the output at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail([f"cannot write standard output: {error.strerror}; free some space"], ExitCode.DEVICE)
    except Exception as error:
        return _fail_unexpected(error)


def use_utf8() -> None:
    """Start over in UTF-8 mode if the locale has another encoding: file names and manifests are UTF-8 everywhere.

    What the terminal's encoding lacks is written out.
    """
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    if not sys.flags.utf8_mode and encoding != "utf-8":
        os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{encoding}:backslashreplace"}
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own command line


def _fail_unexpected(caught: Exception) -> int:
    """Name the system limit that was met, or say that this is a bug."""
    error = named_limit(caught)
    if isinstance(error, DLRMError):
        return _fail(error.lines, error.exit_code)
    with tempfile.NamedTemporaryFile("w", prefix="dlrmctl-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    return _fail([f"this is a bug: {type(error).__name__}: {error}; see {log.name}"], ExitCode.INTERNAL)


def _help_of(error: typer.TyperException) -> str:
    """Return the command whose help explains the error."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'dlrmctl'} --help"


def _fail(messages: Sequence[str], code: int) -> int:
    for message in messages:
        print(f"dlrmctl: error: {visible(' '.join(message.split()))}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
