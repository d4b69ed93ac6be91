"""``dlrmctl run`` as users run it: a real command in its own folder, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

STEPS = 60
"""Steps of one epoch of the tiny job; the last batch is short."""
BATCH = 64
SAMPLES = BATCH * (STEPS - 1) + 23


@dataclass
class Finished:
    """One command that ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """The one error line."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("dlrmctl: error: ")]
        assert len(lines) == 1, self.stderr
        return lines[0]


@dataclass
class Local:
    """A folder with a manifest, and the command."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def manifest(self) -> Path:
        """The tiny job; ``write`` makes it."""
        return self.folder / "job.yaml"

    @property
    def workdir(self) -> Path:
        """Its work directory."""
        return self.folder / "work"

    @property
    def store(self) -> Path:
        """Folder of its snapshots."""
        return self.folder / "snapshots"

    def write(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """Write the tiny job with some of its sections changed, field by field."""
        spec: dict[str, Any] = {
            "model": {
                "denseFeatures": ["I1", "I2", "I3"],
                "bottomMlp": [8],
                "topMlp": [16, 1],
                "tables": [
                    {"name": "C1", "rows": 300, "dim": 8},
                    {"name": "C2", "rows": 2_000, "dim": 8},
                    {"name": "C3", "rows": 50, "dim": 8},
                ],
            },
            "data": {
                "format": "synthetic",
                "synthetic": {"samples": SAMPLES, "evalSamples": 2_000, "noise": 0.0},
                "epochs": 2,
                "globalBatchSize": BATCH,
                "virtualShards": 8,
            },
            "training": {"seed": 7, "rowOptimizer": {"learningRate": 0.05}, "denseOptimizer": {"learningRate": 0.05}},
            "trainer": {"threadsPerProcess": 1},
            "checkpoint": {"uri": self.store.as_uri(), "intervalSteps": 20, "bits": 32, "retention": {"keepLast": 3}},
            "lifecycle": {"restart": {"backoff": "0s"}, "terminationGracePeriod": "60s"},
        }
        for name, changes in sections.items():
            spec[name] = {**spec[name], **changes}
        document = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "tiny"}, "spec": spec}
        self.manifest.write_text(yaml.safe_dump(document))
        return document

    def start(
        self, *arguments: str, command: str = "run", file_limit_bytes: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start ``dlrmctl run job.yaml -o json`` with more arguments."""
        argv = [sys.executable, "-m", "dlrm_cli.app", command]
        if command == "run":
            argv += [str(self.manifest), "--workdir", str(self.workdir), "-o", "json"]
        if file_limit_bytes is not None:  # what a full disk looks like to a process that writes a large file
            argv = ["prlimit", f"--fsize={file_limit_bytes}", *argv]
        process = subprocess.Popen(
            [*argv, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, timeout_s: float = 240, **options: Any) -> Finished:
        """Run the command to its end."""
        process = self.start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, stdout, stderr)

    def done(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """Run the command to its good end; returns its result."""
        finished = self.run(*arguments, **options)
        assert finished.code == 0, finished.stderr + self.logs()
        return finished.result

    def steps(self) -> list[dict[str, Any]]:
        """Lines of ``progress.jsonl`` that are steps."""
        path = self.workdir / "progress.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = []
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be half written
                lines.append(json.loads(line))
        return [line for line in lines if "loss" in line]

    def logs(self) -> str:
        """The ends of all logs, for the report of a failed test."""
        paths = sorted(self.workdir.glob("logs/*/*.log"))
        return "\n".join(f"--- {path.relative_to(self.workdir)}\n{path.read_text()[-2_000:]}" for path in paths[-6:])

    def last_attempt(self) -> int:
        """Number of the newest attempt that left logs."""
        return max(int(path.name) for path in self.workdir.glob("logs/*"))

    def choices(self, *, after: int) -> list[str]:
        """Kind and reason of each snapshot that attempts above a number chose, as "kind: reason"."""
        folders = [path for path in self.workdir.glob("logs/*") if int(path.name) > after]
        text = "".join(path.read_text() for folder in folders for path in folder.glob("*.log"))
        found = re.findall(r"selected snapshot kind .*?kind=(\S+) reason=\"(.*)\"", text)
        return [f"{kind}: {reason}" for kind, reason in found]

    def manifests(self) -> list[str]:
        """Names of the committed snapshots' manifests."""
        return sorted(path.name for path in (self.store / "manifests").glob("*.json"))


@pytest.fixture(scope="session")
def local_in() -> Callable[[Path], Local]:
    """Makes a folder with the tiny job."""

    def make(folder: Path) -> Local:
        made = Local(folder)
        made.write()
        return made

    return make


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    """A folder with the tiny job; whatever it started and left running is killed."""
    made = Local(tmp_path)
    made.write()
    yield made
    for process in made.started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()
