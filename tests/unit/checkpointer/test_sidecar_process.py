"""The real process: its start and end, its endpoint, and kill -9 of it and of its trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.names import ExitCode
from dlrm_api.progress import CheckpointerProgress
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.catalog import list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot, open_snapshot
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer import fixtures
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import repeats

KILLS = repeats(5, soak=100)


def job(uri: str, processes: int = 1, **checkpoint: object) -> dict[str, object]:
    return {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"tables": [{"name": "t", "rows": 10, "dim": 4}], "topMlp": [1], "interaction": "dcn"},
            "data": {"format": "synthetic", "globalBatchSize": 64, "synthetic": {"samples": 1_000}},
            "trainer": {"processesPerReplica": processes},
            "checkpoint": {"uri": uri, **checkpoint},
        },
    }


class Started:
    """One sidecar process on ``<root>/pod`` and ``<root>/store``."""

    def __init__(self, root: Path, processes: int = 1, checkpoint: dict[str, object] | None = None, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (root / "job.json").write_text(json.dumps(job(f"file://{root}/store", processes, **(checkpoint or {}))))
        self.log = root / "termination.json"
        settings = {
            "DLRM_HANDOFF_DIR": str(root / "pod"),
            "DLRM_CHECKPOINTER_PORT": str(self.port),
            "DLRM_TERMINATION_LOG": str(self.log),
            "DLRM_GRACE_S": "20",
            **env,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlrm_checkpointer", "--job", str(root / "job.json")],
            env=os.environ | settings,
            stderr=subprocess.PIPE,
            text=True,
        )

    def get(self, path: str) -> str:
        deadline = time.monotonic() + 10
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                    return str(answer.read().decode())
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Started] = []

    def run(**env: Any) -> Started:
        started.append(Started(tmp_path, **env))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.kill()


@pytest.mark.slow
def test_it_commits_answers_and_ends_with_its_trainer(tmp_path: Path, files: FileStore, new_model, new_pod, start):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    sidecar = start()
    pod.cut(model.train())
    committed = pod.writers[0].wait_idle(20)

    progress = CheckpointerProgress.model_validate_json(sidecar.get("/progress"))
    metrics = sidecar.get("/metrics")
    pod.end("done")
    code, errors = sidecar.end()

    assert committed
    assert (progress.committed_step, progress.pending_step) == (1, None)
    assert progress.last_snapshot is not None
    assert progress.last_snapshot.uri == f"file://{tmp_path}/store/manifests/0000000000000001-00000001.json"
    assert "dlrm_checkpointer_committed_step 1.0" in metrics
    assert "dlrm_checkpointer_uploaded_bytes_total" in metrics
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "checkpointer INFO snapshot committed step=1 attempt=1 bytes=" in errors
    left = CheckpointerProgress.model_validate_json(sidecar.log.read_text())
    assert (left.committed_step, left.reason) == (1, "TrainersEnded: rank 0: done")


@pytest.mark.slow
def test_it_publishes_where_the_job_asks_for_it(tmp_path: Path, files: FileStore, new_model, new_pod, start):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    attempt = claim_attempt(files, None, "test")
    sidecar = start(checkpoint={"publish": {"uri": f"file://{tmp_path}/deltas", "bits": 8}})
    for _ in range(2):
        pod.cut(model.train(), attempt)
        assert pod.writers[0].wait_idle(20)
    pod.end("done")
    code, errors = sidecar.end()

    did = Follower(FileStore(tmp_path / "deltas"), tmp_path / "out").catch_up()

    assert code == 0, errors
    assert did[-1].step == 2
    assert "checkpointer INFO delta published" in errors


@pytest.mark.slow
@pytest.mark.parametrize("uri", ["store", "/store//", "%73tore"])
def test_publishing_into_the_snapshot_store_is_refused(tmp_path: Path, start, uri: str):
    code, errors = start(checkpoint={"publish": {"uri": f"file://{tmp_path}/{uri}"}}).end()

    assert code == ExitCode.BAD_CONFIG
    assert "spec.checkpoint" in errors
    assert "publish.uri" in errors


@pytest.mark.slow
def test_a_folder_for_deltas_that_can_be_none_is_named_by_its_own_field(tmp_path: Path, start):
    code, errors = start(checkpoint={"publish": {"uri": f"file://{tmp_path}/deltas?2"}}).end()

    assert code == ExitCode.BAD_CONFIG
    assert "spec.checkpoint.publish.uri" in errors
    assert f"file://{tmp_path}/deltas?2" in errors


@pytest.mark.slow
@pytest.mark.soak
def test_kill_9_of_the_sidecar_at_random_moments_loses_no_cut(
    tmp_path: Path, files: FileStore, new_model, new_pod, start
):
    draw = random.Random(1)
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    attempt = claim_attempt(files, None, "test")
    digests = {}
    sidecar = start()
    for _ in range(KILLS):
        while not pod.writers[0].ready():
            time.sleep(0.001)
        pod.cut(model.train(), attempt)
        digests[model.step] = model.digest()
        time.sleep(draw.uniform(0, 0.9))  # most of it is the new process's start
        sidecar.kill()
        for each in list_snapshots(files):
            verify_snapshot(open_snapshot(files, each.step, each.attempt))
            assert snapshot_digest(open_snapshot(files, each.step, each.attempt)) == digests[each.step]
        sidecar = start()

    pod.end("done")
    sidecar.get("/progress")
    sidecar.process.send_signal(signal.SIGTERM)  # it may have started too late to see the trainer's lock held
    code, errors = sidecar.end()

    assert code == 0, errors
    snapshot, reasons = newest_snapshot(files)
    assert (snapshot.step, reasons) == (KILLS, [])
    assert snapshot_digest(snapshot) == model.digest()
    assert not [path.name for path in pod.folder.iterdir() if path.is_dir() or path.name.startswith("uploaded")]


TRAINER = """
import importlib.util, sys, time
from pathlib import Path
from typing import Any
spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
sys.modules["helpers"] = helpers
spec.loader.exec_module(helpers)
root = Path(sys.argv[2])
model, pod = helpers.Model(), helpers.Pod(root / "pod", None)
while True:
    model.train()
    if pod.writers[0].ready():
        pod.cut(model)
        print(model.step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.3, 0.7])
def test_kill_9_of_the_trainer_commits_its_last_whole_cut(tmp_path: Path, files: FileStore, start, delay, new_model):
    helpers = Path(fixtures.__file__)
    sidecar = start()
    sidecar.get("/progress")
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(helpers), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        said = [int(trainer.stdout.readline())]
        time.sleep(delay)
        trainer.send_signal(signal.SIGKILL)
        said += [int(line) for line in trainer.stdout.read().split()]

    code, errors = sidecar.end()

    assert code == 0, errors
    snapshot, reasons = newest_snapshot(files)
    assert reasons == []
    assert snapshot.step >= max(said)
    assert snapshot_digest(snapshot) == new_model().train(snapshot.step).digest()
    assert not list((tmp_path / "pod").glob("ready-*"))


@pytest.mark.slow
def test_sigterm_without_any_trainer_ends_it_at_once(tmp_path: Path, start):
    sidecar = start(DLRM_GRACE_S="600")
    sidecar.get("/progress")

    sidecar.process.send_signal(signal.SIGTERM)
    code, _ = sidecar.end()  # does not wait for the grace period

    assert code == 0
    assert CheckpointerProgress.model_validate_json(sidecar.log.read_text()).committed_step is None


@pytest.mark.slow
def test_a_burst_of_signals_ends_it_as_one_does(tmp_path: Path, start):
    sidecar = start()
    sidecar.get("/progress")

    for _ in range(200):  # the kernel may repeat a death signal for each thread of a parent that is killed
        sidecar.process.send_signal(signal.SIGTERM)
    code, _ = sidecar.end()

    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "env", "code", "message"),
    [
        ([], {}, ExitCode.USAGE, "--job"),
        (["--job", "nowhere.json"], {}, ExitCode.NO_INPUT, "nowhere.json: the job's file cannot be read"),
        (["--job", "torn.json"], {}, ExitCode.BAD_DATA, "torn.json: neither JSON nor YAML"),
        (["--job", "bad.json"], {}, ExitCode.BAD_CONFIG, "spec.checkpoint"),
        (["--job", "good.json"], {}, ExitCode.USAGE, "DLRM_HANDOFF_DIR is not set"),
        (["--job", "good.json"], {"DLRM_HANDOFF_DIR": "pod", "DLRM_GRACE_S": "soon"}, ExitCode.USAGE, "DLRM_GRACE_S"),
        (["--job", "good.json"], {"DLRM_HANDOFF_DIR": "good.json/x"}, ExitCode.DEVICE, "good.json/x"),
    ],
)
def test_a_bad_start_ends_with_its_code_and_one_line(tmp_path: Path, arguments, env, code: ExitCode, message: str):
    (tmp_path / "torn.json").write_text('{"apiVersion": [')
    (tmp_path / "bad.json").write_text(json.dumps(job("ftp://x")))
    (tmp_path / "good.json").write_text(json.dumps(job(f"file://{tmp_path}/store")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DLRM_")}

    ended = subprocess.run(
        [sys.executable, "-m", "dlrm_checkpointer", *arguments],
        cwd=tmp_path,
        env=clean | {"DLRM_CHECKPOINTER_PORT": port} | env,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
