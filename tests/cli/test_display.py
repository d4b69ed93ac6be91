"""Progress on stderr: what a terminal shows, and what a log file gets."""

from __future__ import annotations

import io

from rich.console import Console

from dlrm_api.progress import CheckpointerProgress, EvalMetrics, Progress, SnapshotInfo, TrainerPhase
from dlrm_cli.display import LiveDisplay, PlainDisplay, progress_text
from dlrm_cli.result import RunResult
from dlrm_cli.views import result_view
from dlrm_cli.watch import Seen


def seen(step: int, phase: TrainerPhase = TrainerPhase.TRAINING, store_error: str = "") -> Seen:
    trainer = Progress(
        phase=phase, step=step, total_steps=5_000, loss=0.47111, samples_per_second=35_000.4, eta_seconds=100
    )
    return Seen(trainer, CheckpointerProgress(committed_step=1_000, store_error=store_error))


def test_progress_says_step_loss_rate_time_left_and_snapshot() -> None:
    text = progress_text(seen(1_200))

    assert text == "step 1,200/5,000, loss 0.4711, 35,000 samples/s, 1:40 left, snapshot at step 1,000"


def test_a_failing_store_shows_in_the_progress() -> None:
    text = progress_text(seen(1_200, store_error="bucket b at http://x: SlowDown\nmore"))

    assert text.endswith("store: bucket b at http://x: SlowDown")


def test_a_log_file_gets_a_line_for_each_phase_and_not_for_each_step() -> None:
    written = io.StringIO()
    display = PlainDisplay(Console(file=written, width=200))

    display.update(Seen())
    for step in range(10):
        display.update(seen(step))
    display.update(seen(10, TrainerPhase.EVALUATING))

    lines = written.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Training", "Evaluating"]


def test_a_terminal_gets_a_bar_and_the_events_above_it() -> None:
    written = io.StringIO()

    with LiveDisplay(Console(file=written, force_terminal=True, width=150)) as display:
        display.update(seen(1_200))
        display.say("checkpointer-0 ended with signal 9; starting it again")

    shown = written.getvalue()
    assert "step 1,200/5,000" in shown
    assert "checkpointer-0 ended with signal 9" in shown


def test_the_result_table_shows_quality_and_snapshots() -> None:
    written = io.StringIO()
    result = RunResult(
        step=500,
        samples=1_024_000,
        world_size=2,
        train_loss=0.4912,
        eval=EvalMetrics(log_loss=0.4951, ne=0.8804, auc=0.7417, calibration=None),
        samples_per_s=84_211.7,
        restarts=1,
        snapshots=(SnapshotInfo(step=500, bits=32, bytes=6_815_744, uri="file:///s/manifests/500.json"),),
    )

    Console(file=written, width=150).print(result_view(result))

    shown = written.getvalue()
    for text in ("1,024,000", "0.49120", "0.88040", "0.74170", "84,212", "6,815,744", "file:///s/manifests/500.json"):
        assert text in shown
