"""Declare the options that several commands share, and those that one command passes on as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

File = Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON file with a DLRMJob, or - for stdin.")]
Data = Annotated[str | None, typer.Option("--data", metavar="URI", help="Override spec.data.train.uris.")]
Hardware = Annotated[
    list[Path] | None,
    typer.Option("--hardware", metavar="FILE", help="YAML file with HardwareProfiles of the job. May be repeated."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="spec.path=value", help="Set a field; the value is YAML. May be repeated."),
]
Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="Output format.")]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="List jobs of all namespaces.")]


Function = TypeVar("Function", bound=Callable[..., Any])


class Commands(typer.Typer):
    """Register commands, each of which may take dataclasses: their fields are options of their own."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Function], Function]:
        """Register one command."""
        register = super().command(*args, **kwargs)
        return lambda function: register(_flat(function))


def _flat(function: Callable[..., Any]) -> Any:
    """Return ``function`` with the fields of each dataclass that it takes as parameters of its own."""
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            fields = inspect.signature(kind, eval_str=True).parameters
            groups[name] = kind, list(fields)
            parameters += fields.values()
        else:
            # By keyword: a required one may follow fields with defaults.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def run(**given: Any) -> Any:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        return function(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Choose a cluster, and a namespace of it."""

    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NS", help="Namespace (default: the context's).")
    ] = None
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig (default: the current one).")
    ] = None
    kubeconfig: Annotated[
        str | None, typer.Option(metavar="FILE", help="Kubeconfig file (default: $KUBECONFIG, then ~/.kube/config).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Say how to reach the S3 service of a store."""

    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="URL of the S3 service (default: AWS).")] = None
    region: Annotated[str | None, typer.Option(help="Region of the S3 service.")] = None
    ca_file: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file with the service's CA.")] = None
    credentials_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", envvar="DLRM_CREDENTIALS_DIR", help="Folder with accessKeyId and secretAccessKey."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Hold the options of ``dlrmctl run``."""

    file: File
    workdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for logs and progress (default: runs/<job>).")
    ] = None
    data: Data = None
    eval_data: Annotated[str | None, typer.Option(metavar="URI", help="Override spec.data.eval.uris.")] = None
    settings: Settings = None
    hardware: Annotated[
        Path | None, typer.Option("--hardware", metavar="FILE", help="YAML file with this machine's HardwareProfile.")
    ] = None
    digest: Annotated[bool, typer.Option("--digest", help="Add the SHA-256 of the final state to the result.")] = False
    ledger: Annotated[bool, typer.Option("--ledger", help="Record the ids of all samples for audits.")] = False
    profile: Annotated[bool, typer.Option("--profile", help="Time the stages of steps and show them at the end.")] = (
        False
    )
    tier_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for rows in slower tiers (default: <workdir>/tiers).")
    ] = None
    output: Output = "table"


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Hold the options of ``dlrmctl trace``."""

    file: File
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the trace (default: <job>.trace.json).")
    ] = None
    configmap: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the trace as ConfigMap NAME instead of writing a file; above 1 MiB as NAME-0, NAME-1, ...",
        ),
    ] = None
    batches: Annotated[int | None, typer.Option(min=1, help="Global batches to read (default: one epoch).")] = None
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.0001, max=1, help="Share of a large table's rows to sample (default: as many as fit in memory)."
        ),
    ] = None
    data: Data = None
    settings: Settings = None


@dataclass(frozen=True, kw_only=True)
class GetOptions:
    """Hold the options of ``dlrmctl get``."""

    names: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Names of jobs (default: all).")] = None
    everywhere: AllNamespaces = False
    selector: Annotated[str | None, typer.Option("--selector", "-l", help="Label selector.")] = None
    form: Annotated[
        Literal["table", "wide", "json", "yaml", "name"], typer.Option("--output", "-o", help="Output format.")
    ] = "table"
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch for changes.")] = False
