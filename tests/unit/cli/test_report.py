"""``dlrmctl report``: what is read, and what the page says of it."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_api.names import ExitCode
from dlrm_api.progress import EvalMetrics, MeasuredSteps, Progress
from dlrm_api.run_report import MaintenanceTimes, UniqueUse
from dlrm_cli import app
from dlrm_cli.report import collect
from dlrm_cli.report.collect import Record, Steps, cluster_record, read_work_folder, sum_steps, throughput
from dlrm_cli.report.page import render_comparison, render_page, sections
from dlrm_cli.report.plots import Plot, Series, Unit, draw
from dlrm_cli.report.sections import Table, stall_s
from dlrm_cli.run.history import Ended, Look

Kept = Callable[..., Path]


def text_of(record: Record) -> str:
    return render_page(record, "made now")


def cells(record: Record, section: str, title: str) -> list[Sequence[str]]:
    parts = next(each for each in sections(record) if each.title == section).parts
    return [
        list(row) for part in parts if isinstance(part, Table) and part.title.startswith(title) for row in part.rows
    ]


def step(number: int, time: float, loss: float = 0.5) -> Steps:
    return Steps(last=number, time=time, count=1, loss_sum=loss, samples=100 * number)


# what is read


def test_a_finished_run_is_sum_steps_from_what_it_kept(kept_run: Kept) -> None:
    record = read_work_folder(kept_run())

    assert (record.name, record.state, record.step, record.restarts) == ("kept", "done", 400, 1)
    assert record.ne == 0.86
    assert [each.step for each in record.snapshots] == [120, 240, 400]
    assert not record.notes


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (None, "interrupted"),
        (Ended(time=1, outcome="stopped"), "stopped"),
        (Ended(time=1, outcome="failed", words="row 7 has 3 fields"), "failed"),
    ],
)
def test_how_a_run_ended_is_said(kept_run: Kept, ending: Ended | None, state: str) -> None:
    record = read_work_folder(kept_run(ending=ending))

    assert record.state == state
    assert (ending.words if ending else "to resume") in record.words


def test_a_run_in_progress_is_shown_as_such(kept_run: Kept) -> None:
    folder = kept_run(ending=None)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        record = read_work_folder(folder)

    assert record.state == "running"


def test_damaged_lines_are_named_and_skipped(kept_run: Kept) -> None:
    folder = kept_run()
    with (folder / "progress.jsonl").open("a") as progress, (folder / "history.jsonl").open("a") as history:
        progress.write("[1, 2]\n")
        history.write("\x00garbage\n")

    record = read_work_folder(folder)

    assert any(note.startswith("progress.jsonl, line 405: ") for note in record.notes)
    assert any(re.match(r"history.jsonl, line \d+: ", note) for note in record.notes)
    assert record.step == 400


ABSURD = ("1" + "0" * 400, "1" + "0" * 5_000, "-1", "1e300", "1e999", "NaN", "Infinity", "null", '"x"', "[" * 9_000)
STEP = '{"step": 401, "loss": 0.5, "samples_per_s": 1.0, "samples": 40100, "epoch": 0, "time": 1}'
LOOK = '{"event": "look", "time": 1, "attempt": 1, "step": 401, "accesses": 1, "tiers": {"scm": {"read_rows": 1}}}'


def absurd_lines(line: str, fields: Sequence[str]) -> str:
    """Return the line with each field set to each absurd figure in turn."""
    changed = [re.sub(f'"{field}": [0-9]+', f'"{field}": {value}', line) for field in fields for value in ABSURD]
    return "\n".join(changed) + "\n"


def test_steps_with_an_absurd_figure_are_left_out_and_the_page_is_made(
    kept_run: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MAX_NAMED", 100)
    folder = kept_run()
    fields = ("step", "samples", "time")
    with (folder / "progress.jsonl").open("a") as progress:
        progress.write(absurd_lines(STEP, fields))

    record = read_work_folder(folder)

    bad = {int(line) for note in record.notes for line in re.findall(r"^progress.jsonl, line (\d+): ", note)}
    assert bad == set(range(405, 405 + len(fields) * len(ABSURD)))
    assert "made now" in text_of(record)


def test_lines_of_history_with_an_absurd_figure_leave_the_page_whole(kept_run: Kept) -> None:
    folder = kept_run()
    with (folder / "history.jsonl").open("a") as history:
        history.write(absurd_lines(LOOK, ["step", "time", "accesses", "read_rows"]))

    assert "made now" in text_of(read_work_folder(folder))


@pytest.mark.slow
@pytest.mark.parametrize("value", ABSURD)
def test_a_result_with_an_absurd_figure_leaves_the_page_whole(kept_run: Kept, value: str) -> None:
    folder = kept_run()
    for name in ("result.json", "final.json", "profile.json"):
        path = folder / name
        if path.is_file():
            path.write_text(re.sub(r'("(?:step|samples|accesses|bytes)": ?)[0-9]+', rf"\g<1>{value}", path.read_text()))

    assert "made now" in text_of(read_work_folder(folder))


def test_a_line_without_end_is_read_in_pieces(kept_run: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_LINE", 1_000)
    folder = kept_run()
    with (folder / "progress.jsonl").open("a") as progress:
        progress.write("x" * 3_500 + "\n")

    record = read_work_folder(folder)

    assert record.step == 400
    assert record.notes


def test_a_half_written_last_line_is_not_damage(kept_run: Kept) -> None:
    folder = kept_run()
    with (folder / "progress.jsonl").open("a") as progress:
        progress.write('{"step": 401, "lo')

    assert not read_work_folder(folder).notes


def test_a_run_without_history_says_what_lacks(kept_run: Kept) -> None:
    folder = kept_run()
    (folder / "history.jsonl").unlink()

    record = read_work_folder(folder)

    assert [note.split(":")[0] for note in record.notes] == ["history.jsonl not found"]
    assert "Times of stages were not recorded" in text_of(record)


def test_a_folder_that_is_not_a_work_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match="gone"):
        read_work_folder(tmp_path / "gone")
    with pytest.raises(NoInputError, match=r"job\.json"):
        read_work_folder(tmp_path)


def test_a_job_that_cannot_be_read_is_refused_by_name(kept_run: Kept) -> None:
    folder = kept_run()
    (folder / "job.json").write_text("{")

    with pytest.raises(BadDataError, match=r"job\.json"):
        read_work_folder(folder)


# what is made of it


def test_steps_of_any_number_are_sum_steps_without_losing_one() -> None:
    spans = sum_steps((step(number, float(number), loss=float(number)) for number in range(1, 10_001)), max_spans=50)

    assert len(spans) <= 50
    assert sum(span.count for span in spans) == 10_000
    assert math.isclose(sum(span.loss_sum for span in spans), 10_000 * 10_001 / 2)
    assert spans[-1].last == 10_000
    assert all(before.last < span.loss <= span.last for before, span in pairwise(spans))


def test_throughput_is_that_of_time_pauses_included() -> None:
    steps = [step(number, time) for number, time in ((1, 0.0), (2, 1.0), (3, 5.0), (4, 6.0))]

    (run,) = throughput(steps, [], max_points=100)

    assert run == [(1.0, 100.0), (5.0, 25.0), (6.0, 100.0)]


def test_the_stall_of_a_snapshot_is_the_time_of_cuts_around_its_step(kept_run: Kept) -> None:
    record = read_work_folder(kept_run())

    stall = stall_s(record.snapshots[1], record.looks)

    assert stall == pytest.approx(40 * 0.001)  # looks are 20 steps apart, and its step is that of one


def test_repeated_steps_after_a_restart_count_in_the_step_time(kept_run: Kept) -> None:
    record = read_work_folder(kept_run())

    rows = {row[0]: row for row in cells(record, "Time of a step", "Mean over all ranks")}

    assert rows["forward"][1] == "15.000"
    assert "460 steps" in text_of(record)


def test_stages_whose_times_cancel_out_have_no_shares(kept_run: Kept) -> None:
    """A damaged history may hold a negative time."""
    looks = [Look(time=at, attempt=1, step=at, ranks=1, stages={"cut": -at, "forward": at}) for at in (0, 10)]
    record = replace(read_work_folder(kept_run()), looks=looks)

    (row,) = cells(record, "Time of a step", "Mean over all ranks")

    assert row == ["forward", "1,000.000", "-"]


def test_the_plan_is_shown_next_to_measured_values(kept_run: Kept) -> None:
    rows = {row[0]: row for row in cells(read_work_folder(kept_run()), "Plan against measured", "")}

    assert rows["samples/s"][1] == "18,000"
    assert rows["hit rate of C1"][1:] == ["95.0%", "92.5%", "97.4%"]
    assert rows["bytes of tables with levels in block"][3] == "83.3%"


def test_unique_tables_have_a_section_where_there_are_any(kept_run: Kept) -> None:
    record = read_work_folder(kept_run())
    figures = {"capacity_rows": 1_000, "fullest_bucket_ratio": 1, "directory_bytes": 1, "admitted_rows": 2_000}
    use = UniqueUse(table="C1", rows=930, lookups=5_000, lookups_without_row=100, evicted_rows=1_070, **figures)
    times = MaintenanceTimes(rank=0, longest_seconds=0.02, last_seconds=0.01)
    looks = [
        Look(time=at, attempt=1, step=at, unique_rows=at, unique_capacity_rows=100, unique_lookups=at)
        for at in (10, 20)
    ]

    with_unique = replace(record, unique_tables=[use], maintenance=[times], looks=looks)

    assert "Unique tables" not in text_of(record)
    assert cells(with_unique, "Unique tables", "") == [
        ["C1", "930", "1,000", "93.0%", "5,000", "2.0%", "2,000", "1,070"]
    ]
    [section] = [each for each in sections(with_unique) if each.title == "Unique tables"]
    runs = [series.runs for part in section.parts if isinstance(part, Plot) for series in part.series]
    assert runs == [[[(10, 0.1), (20, 0.2)]], [[(20, 0)]]]


def test_failures_show_their_evidence(kept_run: Kept) -> None:
    (row,) = cells(read_work_folder(kept_run()), "Restarts", "Failures")

    assert row[2:] == [
        "trainer-0",
        "137",
        "trainer-0 ended with signal 9 (killed, perhaps for memory)",
        "gang restarted",
    ]


def test_a_cluster_job_shows_its_status_and_says_what_lacks() -> None:
    failure = {"attempt": 1, "pod": "ads-trainer-1-0", "node": "n1", "exitCode": 137, "reason": "OOMKilled"}
    job = {
        "metadata": {"name": "ads", "namespace": "ml"},
        "status": {
            "phase": "Running",
            "attempt": 2,
            "restarts": 1,
            "restartsByReason": {"OOMKilled": 1},
            "startTime": "2026-11-22T08:00:00Z",
            "plan": {
                "worldSize": 4,
                "nodes": 2,
                "bytesPerTier": {"ddr": 2_000_000},
                "predictedSamplesPerSecond": 40_000,
            },
            "progress": {"step": 900, "samplesPerSecond": 35_000.0, "ne": 0.81},
            "accuracy": {"predicted": {"stepSeconds": 0.01}, "measured": {"stepSeconds": 0.011}},
            "lastFailure": failure,
            "lastSnapshot": {"step": 800, "time": "2026-11-22T09:00:00Z", "kind": "full", "bits": 8, "bytes": 5_000},
        },
    }
    events = [{"reason": "AttemptFailed", "message": "attempt 1", "lastTimestamp": "2026-11-22T08:30:00Z", "count": 2}]
    quality = EvalMetrics(log_loss=0.47, ne=0.8, auc=0.76)
    steps = MeasuredSteps(trained_seconds=60, step_seconds=0.012, samples_per_second=38_000, hit_rates={"ddr": 0.9})
    progress = Progress(
        step=1_000, samples=4_000, loss=0.5, samples_per_second=36_000, evaluation=quality, measured=steps
    )
    looks = [Look(time=9, attempt=2, step=at, ranks=4, stages={"forward": at * 0.04}) for at in (0, 1_000)]

    live = cluster_record(job, events, progress, looks, ["no history"])
    told = cluster_record(job, events, None, [], ["the pods could not be asked"])

    assert (live.step, live.ne, told.step, told.ne) == (1_000, 0.8, 900, 0.81)
    assert cells(live, "Restarts", "Failures")[0][2:5] == ["ads-trainer-1-0 on n1", "137", "OOMKilled"]
    assert cells(live, "Restarts", "Events")[0] == ["2026-11-22 08:30:00 UTC", "AttemptFailed", "attempt 1 (2 times)"]
    assert cells(live, "Time of a step", "Mean")[0] == ["forward", "10.000", "100.0%"]
    assert cells(live, "Plan against measured", "")[:4] == [
        ["samples/s", "40,000", "36,000", "90.0%"],
        ["step (ms)", "10.000", "12.000", "120.0%"],
        ["samples/s without pauses", "-", "38,000", "-"],
        ["accesses served by ddr", "-", "90.0%", "-"],
    ]
    assert cells(told, "Plan against measured", "")[1] == ["step (ms)", "10.000", "11.000", "110.0%"]
    assert "the pods could not be asked" in text_of(told)


# its form


class Tags(HTMLParser):
    """Every tag's attributes; fails on a tag that is closed and not open."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing_outside_of_it(kept_run: Kept) -> None:
    text = text_of(read_work_folder(kept_run()))
    tags = Tags()

    tags.feed(text)

    assert tags.open == []
    assert not [each for each in tags.attributes if each[1] in ("src", "href", "srcset") and each[2] != "data:,"]
    assert not re.search(r"url\((?!#)|@import|<script", text)


def test_words_of_others_are_shown_and_never_read_as_markup(kept_run: Kept) -> None:
    words = '<script>alert("x")</script>'

    text = text_of(read_work_folder(kept_run(ending=Ended(time=1, outcome="failed", words=words))))

    assert "<script" not in text
    assert "&lt;script&gt;" in text


def drawn(points: list[tuple[float, float]], unit: Unit) -> str:
    series = [Series(name="s", runs=[points])]
    return draw(Plot(title="t", words="w", x_name="x", x_unit="count", y_name="y", y_unit=unit, series=series), "p")


@pytest.mark.parametrize("values", [[5.0], [0.0], [-1.0, -1.0], [1e-12, 2e-12], [1e17, 1e17 + 64]])
def test_any_values_can_be_drawn(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]

    text = drawn(points, "number")

    assert "nan" not in text
    assert "p-series-0" in text


def test_a_share_is_drawn_on_a_scale_that_ends_at_the_whole() -> None:
    text = drawn([(0.0, 1.0)], "share")

    assert re.search(r">100(\.0)?%<", text)
    assert not re.search(r">1[1-9]0%<", text)


# the command


def test_the_command_writes_the_file_and_says_which(
    kept_run: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.html"

    first = app.main(["report", str(kept_run()), "--output", str(output)])
    again = app.main(["report", str(tmp_path / "work"), "--output", str(output)])

    assert (first, again) == (ExitCode.DONE, ExitCode.DONE)
    assert capsys.readouterr().out == f"{output}\n" * 2
    assert output.read_text().startswith("<!doctype html>")


def test_the_command_does_not_overwrite_a_foreign_file(
    kept_run: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("mine")

    code = app.main(["report", str(kept_run()), "-o", str(mine)])

    assert code == ExitCode.USAGE
    assert "thesis.html" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_the_command_writes_to_no_pipe(kept_run: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    code = app.main(["report", str(kept_run()), "-o", str(pipe)])

    assert code == ExitCode.USAGE
    assert str(pipe) in capsys.readouterr().err


def test_the_command_says_what_it_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["report", str(tmp_path / "gone"), "-o", str(tmp_path / "report.html")])

    assert code == ExitCode.NO_INPUT
    assert "gone" in capsys.readouterr().err


def test_runs_are_compared_by_results_and_by_settings_that_differ(kept_run: Kept) -> None:
    first = read_work_folder(kept_run())
    second = replace(first, ne=0.5, settings={**first.settings, "training.seed": "7"})

    page = render_comparison([first, second], "made now")

    assert "kept (1) against kept (2)" in page
    assert "training.seed" in page
    assert "model.interaction" not in page
    assert "0.86000" in page
    assert "0.50000" in page


def test_a_page_shows_the_settings_of_its_run(kept_run: Kept) -> None:
    folder = kept_run()
    (folder / "environment.json").write_text('{"torch": "2.12.0", "processor": "x86_64, 2 CPUs"}')

    shown = cells(read_work_folder(folder), "Settings, versions and machine", "")

    assert ["model.interaction", "dcn"] in shown
    assert ["processor", "x86_64, 2 CPUs"] in shown
