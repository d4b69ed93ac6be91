"""``dlrmctl run``: one job on this machine, from its manifest to its result."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dlrm_api.job import DLRMJob
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan
from dlrm_api.process import usable_cpus
from dlrm_api.progress import Progress as TrainerProgress
from dlrm_api.progress import TrainerPhase
from dlrm_cli.checks import check_inputs, detected_gpus, make_tier_folders, reach_store, this_machine
from dlrm_cli.manifests import read_job, read_references
from dlrm_cli.run.history import Seen
from dlrm_cli.run.supervisor import Outcome, Stop, Supervisor
from dlrm_cli.run.workdir import (
    RunResult,
    WorkDir,
    folder_error,
    has_processes,
    locked,
    read_final,
    read_profile,
    read_result,
    write_final,
)
from dlrm_cli.snapshots import committed
from dlrm_cli.views import SafeConsole
from dlrm_stores.base import ObjectStore

PLAIN_EVERY_S = 5.0


class LiveDisplay:
    """A bar with step, loss, rate, time left and committed step; sentences scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("Starting", total=None, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, seen: Seen) -> None:
        """Show the newest progress."""
        if seen.trainer is None:
            return
        self._bar.update(
            self._task,
            description=str(seen.trainer.phase),
            total=seen.trainer.total_steps,
            completed=seen.trainer.step,
            text=progress_text(seen),
        )

    def say(self, sentence: str) -> None:
        """Show one event."""
        self._console.print(sentence, markup=False, highlight=False)


class PlainDisplay:
    """A line every few seconds while steps are made, and at each new phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: tuple[TrainerPhase, int] | None = None
        self._told_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def update(self, seen: Seen) -> None:
        """Show the newest progress, if it is time."""
        if seen.trainer is None:
            return
        now, new = time.monotonic(), (seen.trainer.phase, seen.trainer.step)
        if new == self._told:
            return
        if self._told is None or new[0] != self._told[0] or now - self._told_at >= PLAIN_EVERY_S:
            self._told, self._told_at = new, now
            self.say(f"{seen.trainer.phase}: {progress_text(seen)}")

    def say(self, sentence: str) -> None:
        """Show one event."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def open_display() -> LiveDisplay | PlainDisplay:
    """The display that suits stderr."""
    console = SafeConsole(stderr=True)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def progress_text(seen: Seen) -> str:
    """``step 1,200/5,000, loss 0.4711, 35,000 samples/s, 1:40 left, snapshot at step 1,000``."""
    trainer = seen.trainer
    if trainer is None:
        return ""
    parts = [f"step {trainer.step:,}" + (f"/{trainer.total_steps:,}" if trainer.total_steps is not None else "")]
    parts += _rates(trainer)
    committed = None if seen.checkpointer is None else seen.checkpointer.committed_step
    if committed is not None and committed <= trainer.step:  # later ones are of a history that was given up
        parts.append(f"snapshot at step {committed:,}")
    if seen.checkpointer is not None and seen.checkpointer.store_error:
        parts.append(f"store: {seen.checkpointer.store_error.splitlines()[0]}")
    return ", ".join(parts)


def _rates(trainer: TrainerProgress) -> list[str]:
    parts = []
    if trainer.loss is not None:
        parts.append(f"loss {trainer.loss:.4f}")
    if trainer.samples_per_second is not None:
        parts.append(f"{trainer.samples_per_second:,.0f} samples/s")
    if trainer.eta_seconds is not None:
        minutes, seconds = divmod(round(trainer.eta_seconds), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{seconds:02d} left")
    return parts


if TYPE_CHECKING:
    from dlrm_stores.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the command line said."""

    file: Path
    workdir: Path | None
    data: str | None
    eval_data: str | None
    settings: tuple[str, ...]
    digest: bool
    ledger: bool
    profile: bool
    tier_dir: Path | None
    as_json: bool


def run_job(options: RunOptions) -> int:
    """Run the job to its end, or until the user stops it; returns the exit code.

    Raises:
        DLRMError: the input is bad, or the job failed.
    """
    asked = read_job(options.file, options.settings, options.data, options.eval_data)
    job = _share_threads(_sized(asked))
    check_inputs(job.spec)
    root = (options.workdir or Path("runs") / job.metadata.name).absolute()
    plan = None if has_processes(root) else _plan(job)  # else once they have ended: their memory is free then
    store = reach_store(job)
    grace_s = job.spec.lifecycle.termination_grace_period
    stop = Stop()
    restore = stop.install()
    try:
        with (
            open_display() as display,
            locked(root, grace_s, display.say, lambda: stop.count > 0) as workdir,
        ):
            if asked.spec.fixed_replicas is None:
                display.say(_fewest_run_here(job))
            result = LocalRun(job, plan or _plan(job), store, workdir, display, stop, options).result()
    finally:
        restore()
    if options.profile:
        _show_profile(WorkDir(root), as_table=not options.as_json)
    if result is None:
        return stop.exit_code
    _print(result, options)
    return int(ExitCode.DONE)


@dataclass(frozen=True)
class LocalRun:
    """One command's work in its work directory."""

    job: DLRMJob
    plan: Plan
    store: ObjectStore
    workdir: WorkDir
    display: LiveDisplay | PlainDisplay
    stop: Stop
    options: RunOptions

    def result(self) -> RunResult | None:
        """Train, unless the job has finished here already; None where the user stopped it."""
        old = self._finished()
        if old is None:
            return self._train()
        self.display.say(
            f"this job has already finished at step {old.step:,}; to train on, ask for more steps or epochs"
        )
        if not self.options.digest or old.state_digest is not None:
            return old
        new = self._train()  # restores the last snapshot, and makes the digest of it
        if new is None:
            return None
        kept = self._keep(old.model_copy(update={"state_digest": new.state_digest}))
        kept.write(self.workdir)  # the attempt for the digest made no step, and left no speed and no use of tiers
        return kept

    def _finished(self) -> RunResult | None:
        """The result of the same job, where it has finished here and its last snapshot is still there."""
        result = read_final(self.workdir, self.job)
        there = () if result is None else committed(self.store)
        return result if there and result is not None and there[-1].step == result.step else None

    def _train(self) -> RunResult | None:
        """Run attempts until the job is done; None where the user stopped it."""
        tier_dir = (self.options.tier_dir or self.workdir.tiers).absolute()
        make_tier_folders(tier_dir, self.plan)
        supervisor = Supervisor(
            job=self.job,
            tier_dir=tier_dir,
            workdir=self.workdir,
            display=self.display,
            stop=self.stop,
            ledger=self.options.ledger,
            digest=self.options.digest,
            profile=self.options.profile,
        )
        try:
            self.workdir.write(self.workdir.job, self.job.model_dump_json(indent=1, exclude_none=True))
            self.workdir.write(self.workdir.plan, self.plan.model_dump_json(indent=1))
            if not committed(self.store):  # the job starts from nothing, and so does its history
                self.workdir.history.unlink(missing_ok=True)
            outcome = supervisor.run()
            if outcome is Outcome.STOPPED:
                self.display.say(how_to_resume(supervisor.committed_step))
                return None
            return self._keep(read_result(self.workdir, committed(self.store), supervisor.restarts))
        except OSError as error:
            raise folder_error(self.workdir.root, error) from error

    def _keep(self, result: RunResult) -> RunResult:
        write_final(self.workdir, self.job, result)
        return result


def _sized(job: DLRMJob) -> DLRMJob:
    """The job with the fewest replicas that it allows, where it leaves their number to the planner."""
    return job if job.spec.fixed_replicas is not None else job.with_replicas(job.spec.replicas)


def _fewest_run_here(job: DLRMJob) -> str:
    return (
        f"spec.trainer.auto: all replicas would share this machine's memory and CPUs, so min runs here: "
        f"{job.spec.replicas}"
    )


def _share_threads(job: DLRMJob) -> DLRMJob:
    """Divide this machine's CPUs over all ranks of the job; a trainer would divide them over its own replica's."""
    if job.spec.trainer.threads_per_process is not None or job.spec.replicas == 1:
        return job
    threads = max(1, usable_cpus() // job.spec.world_size)
    trainer = job.spec.trainer.model_copy(update={"threads_per_process": threads})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def _plan(job: DLRMJob) -> Plan:
    """The plan for this machine, whatever hardware the job asks for elsewhere; for its GPUs where it asks for hbm."""
    from dlrm_planner import asks_for_hbm, plan_job

    devices = detected_gpus() if asks_for_hbm(job.spec) else ()
    machine = this_machine(job.spec.replicas, devices)
    return plan_job(job.spec, machine, traces=read_references(job.spec), shared=True)


def how_to_resume(committed_step: int | None) -> str:
    """What a stopped run leaves, and the command that goes on from there."""
    again = shlex.join(["dlrmctl", *sys.argv[1:]])
    if committed_step is None:
        return f"stopped before a snapshot was committed; to start again: {again}"
    return f"stopped; the snapshot of step {committed_step:,} is committed; to resume: {again}"


def _show_profile(workdir: WorkDir, *, as_table: bool) -> None:
    """Show what the trainers timed, beside the result; with ``-o json`` it stays in its file."""
    from dlrm_cli.views import tell

    profile = read_profile(workdir)
    if profile is None:
        tell(f"{workdir.profile}: no attempt left a profile: it is written as training ends or is stopped")
    elif as_table:
        from dlrm_cli.views import print_view, profile_view

        print_view(profile_view(profile))
        if workdir.trace.exists():
            tell(f"what each thread did when: {workdir.trace}")


def _print(result: RunResult, options: RunOptions) -> None:
    if not options.digest:
        result = result.model_copy(update={"state_digest": None})
    if options.as_json:
        print(result.to_json())
        return
    from dlrm_cli.views import print_view, result_view

    print_view(result_view(result))
