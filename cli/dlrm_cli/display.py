"""Live progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dlrm_api.progress import Progress as TrainerProgress
from dlrm_api.progress import TrainerPhase
from dlrm_cli.terminal import SafeConsole
from dlrm_cli.watch import Seen

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
