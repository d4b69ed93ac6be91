"""``dlrmctl run``: check, plan, supervise, show progress and print the result."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from dlrm_api.choice import NOT_CALIBRATED
from dlrm_api.errors import InvalidSpecError, UsageError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan, parse_plan
from dlrm_api.process import usable_cpus
from dlrm_api.progress import TrainerPhase
from dlrm_api.tiers import ELEMENT_BYTES
from dlrm_cli.checks import check_inputs, detect_gpus, make_tier_folders, open_job_store, this_machine, with_rates
from dlrm_cli.documents import find_profiles
from dlrm_cli.manifests import read_job, read_references
from dlrm_cli.options import RunOptions
from dlrm_cli.run.history import Seen
from dlrm_cli.run.supervisor import Stop, Supervisor
from dlrm_cli.run.workdir import (
    RunResult,
    WorkDir,
    folder_error,
    has_processes,
    locked,
    read_final,
    read_profile,
    read_result,
    replace_file,
    write_environment,
    write_final,
)
from dlrm_cli.snapshots import list_usable, stored_virtual_shards
from dlrm_cli.views import (
    PLAIN_INTERVAL_S,
    SafeConsole,
    format_bytes,
    number,
    print_stderr,
    print_view,
    profile_view,
    sizes_view,
    snapshots_view,
    tiers_view,
    unique_view,
    whole_line,
)
from dlrm_stores import ObjectStore

if TYPE_CHECKING:
    from dlrm_planner import PastPlan


def run_job(options: RunOptions) -> int:
    """Train a file's job on this machine; return the exit code."""
    wanted = read_job(options.file, options.settings or (), options.data, options.eval_data)
    stop = Stop()
    with RunDisplay() as display:
        done = run_here(wanted, options, display, stop)
    root = work_folder(wanted, options)
    if options.profile:
        _print_profile(WorkDir(root), as_table=options.output == "table")
    if done.result is None:
        return stop.exit_code
    result = done.result if options.digest else done.result.model_copy(update={"state_digest": None})
    if options.output == "json":
        print(result.to_json())
    else:
        print_view(result_view(result, done.plan.predicted.samples_per_second))
        print_view(next_commands(wanted.spec.checkpoint.uri, root))
    return int(ExitCode.DONE)


def work_folder(job: DLRMJob, options: RunOptions) -> Path:
    """Return the work directory of a job's runs."""
    return (options.workdir or Path("runs") / job.metadata.name).absolute()


@dataclass(frozen=True, kw_only=True)
class Done:
    """Hold what came of a run."""

    result: RunResult | None
    """None: the user stopped it."""
    plan: Plan


def run_here(wanted: DLRMJob, options: RunOptions, display: RunDisplay, stop: Stop) -> Done:
    """Train a job on this machine, in its work directory. Call it on the main thread, which gets the signals."""
    is_fixed = wanted.spec.fixed_replicas is not None
    job = _share_threads(wanted if is_fixed else wanted.with_replicas(wanted.spec.replicas))
    check_inputs(job.spec)
    root = work_folder(job, options)
    before = read_past_plan(WorkDir(root))
    # Processes of an earlier run still hold memory: plan once they have ended.
    early = None if before is not None or has_processes(root) else _plan(job, options.hardware)
    store = open_job_store(job)
    grace_s = job.spec.lifecycle.termination_grace_period
    restore_handlers = stop.install()
    try:
        with locked(root, grace_s, display.say, lambda: stop.count > 0) as workdir:
            if not is_fixed:
                display.say(
                    "spec.trainer.objective: running the minimum number of replicas, because all would share this "
                    f"machine's memory and CPUs: {job.spec.replicas}"
                )
            kept = stored_virtual_shards(store)
            is_settled = early is not None and kept in (None, early.virtual_shards)
            # Without a snapshot nothing is continued.
            past = before if before is not None and list_usable(store) else None
            plan = early if early and is_settled else _plan(job, options.hardware, kept, past)
            for line in banner(job, plan, workdir):
                display.say(line)
            return Done(result=LocalRun(job, plan, store, workdir, display, stop, options).result(), plan=plan)
    finally:
        restore_handlers()


def banner(job: DLRMJob, plan: Plan, workdir: WorkDir) -> list[str]:
    """Return what a user should know when a run starts."""
    tables = job.spec.model.all_tables()
    rows = sum(table.rows for table in tables)
    size = sum(table.rows * table.dim * ELEMENT_BYTES[table.dtype] for table in tables)
    memory = max(sum(rank.bytes_per_tier.values()) for rank in plan.ranks)
    predicted = plan.predicted.samples_per_second
    mark = f" ({NOT_CALIBRATED})" if plan.predicted.uncalibrated else ""
    speed = "" if predicted is None else f", predicted {predicted:,.0f} samples/s{mark}"
    return [
        f"{job.metadata.name}: {len(tables)} tables, {rows:,} rows, {format_bytes(size)} of rows",
        f"plan: ranks: {plan.world_size}, up to {format_bytes(memory)} each{speed}",
        *([plan.replanned] if plan.replanned else []),
        f"snapshots: {job.spec.checkpoint.uri}",
        f"logs: {from_here(workdir.root)}/logs",
    ]


def from_here(path: Path) -> str:
    """Return a path relative to the current folder, if it is below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def next_commands(store: str, root: Path) -> RenderableType:
    """Return commands to look at what a run made."""
    commands = (
        ["report", from_here(root)],
        ["snapshots", "verify", store],
        ["snapshots", "export", store, "--to", f"{from_here(root)}/model"],
    )
    return Group(Text("next:"), *(whole_line(f"  {shlex.join([program(), *command])}") for command in commands))


@dataclass(frozen=True)
class LocalRun:
    """Do the work of one command in its work directory."""

    job: DLRMJob
    plan: Plan
    store: ObjectStore
    workdir: WorkDir
    display: RunDisplay
    stop: Stop
    options: RunOptions

    def result(self) -> RunResult | None:
        """Train, unless the job has finished here already; return None if the user stopped it."""
        finished = self._finished()
        if finished is None:
            return self._train()
        self.display.say(
            f"this job already finished at step {finished.step:,}; raise its steps or epochs to train longer"
        )
        if not self.options.digest or finished.state_digest is not None:
            return finished
        # This attempt restores the last snapshot for its digest. It makes no step, and so measures nothing.
        digested = self._train()
        if digested is None:
            return None
        finished = finished.model_copy(update={"state_digest": digested.state_digest})
        write_final(self.workdir, self.job, finished)
        finished.write(self.workdir)
        return finished

    def _finished(self) -> RunResult | None:
        """Return the result of the same job if it finished here and its last snapshot still exists."""
        result = read_final(self.workdir, self.job)
        usable = () if result is None else list_usable(self.store)
        return result if usable and result is not None and usable[-1].step == result.step else None

    def _train(self) -> RunResult | None:
        tier_dir = (self.options.tier_dir or self.workdir.tiers).absolute()
        make_tier_folders(tier_dir, self.plan)
        supervisor = Supervisor(
            job=self.job,
            workdir=self.workdir,
            display=self.display,
            stop=self.stop,
            tier_dir=tier_dir,
            ledger=self.options.ledger,
            digest=self.options.digest,
            profile=self.options.profile,
        )
        try:
            replace_file(self.workdir.job, self.job.model_dump_json(indent=1, exclude_none=True))
            replace_file(self.workdir.plan, self.plan.model_dump_json(indent=1))
            write_environment(self.workdir)
            # Without a snapshot the job starts from step 0, and so does its history.
            if not list_usable(self.store):
                self.workdir.history.unlink(missing_ok=True)
            if supervisor.run() == "stopped":
                self.display.say(resume_hint(supervisor.committed_step))
                return None
            result = read_result(self.workdir, list_usable(self.store), supervisor.restarts)
            supervisor.show_notes(result.notes)
            write_final(self.workdir, self.job, result)
            return result
        except OSError as error:
            raise folder_error(self.workdir.root, error) from error


def _share_threads(job: DLRMJob) -> DLRMJob:
    """Divide this machine's CPUs among all ranks; a trainer divides them among its own replica's only."""
    if job.spec.trainer.threads_per_process is not None or job.spec.replicas == 1:
        return job
    threads = max(1, usable_cpus() // job.spec.world_size)
    trainer = job.spec.trainer.model_copy(update={"threads_per_process": threads})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def _plan(
    job: DLRMJob, hardware: Path | None, virtual_shards: int | None = None, before: PastPlan | None = None
) -> Plan:
    """Plan for this machine, whatever hardware the job names; for its GPUs if the job asks for HBM.

    Predictions are by the rates of the profile in ``hardware``. ``virtual_shards`` are those of the snapshot. A run
    that resumes continues with the plan ``before``, as attempts in a cluster do.
    """
    from dlrm_planner import asks_for_hbm, continue_plan, plan_job, with_reason

    gpus = detect_gpus() if asks_for_hbm(job.spec) else ()
    machine = this_machine(job.spec.replicas, gpus)
    if hardware is not None:
        measured = find_profiles(job, [], [hardware])
        if len(measured) > 1:
            raise UsageError(f"ambiguous --hardware: {hardware} has {len(measured)} of the job's HardwareProfiles")
        machine = with_rates(machine, measured[0], job.spec.trainer.tier_budgets)
    traces = read_references(job.spec)
    continued = continue_plan(before, job.spec, machine, traces=traces)
    if isinstance(continued, Plan):
        return continued
    codecs = before.chosen_codecs if before else None
    plan = plan_job(job.spec, machine, traces=traces, virtual_shards=virtual_shards, codecs=codecs, shared=True)
    return with_reason(plan, continued)


def read_past_plan(workdir: WorkDir) -> PastPlan | None:
    """Return the plan of the run before in a work directory; None without one that this version can read."""
    from dlrm_planner import PastPlan

    try:
        job = parse_job(json.loads(workdir.job.read_bytes()))
        return PastPlan(spec=job.spec, plan=parse_plan(workdir.plan.read_bytes()))
    except (OSError, ValueError, InvalidSpecError):
        return None


def program() -> str:
    """Return the name by which this dlrmctl can be called again: its path, unless the shell finds it."""
    mine, found = sys.argv[0], shutil.which("dlrmctl")
    if Path(mine).name != "dlrmctl" or (found and Path(found).resolve() == Path(mine).resolve()):
        return "dlrmctl"
    return mine


def resume_hint(committed_step: int | None) -> str:
    """Return what a stopped run leaves, and the command that resumes it."""
    command = shlex.join([program(), *sys.argv[1:]])
    if committed_step is None:
        return f"stopped before a snapshot was committed; to start again: {command}"
    return f"stopped; the snapshot of step {committed_step:,} is committed; to resume: {command}"


def _print_profile(workdir: WorkDir, *, as_table: bool) -> None:
    """Print the times of stages; with ``-o json`` they stay in their file."""
    profile = read_profile(workdir)
    if profile is None:
        print_stderr(f"{workdir.profile}: no attempt wrote a profile: it is written when training ends or is stopped")
    elif as_table:
        print_view(profile_view(profile))
        if workdir.trace.exists():
            print_stderr(f"timeline of all threads: {workdir.trace}")


def result_view(result: RunResult, predicted: float | None = None) -> RenderableType:
    """Return a run's result, its use of tiers and its snapshots as tables; ``predicted`` samples/s go with it."""
    columns = (Column(style="bold", overflow="fold"), Column(overflow="fold"))
    table = Table(*columns, show_header=False, title="result", title_justify="left")
    rows = {"steps": f"{result.step:,}", "samples": f"{result.samples:,}", "world size": str(result.world_size)}
    rows["training loss"] = number(result.train_loss, ".5f")
    if quality := result.eval:
        rows["eval log loss"] = number(quality.log_loss, ".5f")
        rows["eval NE"] = number(quality.ne, ".5f")
        rows["eval AUC"] = number(quality.auc, ".5f")
        rows["eval calibration"] = number(quality.calibration, ".5f")
    rows["samples/s"] = number(result.samples_per_s, ",.0f")
    if predicted is not None:
        rows["predicted samples/s"] = number(predicted, ",.0f")
    if result.skipped_rows or result.truncated_rows:
        rows["bad rows"] = f"{result.skipped_rows:,} skipped, {result.truncated_rows:,} truncated"
    rows["restarts"] = str(result.restarts)
    for row in (*rows.items(), *(("note", note) for note in result.notes)):
        table.add_row(*row)
    digest = [] if result.state_digest is None else [whole_line(f"state digest: {result.state_digest}")]
    tiers = [] if result.tiers is None else [tiers_view(result.tiers)]
    unique = [unique_view(result.unique_tables, result.maintenance)] if result.unique_tables else []
    sizes = [sizes_view(result.row_sizes)] if result.row_sizes else []
    return Group(table, *digest, *tiers, *unique, *sizes, snapshots_view(result.snapshots))


class RunDisplay:
    """Show progress and events on stderr: with a bar on a terminal, elsewhere line by line.

    The bar has step, loss, rate, time left and committed step. Lines come every few seconds while steps are made, and
    at each new phase.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole(stderr=True)
        self._has_bar = self._console.is_terminal
        text = TextColumn("{task.fields[text]}", markup=False)
        columns = (TextColumn("{task.description:<10}", markup=False), BarColumn(), text)
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._has_bar)
        self._task = self._bar.add_task("Starting", total=None, text="")
        self._shown: tuple[TrainerPhase, int] | None = None
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, seen: Seen) -> None:
        """Show the newest progress; as a line only if it is time."""
        trainer = seen.trainer
        if trainer is None:
            return
        text = progress_text(seen)
        if self._has_bar:
            total, done = trainer.total_steps, trainer.step
            self._bar.update(self._task, description=str(trainer.phase), total=total, completed=done, text=text)
            return
        now, new = time.monotonic(), (trainer.phase, trainer.step)
        if new == self._shown:
            return
        if self._shown is None or trainer.phase != self._shown[0] or now - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown, self._shown_at = new, now
            self.say(f"{trainer.phase}: {text}")

    def say(self, sentence: str) -> None:
        """Show one event."""
        # Commands and paths in it are copied.
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def progress_text(seen: Seen) -> str:
    """Return ``step 1,200/5,000, loss 0.4711, 35,000 samples/s, 1:40 left, snapshot at step 1,000``."""
    trainer = seen.trainer
    if trainer is None:
        return ""
    parts = [f"step {trainer.step:,}" + (f"/{trainer.total_steps:,}" if trainer.total_steps is not None else "")]
    if trainer.loss is not None:
        parts.append(f"loss {trainer.loss:.4f}")
    if trainer.samples_per_second is not None:
        parts.append(f"{trainer.samples_per_second:,.0f} samples/s")
    if trainer.eta_seconds is not None:
        minutes, seconds = divmod(round(trainer.eta_seconds), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{seconds:02d} left")
    committed = None if seen.checkpointer is None else seen.checkpointer.committed_step
    # Later snapshots belong to a history that was abandoned.
    if committed is not None and committed <= trainer.step:
        parts.append(f"snapshot at step {committed:,}")
    if seen.checkpointer is not None and seen.checkpointer.store_error:
        parts.append(f"store: {seen.checkpointer.store_error.splitlines()[0]}")
    return ", ".join(parts)
