"""Texts of pods on a person's terminal: they are shown, and steer nothing."""

import io
import os
import pty
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import BadDataError
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo
from dlrm_cli import app
from dlrm_cli.cluster import logs
from dlrm_cli.cluster.describe import page_lines
from dlrm_cli.cluster.get import header, job_facts, job_row, line, print_lines, widths
from dlrm_cli.cluster.logs import PodChoice
from dlrm_cli.cluster.top import Reading, job_lines
from dlrm_cli.run import command
from dlrm_cli.run.history import Seen
from dlrm_cli.views import SafeConsole, print_view, snapshots_view

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202egpj.exe"
SHOWN = r"\x1b]52;c;ZXZpbA=="
NOW = datetime(2026, 1, 1, tzinfo=UTC)
STEERING = ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e")
JOB: dict[str, Any] = {
    "metadata": {"name": "ads", "namespace": "team"},
    "status": {
        "phase": "Failed",
        "conditions": [{"type": "Failed", "status": "True", "reason": "BadData", "message": EVIL}],
        "lastFailure": {"attempt": 1, "pod": "p", "reason": "BadData", "message": EVIL},
    },
}
POD: dict[str, Any] = {"metadata": {"name": "ads-trainer-1-0"}, "status": {"phase": "Failed", "message": EVIL}}


def harmless(text: str) -> bool:
    """Whether the text shows what was said and steers nothing."""
    return SHOWN in text and not any(code in text for code in STEERING)


def test_the_page_of_a_job_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"message": EVIL, "reason": "Failed"}]

    print_lines(page_lines(JOB, NOW, pods=[POD], events=events))

    assert harmless(capsys.readouterr().out)


def test_the_wide_table_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [header(everywhere=False, wide=True), job_row(job_facts(JOB), NOW, everywhere=False, wide=True)]

    print_lines([line(row, widths(rows)) for row in rows])

    assert harmless(capsys.readouterr().out)


def test_the_live_table_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(job_lines(job_facts(JOB), [(POD, Reading(problem=EVIL))], NOW))

    assert harmless(capsys.readouterr().out)


def test_colours_of_our_own_stay() -> None:
    written = io.StringIO()

    SafeConsole(file=written, force_terminal=True, color_system="standard").print(f"[red]{EVIL}[/red]", highlight=False)

    assert "\x1b[31m" in written.getvalue()
    assert harmless(written.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_of_a_run_shows_a_store_s_error_and_is_steered_by_none(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        command, "SafeConsole", lambda stderr: SafeConsole(file=written, force_terminal=terminal, width=300)
    )
    failing = CheckpointerProgress(store_error=f"[/] [red] {EVIL}")

    with command.RunDisplay() as shown:
        shown.update(Seen(Progress(step=1), failing))
        shown.say(f"trainer-0 ended: {EVIL}")

    text = written.getvalue()
    assert "[/] [red] " in text
    assert SHOWN in text
    assert not any(code in text for code in ("\x1b]", "\x07", "\x9b", "\u202e"))


def test_an_error_that_quotes_a_pod_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise BadDataError(EVIL)

    monkeypatch.setattr(app, "app", fail)

    assert app.main([]) == 65
    assert harmless(capsys.readouterr().err)


def test_a_manifest_of_others_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_view(snapshots_view([SnapshotInfo(step=1, kind=EVIL[:32], bits=8, bytes=1, uri=EVIL)]))

    assert harmless(capsys.readouterr().out)


class OneLog:
    """A connection to one pod whose container wrote one line."""

    def job(self, name: str) -> dict[str, Any]:
        return {**JOB, "status": {**JOB["status"], "attempt": 1}}

    def pods(self, name: str) -> list[dict[str, Any]]:
        labels = {"dlrm.dev/job": "ads", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
        return [{**POD, "metadata": {"name": "ads-trainer-1-0", "labels": labels}}]

    def log(self, pod: str, query: dict[str, str]) -> list[bytes]:
        return [EVIL.encode() + b"\n"]


def printed_log() -> None:
    logs.print_logs(OneLog(), "ads", logs.LogOptions(choice=PodChoice(), container="trainer"))  # type: ignore[arg-type]


def test_a_log_steers_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        printed_log()
        terminal.flush()
        shown = os.read(ours, 4_096).decode()
    os.close(ours)

    assert harmless(shown)


def test_a_log_in_a_file_is_what_the_container_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        printed_log()

    assert (tmp_path / "log").read_text() == EVIL + "\n"
