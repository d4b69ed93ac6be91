"""Files that rank 0 and the ranks leave for people and audits: ``progress.jsonl``, ``result.json``, the ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.progress import EvalMetrics, Progress
from dlrm_api.run_report import Profile

PROGRESS_FILE = "progress.jsonl"
RESULT_FILE = "result.json"
PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.json"


class StepJournal:
    """``progress.jsonl``: one JSON object a line. Lines after the restored step, and a torn last one, are dropped."""

    def __init__(self, folder: Path, restored_step: int) -> None:
        path = folder / PROGRESS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT_FILE, PROFILE_FILE, TRACE_FILE):  # of an earlier end: nobody may take them for this one's
            (folder / name).unlink(missing_ok=True)
        draft = path.with_suffix(".draft")
        with draft.open("w") as kept:  # one by one: a long run has millions
            kept.writelines(json.dumps(line) + "\n" for line in _lines(path) if line.get("step", 0) <= restored_step)
        draft.replace(path)
        self._file = path.open("a", buffering=1)

    def stepped(self, now: Progress) -> None:
        """Append a line about a step, which readers see at once."""
        line = {"step": now.step, "loss": now.loss, "samples_per_s": now.samples_per_second}
        self._write(line | {"samples": now.samples, "epoch": now.epoch, "time": now.time})

    def evaluated(self, step: int, quality: EvalMetrics) -> None:
        """Append a line about an evaluation after a step."""
        self._write({"step": step, "eval": quality.model_dump(by_alias=False)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` whole or not at all."""
    _replace(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def write_profile(folder: Path, profile: Profile) -> None:
    """Write ``profile.json`` whole or not at all."""
    _replace(folder / PROFILE_FILE, profile.model_dump_json(indent=1, by_alias=False) + "\n")


def write_trace_part(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    """Write one rank's events of a Chrome trace."""
    _replace(folder / f"trace-{rank}.json", json.dumps(events) + "\n")


def join_trace(folder: Path, world_size: int) -> None:
    """Make ``trace.json`` of the ranks' parts that are in this folder: all ranks' that write to the same one."""
    parts = [path for rank in range(world_size) if (path := folder / f"trace-{rank}.json").exists()]
    events = [event for path in parts for event in json.loads(path.read_text())]
    _replace(folder / TRACE_FILE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    for path in parts:
        path.unlink()


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


class Ledger:
    """``rank-<r>.bin``: for each step int64 numbers: step, count, then the ids of the samples trained on.

    Records after the restored step, and a torn last one, are dropped at the start: what is left is what the final
    parameters were made from.
    """

    def __init__(self, folder: Path, rank: int, restored_step: int, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"rank-{rank}.bin"
        own.touch()
        for path in folder.glob("rank-*.bin"):
            number = int(path.stem.removeprefix("rank-"))
            if number % world_size == rank:  # its own, and in turn those of ranks that a larger gang had
                os.truncate(path, 8 * _kept(np.fromfile(path, "<i8"), restored_step))
        self._file = own.open("ab", buffering=0)

    def write(self, step: int, sample_ids: NDArray[np.int64]) -> None:
        """Append one record; ``step`` counts the steps done once this one is."""
        self._file.write(np.concatenate(([step, len(sample_ids)], sample_ids)).astype("<i8").tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _kept(numbers: NDArray[np.int64], restored_step: int) -> int:
    """How many numbers belong to whole records of steps up to ``restored_step``."""
    position = 0
    while position + 2 <= len(numbers):
        end = position + 2 + int(numbers[position + 1])
        if end > len(numbers) or numbers[position] > restored_step:
            break
        position = end
    return position


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(errors="replace") as texts:
        for text in texts:
            try:
                value = json.loads(text)
            except ValueError:
                continue  # torn by a crash
            if isinstance(value, dict):
                yield value
