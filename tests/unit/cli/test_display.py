"""Progress on stderr: what a terminal shows, and what a log file gets."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, Group, RenderableType
from rich.text import Text

from dlrm_api.job import parse_job
from dlrm_api.plan import Prediction
from dlrm_api.progress import CheckpointerProgress, EvalMetrics, Progress, SnapshotInfo, TrainerPhase
from dlrm_api.run_report import (
    HitRate,
    LevelUse,
    MaintenanceTimes,
    Profile,
    RankUse,
    StageTimes,
    TableUse,
    TierBytes,
    TierReport,
    UniqueUse,
)
from dlrm_checkpointer.read.diff import TableDiff
from dlrm_cli.run.command import RunDisplay, progress_text, result_view
from dlrm_cli.run.history import Seen
from dlrm_cli.run.workdir import RunResult
from dlrm_cli.views import diff_view, plan_view, print_view, profile_view, tiers_view, unique_view
from dlrm_planner import plan_job


def seen(step: int, phase: TrainerPhase = TrainerPhase.TRAINING, store_error: str = "") -> Seen:
    trainer = Progress(
        phase=phase, step=step, total_steps=5_000, loss=0.47111, samples_per_second=35_000.4, eta_seconds=100
    )
    return Seen(trainer, CheckpointerProgress(committed_step=1_000, store_error=store_error))


def test_progress_says_step_loss_rate_time_left_and_snapshot() -> None:
    text = progress_text(seen(1_200))

    assert text == "step 1,200/5,000, loss 0.4711, 35,000 samples/s, 1:40 left, snapshot at step 1,000"


def test_a_snapshot_of_a_later_step_belongs_to_another_run() -> None:
    assert progress_text(seen(999)).endswith("1:40 left")
    assert progress_text(seen(1_000)).endswith("snapshot at step 1,000")


def test_a_failing_store_shows_in_the_progress() -> None:
    text = progress_text(seen(1_200, store_error="bucket b at http://x: SlowDown\nmore"))

    assert text.endswith("store: bucket b at http://x: SlowDown")


def test_a_log_file_gets_a_line_for_each_phase_and_not_for_each_step() -> None:
    written = io.StringIO()
    display = RunDisplay(Console(file=written, width=200))

    display.update(Seen())
    for step in range(10):
        display.update(seen(step))
    display.update(seen(10, TrainerPhase.EVALUATING))

    lines = written.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Training", "Evaluating"]


def test_a_terminal_gets_a_bar_and_the_events_above_it() -> None:
    written = io.StringIO()

    with RunDisplay(Console(file=written, force_terminal=True, width=150)) as display:
        display.update(seen(1_200))
        display.say("checkpointer-0 ended with signal 9; starting it again")

    shown = written.getvalue()
    assert "step 1,200/5,000" in shown
    assert "checkpointer-0 ended with signal 9" in shown


LONG = "a-folder-with-a-long-name/" * 6
"""Wider than the terminal."""


def test_the_result_shows_quality_and_uris_that_can_be_copied_at_any_width() -> None:
    written = io.StringIO()
    result = RunResult(
        step=500,
        samples=1_024_000,
        world_size=2,
        train_loss=0.4912,
        eval=EvalMetrics(log_loss=0.4951, ne=0.8804, auc=0.7417, calibration=None),
        samples_per_s=84_211.7,
        restarts=1,
        snapshots=(SnapshotInfo(step=500, bits=32, bytes=6_815_744, uri=f"file:///{LONG}/manifests/500.json"),),
    )

    Console(file=written, width=60).print(result_view(result, predicted=90_000.0), crop=False)

    shown = written.getvalue()
    for text in (
        "1,024,000",
        "90,000",
        "0.49120",
        "0.88040",
        "0.74170",
        "84,212",
        "6,815,744",
        f"file:///{LONG}/manifests/500.json",
    ):
        assert text in shown


def test_brackets_in_notes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    note = "model.tables[users].rows was 400 :100: and is 2000"

    print_view(result_view(RunResult(step=1, samples=1, world_size=1, restarts=0, snapshots=(), notes=(note,))))

    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        (Prediction(samples_per_second=12_345.6), "predicted: 12,346 samples/s"),
        (
            Prediction(samples_per_second=1_000.0, price_per_billion_samples=2_777.5),
            "predicted: 1,000 samples/s, 2,777.50 per billion samples (currency of pricePerHour)",
        ),
        (
            Prediction(samples_per_second=1_000.0, price_per_billion_samples=2.5, uncalibrated=("devices.loops",)),
            "predicted: 1,000 samples/s (not calibrated), 2.50 per billion samples (currency of pricePerHour) "
            "(not calibrated)",
        ),
        (Prediction(), ""),
    ],
)
def test_a_plan_shows_the_speed_and_price_that_it_expects(predicted: Prediction, words: str) -> None:
    spec = {
        "model": {"tables": [{"name": "C1", "rows": 10, "dim": 4}], "interaction": "dcn"},
        "data": {"format": "synthetic"},
        "checkpoint": {"uri": "file:///s"},
    }
    job = parse_job({"metadata": {"name": "small"}, "spec": spec})
    plan = plan_job(job.spec, None).model_copy(update={"predicted": predicted})

    lines = [line.rstrip() for line in shown(plan_view(job, plan)).splitlines() if line.startswith("predicted")]

    assert lines == ([words] if words else [])


def used_tiers(tables: int, expected: float | None) -> TierReport:
    uses = tuple(
        TableUse(
            table=f"t{number}",
            rows=1_000 + number,
            lookups=2_000,
            accesses=1_000,
            hits=600 + number,
            created_rows=50,
            evicted_rows=30,
            scratch_rows=number % 2,
            expected_hit_rate=expected,
        )
        for number in range(tables)
    )
    level = LevelUse(group=0, level=1, tier="block", read_rows=400, written_rows=300, read_bytes=5 * 10**9)
    sizes = (
        TierBytes(tier="ddr", kept_bytes=10**9, planned_bytes=2 * 10**9),
        TierBytes(tier="block", kept_bytes=4 * 10**9, planned_bytes=8 * 10**9),
    )
    ranks = (
        RankUse(rank=0, prefetch_wait_seconds=0.5, tables=uses, levels=(level,), tiers=sizes),
        RankUse(rank=1, prefetch_wait_seconds=2.25, tiers=sizes),
    )
    return TierReport(ranks=ranks)


def shown(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, first: str) -> list[str]:
    """The cells of the row whose first cell that is."""
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines()]
    return next(row for row in rows if row[0] == first)


def test_the_tables_over_tiers_show_the_largest_and_the_total_of_all() -> None:
    text = shown(tiers_view(used_tiers(30, expected=0.55)))

    assert cells(text, "t29") == ["t29", "1,029", "2,000", "1,000", "62.9%", "66.2%", "55.0%", "50", "30", "1"]
    assert cells(text, "t10")[0] == "t10"
    assert "t9 " not in text  # the twenty-first by size
    total = cells(text, "all 30")
    assert total == ["all 30", "30,435", "60,000", "30,000", "61.5%", "64.7%", "55.0%", "1,500", "900", "15"]
    assert cells(text, "block") == ["block", "400", "300", "5.0 GB", "0 B", "0", "8.0 GB", "16.0 GB"]
    assert cells(text, "ddr") == ["ddr", "-", "-", "-", "-", "-", "2.0 GB", "4.0 GB"]
    assert "2.25 s, on rank 1; rows missing at a batch's start: 0" in text


def test_unique_tables_show_how_full_they_are() -> None:
    def use(table: str, capacity: int, lookups: int) -> UniqueUse:
        figures = {"capacity_rows": capacity, "fullest_bucket_ratio": 1, "directory_bytes": 1, "lookups": lookups}
        counts = {"lookups_without_row": lookups // 50, "admitted_rows": 2_000, "evicted_rows": 1_070}
        return UniqueUse(table=table, rows=930, **figures, **counts)

    uses = [use("small", 1_000, 0), *(use(f"t{n}", 2_000, 5_000) for n in range(20))]
    maintenance = [MaintenanceTimes(rank=n, longest_seconds=0.01 * (n + 1), last_seconds=0.005) for n in range(2)]

    text = shown(unique_view(uses, maintenance))

    assert cells(text, "t0") == ["t0", "930", "2,000", "46.5%", "5,000", "2.0%", "2,000", "1,070"]
    assert "small" not in text.replace("and 1 smaller", "")
    assert "20.0 ms, on rank 1" in text


def test_a_plan_that_expects_nothing_leaves_the_column_out() -> None:
    assert "expected" in shown(tiers_view(used_tiers(2, expected=0.5)))
    assert "expected" not in shown(tiers_view(used_tiers(2, expected=None)))


def profile_of(ranks: int) -> Profile:
    def times(rank: int, stage: str, mean: float) -> StageTimes:
        return StageTimes(
            rank=rank,
            stage=stage,
            steps=10,
            mean_seconds=mean,
            median_seconds=mean,
            p99_seconds=2 * mean,
            longest_seconds=3 * mean,
        )

    stages = [
        times(rank, stage, seconds)
        for rank in range(ranks)
        for stage, seconds in (("forward", 0.001 * (rank + 1)), ("step", 0.02))
    ]
    rates = [HitRate(rank=0, step=step, accesses=10, hit_rate=step / 100) for step in range(1, 41)]
    return Profile(stages=tuple(stages), hit_rates=tuple(rates))


def test_a_profile_shows_all_stages_of_all_ranks_and_the_hit_rate() -> None:
    text = shown(profile_view(profile_of(2)))

    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines()]
    assert ["1", "forward", "10", "2.000", "2.000", "4.000", "6.000", "10.0%"] in rows
    assert ["0", "step", "10", "20.000", "20.000", "40.000", "60.000", "100.0%"] in rows
    assert "hit rate on rank 0: 5.0% to step 5, 10.0% to step 10," in text
    assert "40.0% to step 40" in text


def test_time_after_the_last_step_is_not_step_time() -> None:
    times = {"steps": 1, "mean_seconds": 0.5, "median_seconds": 0.5, "p99_seconds": 0.5, "longest_seconds": 0.5}
    after = StageTimes(rank=0, stage="evaluation at the end", **times)
    whole = profile_of(1)

    for profile in (Profile(stages=(*whole.stages, after)), Profile(stages=(after,))):
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(profile_view(profile)).splitlines()]
        assert ["0", "evaluation at the end", "1", *["500.000"] * 4, "-"] in rows


def test_a_profile_of_many_ranks_shows_the_slowest_of_each_stage() -> None:
    text = shown(profile_view(profile_of(12)))

    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines()]
    assert [row[:2] for row in rows if len(row) > 6 and row[1] == "forward"] == [["11", "forward"]]
    assert "slowest of 12 ranks" in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_figure_is_cut_on_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    many = 123_456_789_012
    table = TableDiff(
        table="users",
        changed=many,
        new=many,
        gone=many,
        change_norm=1.23456e-10,
        largest_change=1.23456e-10,
        norm_before=1.23456e10,
        norm_after=1.23456e10,
    )

    print_view(Group(diff_view([table])))

    printed = Text.from_ansi(capsys.readouterr().out).plain
    cells = [line.split("│")[1:-1] for line in printed.splitlines() if "│" in line]
    figures = ["".join(part.strip() for part in column) for column in zip(*cells, strict=True)]
    assert max(map(len, printed.splitlines())) <= width
    assert figures[:4] == ["users", *["123,456,789,012"] * 3]
    assert "…" not in printed
