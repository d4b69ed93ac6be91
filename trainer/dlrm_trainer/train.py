"""Train one rank from the restored snapshot to the last committed cut. Read it from top to bottom."""

from __future__ import annotations

import faulthandler
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from pydantic import TypeAdapter

from dlrm_api.errors import BadDataError, InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan
from dlrm_api.progress import EvalMetrics, TrainerPhase
from dlrm_api.tiers import TIERS
from dlrm_checkpointer import CutMeta, SnapshotName
from dlrm_kernels.directory import MAX_STEP
from dlrm_trainer.checkpointing.control import Agreement, CutControl, StoppedError
from dlrm_trainer.checkpointing.data_set import list_data_set, open_data_set
from dlrm_trainer.checkpointing.handover import CutDriver
from dlrm_trainer.checkpointing.restore import (
    Assembly,
    Restored,
    choose_newest,
    live_digest,
    model_document,
    open_writer,
    restore_chosen,
)
from dlrm_trainer.compute_device import take_device
from dlrm_trainer.data import Batch, Reader
from dlrm_trainer.data.bad_rows import MAX_NAMED, BadRowCounts
from dlrm_trainer.distributed.failures import StepTimer
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.embedding import LookupCounts, MaintenancePeriod, OwnedIds, PreparedBatch, place
from dlrm_trainer.endpoint import Endpoint, RankStacks
from dlrm_trainer.evaluate import evaluate
from dlrm_trainer.learner import Learner, Sums
from dlrm_trainer.metrics.progress import (
    Ledger,
    Observer,
    ProgressBoard,
    Schedule,
    StepJournal,
    make_schedule,
    write_result,
)
from dlrm_trainer.metrics.stages import TransportMetrics
from dlrm_trainer.metrics.tiers import SharedCounters
from dlrm_trainer.settings import Settings

logger = logging.getLogger(__name__)

PROBLEMS = TypeAdapter(list[tuple[int, str]])
STALL_S = 300.0
"""A step that takes longer dumps every thread's stack to the log, even while the GIL is held."""


def train(
    job: DLRMJob,
    plan: Plan,
    settings: Settings,
    gang: RankGroup,
    control: CutControl,
    board: ProgressBoard,
    *,
    digest: bool,
    shared: SharedCounters,
    stacks: RankStacks,
) -> ExitCode:
    """Train one rank's share of the job; return DONE, or TERMINATED after a signal's last cut.

    The ranks of ``gang`` have not met yet; the signal handlers already use ``control``. The pod's first rank serves
    ``board`` and ``stacks``. ``digest``: write the digest of the final state to ``result.json``.
    """
    spec, rank, world_size = job.spec, gang.rank, gang.world_size
    placement = place(spec.model, plan, world_size)
    device = take_device(plan.device, rank % spec.trainer.processes_per_replica)
    observer = Observer(placement, spec.training.row_optimizer, rank, shared, profile=settings.profile, device=device)
    with ExitStack() as stack:
        listings = list_data_set(spec) if rank == 0 else None
        writer = open_writer(stack, job, plan, settings, rank)
        control.attach(writer)
        if rank % spec.trainer.processes_per_replica == 0:
            address, port = settings.bind, settings.trainer_port
            more = [*observer.collectors(), TransportMetrics(lambda: gang.transports)]
            endpoint = Endpoint(address, port, board, control, settings.token_sha256, more, stacks.dump)
            stack.callback(endpoint.close)
        ours, of_ids = gang.collectives, gang.id_collectives
        planned = spec.with_row_codecs(plan.row_codecs)
        learner = Learner(
            planned, placement, ours, settings.tier_dir, observer.stages, id_collectives=of_ids, device=device
        )
        stack.callback(learner.embeddings.close)
        observer.watch(learner.embeddings.tables, (ours, of_ids))
        learner.start(spec.training.seed)
        patience_s, silence_s = settings.rendezvous_timeout_s, settings.collective_timeout_s
        gang.meet(patience_s, silence_s, control.check_stop, device, board.waiting)
        board.phase(TrainerPhase.RESTORING)
        chosen = choose_newest(job, settings, ours, board, learner.embeddings.shards) if writer else None
        read_data = chosen.read_data if chosen else None
        shards = plan.virtual_shards
        data = open_data_set(stack, spec, listings, ours, board, read_data, control.check_stop, virtual_shards=shards)
        assembly = Assembly(
            job=job,
            settings=settings,
            gang=gang,
            control=control,
            board=board,
            placement=placement,
            data=data,
            learner=learner,
            writer=writer,
            observer=observer,
        )
        schedule = make_schedule(spec, data.train.num_samples, data.train.batches_per_epoch)
        restored = restore_chosen(assembly, chosen, schedule.total_steps) if chosen else Restored()
        training = Training(assembly, restored, schedule)
        stack.callback(training.close)
        ended = training.run()
        return training.finish(digest) if ended is None else ended


@dataclass(frozen=True)
class UnreadStep:
    """Hold a step that a device makes, or has made, and whose sums the host has not read."""

    step: int
    """Its number, from 1."""
    batch: Batch
    count: int
    """Samples of the global batch."""
    sums: Sums


class Training:
    """Run one rank's steps. Every rank makes the same collectives in the same order."""

    def __init__(self, assembly: Assembly, restored: Restored, schedule: Schedule) -> None:
        self.assembly, self.attempt, self.step = assembly, restored.attempt, restored.step
        self.schedule, settings = schedule, assembly.settings
        self.collectives, self.board, self.control = assembly.gang.collectives, assembly.board, assembly.control
        self.observer, self.stages = assembly.observer, assembly.observer.stages
        self.board.begin(self.step, self.step or None, self.schedule)
        if self.step >= self.schedule.total_steps:
            logger.info("training already complete", extra={"step": self.schedule.total_steps})
        metrics = restored.metrics
        self.loss: float | None = metrics.get("loss")
        self.quality = EvalMetrics.model_validate(metrics["eval"]) if metrics.get("eval") else None
        self.bad_rows = BadRowCounts(**metrics.get("bad_rows", {}))
        self.board.update(loss=self.loss, evaluation=self.quality, **asdict(self.bad_rows))
        self.control.watch(assembly.learner.embeddings.saved.changed_bytes)
        self.control.restored(restored.held_step)
        gang, ledgers = assembly.gang, settings.ledger_dir
        self.journal = StepJournal(settings.work_dir, self.step) if gang.rank == 0 and settings.work_dir else None
        self.ledger = Ledger(ledgers, gang.rank, self.step, gang.world_size) if ledgers else None
        self.step_timer = StepTimer(self.collectives, self.stages.own_seconds)
        self.trained_s, self.trained_samples = 0.0, 0
        self.unread: deque[UnreadStep] = deque()
        model = assembly.job.spec.model
        self.period: MaintenancePeriod | None = None
        if model.has_unique or model.has_sizes:
            if model.has_unique and schedule.total_steps > MAX_STEP:
                raise InvalidSpecError(
                    "spec.training.maxSteps",
                    f"the job has {schedule.total_steps:,} steps; with embedding.hash unique set at most {MAX_STEP:,}",
                )
            self.period = MaintenancePeriod.begin(model.maintenance_steps, metrics.get("maintenance"))
            assembly.learner.embeddings.begin_period(self.period)
            self.board.update(maintenance_steps=self.period.steps)
        self.cuts = CutDriver(assembly, restored.attempt, restored.held_step)

    def run(self) -> ExitCode | None:
        """Train to the last step and return None, or return what ``stop`` does after a signal."""
        if (ended := self.evaluate_if_due()) is not None:
            return ended
        with closing(self.assembly.data.train.iterate(self.step, self.schedule.total_steps)) as batches:
            mark = time.monotonic()
            read = self.stages.after(batches, "read")
            learner, placement = self.assembly.learner, self.assembly.placement
            # A batch is copied to a GPU while the one before it is computed; slots have space for the plan's lookahead.
            depth = placement.lookahead if placement.has_stacks else max(placement.lookahead, learner.steps_ahead)
            ahead = 1 if self.assembly.gang.world_size > 1 else 0
            steps = prepared_ahead(
                read,
                learner.send,
                learner.prepare,
                depth=depth,
                sent_ahead=ahead,
                may_prepare=self.may_prepare(self.step),
            )
            for batch in steps:
                faulthandler.dump_traceback_later(STALL_S)
                stop, cut = self.train_step(batch)
                self.trained_s += time.monotonic() - mark
                if stop:
                    # Within this block: leaving it joins the reader's threads, which takes time from the grace period.
                    return self.stop()
                if self.step < self.schedule.total_steps:
                    if (ended := self.evaluate_if_due()) is not None:
                        return ended
                    if cut:
                        self.cuts.begin(self.step, self.cut_meta)
                    self.cuts.advance()
                if (measured := self.observer.stepped(self.step)) is not None:
                    self.board.update(measured=measured)
                mark = time.monotonic()
        return None

    def train_step(self, prepared: PreparedBatch) -> tuple[bool, bool]:
        """Run one step on one global batch; return whether to end after it, and whether to make a cut.

        On a GPU that is what ranks agreed on a step ago: the host reads sums of a step while the GPU makes the next
        one. Raises DivergedError if a loss is not finite, BadDataError if too many rows are bad; rows may have changed
        then, and must not be cut.
        """
        learner, batch = self.assembly.learner, prepared.batch
        count = self.assembly.data.train.global_count(batch.number)
        computed = learner.compute(prepared, count)
        votes = self.control.votes(self.step + 1, batch.skipped, batch.truncated)
        served = self.observer.newly_served()
        if (slowest := self.step_timer.stepped(self.step + 1)) is not None:
            self.board.update(slowest=slowest)
        self.stages.lap("agreement")
        factor, regularizer = self.schedule.factor(self.step), self.schedule.regularizer_at(self.step)
        sums = learner.apply(computed, factor, regularizer, (*votes, *served))
        self.step += 1
        self.unread.append(UnreadStep(self.step, batch, count, sums))
        stop, cut = self.agree()
        self.stages.lap("records")
        self.maintain_if_due()
        return stop, cut

    def agree(self) -> tuple[bool, bool]:
        """Read the sums of steps; return whether ranks agreed to stop, and whether to make a cut.

        The newest steps are left unread if the learner runs ahead, but none if the state is about to be cut, evaluated
        or rearranged: a step whose loss is not known to be finite is never cut.
        """
        stop, cut, is_seen = False, False, self.is_state_seen_at(self.step)
        while len(self.unread) > (0 if is_seen or stop or cut else self.assembly.learner.steps_ahead):
            agreed = self.record_step(self.unread.popleft())
            stop, cut = stop or agreed.stop, cut or agreed.cut
        return stop, cut

    def is_state_seen_at(self, step: int) -> bool:
        """Return whether more than the next step looks at the state after this one; the same on all ranks."""
        is_maintained = self.period is not None and self.period.is_due(step)
        is_last = step == self.schedule.total_steps
        return is_maintained or is_last or self.is_evaluation_due(step) or self.control.is_due_at(step)

    def record_step(self, unread: UnreadStep) -> Agreement:
        """Read the sums of a step, and record it."""
        loss, *sums = self.assembly.learner.read(unread.sums)
        votes = len(sums) - len(TIERS)
        agreed = self.control.agreed(loss, sums[:votes])
        if agreed.skipped or agreed.truncated:
            self.count_bad_rows(unread.step, self.bad_rows.plus(agreed.skipped, agreed.truncated))
        self.loss = loss
        self.trained_samples += unread.count
        self.observer.meter.stepped(unread.count, sums[votes:])
        self.board.stepped(unread.step, loss, self.schedule)
        if self.ledger:
            self.ledger.write(unread.step, unread.batch.sample_ids.numpy())
        if self.journal:
            self.journal.stepped(self.board.now)
        return agreed

    def count_bad_rows(self, step: int, counts: BadRowCounts) -> None:
        """Count those of a step; BadDataError on every rank if there are too many."""
        spec, rows = self.assembly.job.spec.data.bad_rows, self.schedule.samples_after(step)
        if counts.exceed(spec, rows, self.schedule.num_samples):
            raise self.too_many_bad_rows(counts, rows, self.assembly.data.train, step - 1)
        self.bad_rows = counts
        self.board.update(**asdict(counts))

    def too_many_bad_rows(self, counts: BadRowCounts, rows: int, reader: Reader, last_batch: int) -> BadDataError:
        """Return an error that names the first bad rows up to a batch, of all ranks, which must all call this."""
        problems = [each for each in reader.problems if each[0] <= last_batch]
        found = sorted(chain(*self.collectives.gather(problems, PROBLEMS)), key=lambda each: each[0])
        named = "; ".join(problem for _, problem in found[:MAX_NAMED])
        return BadDataError(
            f"{counts.skipped_rows:,} rows skipped and {counts.truncated_rows:,} truncated of {rows:,} are more than "
            f"data.badRows.maxFraction ({self.assembly.job.spec.data.bad_rows.max_fraction:g}) allows; the first of "
            f"this attempt: {named}; correct the data, or raise data.badRows.maxFraction"
        )

    def may_prepare(self, first: int) -> Callable[[int], bool]:
        """Return whether the n-th batch from ``first`` on may be looked up now: none past the next maintenance.

        Rows would else depend on how far ahead batches are looked up.
        """
        return lambda number: self.period is None or first + number < self.period.next_due(self.step)

    def maintain_if_due(self) -> None:
        """Evict and resize rows, every few steps; no batch is in flight then."""
        if self.period is None or not self.period.is_due(self.step):
            return
        waited = self.collectives.seconds
        self.period = self.assembly.learner.embeddings.maintain(self.step, self.period)
        self.stages.apart("agreement", self.collectives.seconds - waited)
        self.board.update(maintenance_steps=self.period.steps)
        self.stages.lap("maintenance")

    def count_lookups(self) -> LookupCounts:
        """Return the lookups of all ranks in unique tables since the last maintenance; all ranks must call this."""
        counts = torch.tensor(self.assembly.learner.embeddings.lookups, dtype=torch.float64)
        self.collectives.all_reduce(counts)
        return LookupCounts(*map(int, counts.tolist()))

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after a step, but for the last one."""
        every = self.assembly.job.spec.training.eval_every_steps
        return every is not None and step % every == 0 and 0 < step < self.schedule.total_steps

    def evaluate_if_due(self) -> ExitCode | None:
        """Evaluate after every ``evalEverySteps`` steps, unless the restored snapshot has that result."""
        is_known = self.quality is not None and self.quality.step == self.step
        return self.evaluate() if self.is_evaluation_due(self.step) and not is_known else None

    def evaluate(self) -> ExitCode | None:
        """Measure quality on the evaluation set and return None, or return what ``stop`` does after a signal."""
        self.board.update(phase=TrainerPhase.EVALUATING, evaluated_batches=0)
        faulthandler.cancel_dump_traceback_later()
        learner, reader = self.assembly.learner, self.assembly.data.evaluation
        with closing(reader.iterate(0, reader.batches_per_epoch)) as batches:
            try:
                self.quality = evaluate(
                    learner,
                    batches,
                    self.collectives,
                    self.step,
                    scored=self.scored,
                    stopping=lambda: self.control.stop_requested,
                    note=self.assembly.data.eval_note,
                )
            except StoppedError:
                return self.stop()
        self.check_evaluated_rows(reader)
        self.board.evaluated(self.quality)
        if self.quality and self.quality.note:
            self.board.note(self.quality.note)
        self.board.phase(TrainerPhase.TRAINING)
        if self.journal and self.quality:
            self.journal.evaluated(self.step, self.quality)
        self.stages.lap("evaluation")
        return None

    def check_evaluated_rows(self, reader: Reader) -> None:
        """Report the rows that an evaluation skipped; BadDataError on every rank if there are too many."""
        counts = BadRowCounts(skipped_rows=reader.num_samples - (self.quality.samples if self.quality else 0))
        if not counts.skipped_rows:
            return
        spec, rows = self.assembly.job.spec.data.bad_rows, reader.num_samples
        if counts.exceed(spec, rows, rows):
            raise self.too_many_bad_rows(counts, rows, reader, reader.batches_per_epoch)
        self.board.note(f"data.eval: {counts.skipped_rows:,} of {rows:,} rows are bad and were skipped")

    def scored(self, batches: int) -> None:
        """Report the progress of an evaluation, and hand over a cut that has been copied."""
        self.board.update(evaluated_batches=batches)
        self.cuts.advance(evaluating=True)

    def cut_meta(self, parent: SnapshotName | None, now: float) -> CutMeta:
        """Return the metadata of a cut, equal on all ranks; ``now`` is rank 0's clock."""
        spec, data = self.assembly.job.spec, self.assembly.data
        quality = None if self.quality is None else self.quality.model_dump(by_alias=False)
        more: dict[str, Any] = {"bad_rows": asdict(self.bad_rows)} if self.bad_rows.total else {}
        if self.period is not None:
            more |= {"maintenance": self.period.counted(self.count_lookups()).model_dump()}
        return CutMeta(
            step=self.step,
            samples=self.schedule.samples_after(self.step),
            world_size=self.assembly.gang.world_size,
            attempt=self.attempt,
            parent=parent,
            time=now,
            reader={"next_batch": self.step, "fingerprint": data.fingerprint, "seed": spec.training.seed}
            | ({"dataIndex": data.index} if data.index else {}),
            model=model_document(spec, self.assembly.learner),
            metrics={"loss": self.loss, "eval": quality} | more,
        )

    def stop(self) -> ExitCode:
        """Hand over a last cut within the grace period of a signal, and return TERMINATED.

        Raises TemporaryError if an earlier cut still waited after that time, or there was no space for this one.
        """
        self.cuts.hand_over_last(self.step, self.cut_meta)
        self.observer.save_profile(self.collectives, self.assembly.settings.work_dir)
        logger.info("received signal, shutting down", extra={"step": self.step})
        return ExitCode.TERMINATED

    def finish(self, digest: bool) -> ExitCode:
        """Evaluate, hand over the final cut, wait until it is committed, write the result and return DONE.

        After a signal during the evaluation it returns what ``stop`` does. Raises TemporaryError if the cut was not
        committed in time; running again commits it.
        """
        faulthandler.cancel_dump_traceback_later()
        if (ended := self.evaluate()) is not None:
            return ended
        self.board.phase(TrainerPhase.FINISHING)
        self.cuts.hand_over_last(self.step, self.cut_meta)
        self.board.phase(TrainerPhase.FINISHING)
        state = live_digest(self.assembly.learner, self.collectives) if digest else None
        self.cuts.wait_committed(self.step)
        folder = self.assembly.settings.work_dir
        uses = self.observer.report(self.collectives, self.step, folder)
        self.collectives.barrier()
        if self.assembly.gang.rank == 0 and folder:
            result = {
                "step": self.step,
                "samples": self.schedule.samples_after(self.step),
                "world_size": self.assembly.gang.world_size,
                "train_loss": self.loss,
                "eval": None if self.quality is None else self.quality.model_dump(by_alias=False),
                "samples_per_s": self.trained_samples / self.trained_s if self.trained_s else None,
                "state_digest": state,
            } | asdict(self.bad_rows)
            notes = {"notes": self.board.now.notes} if self.board.now.notes else {}
            write_result(folder, result | notes | uses)
        self.board.phase(TrainerPhase.DONE)
        return ExitCode.DONE

    def close(self) -> None:
        """Withdraw a cut that is not handed over, and close files."""
        faulthandler.cancel_dump_traceback_later()
        self.cuts.close()
        for file in (self.journal, self.ledger):
            if file:
                file.close()


def prepared_ahead(
    batches: Iterable[Batch],
    send: Callable[[Batch], Future[OwnedIds]],
    prepare: Callable[[Future[OwnedIds]], PreparedBatch],
    *,
    depth: int,
    sent_ahead: int = 0,
    may_prepare: Callable[[int], bool] = lambda _: True,
) -> Iterator[PreparedBatch]:
    """Yield batches in order, with the ids and rows of later ones already requested.

    ``send`` starts to send a batch's ids; ``prepare`` waits for them, and starts to fetch its rows. ``depth`` batches
    are prepared beyond the one yielded, and ``sent_ahead`` are sent beyond those, if there are as many, and as long as
    ``may_prepare`` allows the n-th one; it always does if none is waiting.
    """
    sent: deque[Future[OwnedIds]] = deque()
    waiting: deque[PreparedBatch] = deque()
    coming, prepared = iter(batches), 0
    while True:
        while len(sent) + len(waiting) <= depth + sent_ahead and (batch := next(coming, None)) is not None:
            sent.append(send(batch))
            # In this order the first batches are prepared while later ones are read.
            if len(sent) > sent_ahead and len(waiting) <= depth and may_prepare(prepared):
                waiting.append(prepare(sent.popleft()))
                prepared += 1
        while sent and len(waiting) <= depth and may_prepare(prepared):
            waiting.append(prepare(sent.popleft()))
            prepared += 1
        if not waiting:
            return
        yield waiting.popleft()
