"""``dlrmctl``: validate, plan, render, trace and run DLRMJobs, and look after jobs in a cluster and their snapshots.

Each command imports what it needs when it runs, so that ``dlrmctl --help`` answers at once.
"""

from __future__ import annotations

import enum
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dlrm_api.errors import RULE_PREFIX, DLRMError, NoInputError, visible
from dlrm_api.names import ExitCode
from dlrm_api.process import named_limit
from dlrm_cli.cluster.commands import cluster
from dlrm_cli.exports import serving
from dlrm_cli.snapshots import snapshots

app = typer.Typer(
    name="dlrmctl",
    help="Train deep-learning recommendation models from a DLRMJob manifest, on this machine or on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
snapshots.add_typer(serving)
app.add_typer(snapshots, name="snapshots")
app.add_typer(cluster)
profiles = typer.Typer(name="profile", help="HardwareProfiles.", no_args_is_help=True)
app.add_typer(profiles, name="profile")


class TableOrJson(enum.StrEnum):
    """Forms of a result."""

    TABLE = "table"
    JSON = "json"


class YamlOrJson(enum.StrEnum):
    """Forms of manifests."""

    YAML = "yaml"
    JSON = "json"


File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with a DLRMJob.")]
Profile = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with the HardwareProfile.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="spec.path=value", help="Set a field; the value is YAML. May be repeated."),
]


def _need_current_folder() -> None:
    """Refuse to start where the current folder was removed: relative paths mean nothing, and torch can't load."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise NoInputError("the current folder was removed: change to one that is there") from error


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
    """Options of no command; the program's help is what it says of itself."""


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of any number of documents.")],
) -> None:
    """Check every DLRMJob and HardwareProfile of a file."""
    from dlrm_cli.manifests import validate_file

    validate_file(file)


@app.command()
def plan(
    file: File,
    profile: Profile = None,
    settings: Settings = None,
    output: Annotated[TableOrJson, typer.Option("--output", "-o", help="Form of the plan.")] = TableOrJson.TABLE,
) -> None:
    """Show which embedding table lives on which rank, and what that takes."""
    from dlrm_cli.manifests import print_plan

    print_plan(file, profile, settings or [], as_json=output is TableOrJson.JSON)


@app.command()
def render(
    file: File,
    profile: Profile = None,
    settings: Settings = None,
    output: Annotated[YamlOrJson, typer.Option("--output", "-o", help="Form of the objects.")] = YamlOrJson.YAML,
) -> None:
    """Print the Kubernetes objects that the operator would create."""
    from dlrm_cli.manifests import print_objects

    print_objects(file, profile, settings or [], as_json=output is YamlOrJson.JSON)


@app.command()
def run(
    file: File,
    workdir: Annotated[
        Path | None, typer.Option(metavar="D", help="Folder for logs and progress; runs/<job> by default.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="URI", help="Train on this instead of the job's files.")] = None,
    eval_data: Annotated[str | None, typer.Option(metavar="URI", help="Evaluate on this.")] = None,
    settings: Settings = None,
    digest: Annotated[bool, typer.Option("--digest", help="Also give the SHA-256 of the final state.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Keep the ids of all samples, for audits.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Time the stages of steps; show them at the end.")] = False,
    tier_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for rows in slower tiers; <workdir>/tiers by default.")
    ] = None,
    output: Annotated[TableOrJson, typer.Option("--output", "-o", help="Form of the result.")] = TableOrJson.TABLE,
) -> None:
    """Train the job on this machine; run the same command again to resume."""
    from dlrm_cli.run.command import RunOptions, run_job

    _need_current_folder()
    options = RunOptions(
        file=file,
        workdir=workdir,
        data=data,
        eval_data=eval_data,
        settings=tuple(settings or ()),
        digest=digest,
        ledger=ledger,
        profile=profile,
        tier_dir=tier_dir,
        as_json=output is TableOrJson.JSON,
    )
    raise typer.Exit(run_job(options))


@app.command()
def trace(
    file: File,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the trace; <job>.trace.json by default.")
    ] = None,
    configmap: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the trace as ConfigMap NAME, or NAME-0, NAME-1 and so on above 1 MiB, in place of a file.",
        ),
    ] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Global batches to read; one epoch by default.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.0001, max=1, help="Share of a large table's rows to follow; by default as many as fit memory."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="URI", help="Read this instead of the job's files.")] = None,
    settings: Settings = None,
) -> None:
    """Measure how a job's data reuses rows, for the planner to size caches by."""
    from dlrm_cli.trace import TraceOptions, trace_job

    _need_current_folder()
    trace_job(
        TraceOptions(
            file=file,
            out=out,
            configmap=configmap,
            batches=batches,
            rate=rate,
            data=data,
            settings=tuple(settings or ()),
        )
    )


@profiles.command()
def measure(
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the profile.")] = "this-machine",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; printed by default.")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=FOLDER",
            help="Slower tier to measure too, and a folder of its mount: cxl=, scm= or block=. May be repeated.",
        ),
    ] = None,
) -> None:
    """Measure this machine: its memory, CPUs, GPUs and slower tiers, as a HardwareProfile to complete by hand."""
    from dlrm_cli.machine_profile import write_profile

    _need_current_folder()
    write_profile(name, out, tier or ())


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run dlrmctl; returns its exit code and prints every error as one line on stderr."""
    try:
        return int(app(arguments, prog_name="dlrmctl", standalone_mode=False) or ExitCode.DONE)
    except DLRMError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(f"{error.format_message().replace(RULE_PREFIX, '')} (see dlrmctl --help)", ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        sys.stderr.close()  # typer makes an exit of it; the reader of our output has seen enough
        return int(ExitCode.DONE)
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            return _fail_unforeseen(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it would fail at the exit too
        return _fail(f"standard output can't be written: {error.strerror}: free space there", ExitCode.DEVICE)
    except Exception as error:
        return _fail_unforeseen(error)


def _fail_unforeseen(caught: Exception) -> int:
    """Say which limit of the system was met, or that it is a bug."""
    error = named_limit(caught)
    if isinstance(error, DLRMError):
        return _fail(str(error), error.exit_code)
    with tempfile.NamedTemporaryFile("w", prefix="dlrmctl-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    return _fail(f"this is a bug: {type(error).__name__}: {error}; its log is {log.name}", ExitCode.INTERNAL)


def _fail(message: str, code: int) -> int:
    print(f"dlrmctl: error: {visible(' '.join(message.split()))}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
