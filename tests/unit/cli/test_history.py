"""``history.jsonl``: bounded however long a run is, and read past what is damaged."""

from __future__ import annotations

from pathlib import Path

from dlrm_cli.run.history import READING_INTERVAL_S, Ended, Failure, History, Look, Started, read_lines, select_lines


def look(number: int) -> Look:
    return Look(time=float(number), attempt=1, step=number, ranks=2, stages={"forward": 0.5 * number})


def readable(path: Path) -> list[object]:
    return [line for line in read_lines(path) if not isinstance(line, str)]


def test_what_was_noted_is_read_again(tmp_path: Path) -> None:
    lines = [Started(time=1, attempt=1), look(3), Ended(time=9, outcome="failed", words="disk full")]
    history = History(tmp_path / "history.jsonl")

    for line in lines:
        history.add(line)

    assert readable(tmp_path / "history.jsonl") == lines


def test_many_looks_are_thinned_evenly_and_come_half_as_often(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path, max_readings=100)
    history.add(Started(time=0, attempt=1))

    for number in range(1_000):
        history.add(look(number))

    steps = [each.step for each in select_lines(Look, list(read_lines(path)))]
    assert len(steps) <= 100
    assert steps[0] == 0
    assert steps[-1] == 999
    assert history.interval_s > READING_INTERVAL_S
    assert select_lines(Started, list(read_lines(path)))


def test_of_many_failures_the_newest_stay(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path, max_others=20)

    for number in range(500):
        history.add(Failure(time=number, attempt=number, process="trainer-0", code=1, words="", then="gang restarted"))

    attempts = [each.attempt for each in select_lines(Failure, list(read_lines(path)))]
    assert len(attempts) <= 20
    assert attempts == list(range(500 - len(attempts), 500))


def test_a_damaged_line_is_named_and_the_next_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(
        '{"event":"started","time":1,"attempt":1}\n{"event":"lo\n{"event":"started","time":2,"attempt":2}\n'
    )

    lines = list(read_lines(path))

    assert isinstance(lines[1], str)
    assert lines[1].startswith("history.jsonl, line 2: ")
    assert [each.attempt for each in select_lines(Started, lines)] == [1, 2]


def test_the_history_continues_an_earlier_one_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"event":"started","time":1,"attempt":1}\n{"event":"look","tim')

    History(path).add(Started(time=2, attempt=2))

    assert readable(path) == [Started(time=1, attempt=1), Started(time=2, attempt=2)]


def test_a_history_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    history = History(tmp_path / "gone" / "history.jsonl")

    history.add(Started(time=1, attempt=1))

    assert history.problem is not None
