"""Supervising real processes that play the trainer and the checkpointer by a script of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrm_api.errors import BadDataError, DeviceError, DLRMError, NoPermissionError, TemporaryError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import ExitCode
from dlrm_api.progress import CheckpointerProgress
from dlrm_cli.run import appdef, process
from dlrm_cli.run.appdef import PROGRAMS
from dlrm_cli.run.history import Seen
from dlrm_cli.run.supervisor import Stop, Supervisor, stopping_message
from dlrm_cli.run.workdir import WorkDir, locked
from dlrm_testing.waiting import wait_until

pytestmark = pytest.mark.slow

PLAYER = """
import json, os, signal, sys, time
from pathlib import Path

role, scripts = sys.argv[1], json.loads(sys.argv[2])
work, handoff = Path(os.environ["DLRM_WORK_DIR"]), Path(os.environ["DLRM_HANDOFF_DIR"])
replica = os.environ["DLRM_REPLICA"]
turns = work / f"turns-{role}-{replica}"
turn = len(turns.read_text()) if turns.exists() else 0
turns.write_text("x" * (turn + 1))
script = scripts.get(replica, scripts["0"])
steps = script[min(turn, len(script) - 1)].split()
said = Path(os.environ["DLRM_TERMINATION_LOG"])


def end(number, frame):
    if role == "trainer":
        sys.exit(143)
    snapshot = {"step": 7, "bits": 8, "bytes": 1, "uri": "file:///tmp/small/manifests/7-1.json"}
    said.write_text(json.dumps({"committedStep": 7, "lastSnapshot": snapshot, "reason": "trainers ended"}))
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
print("hello from", role, replica, "after", os.environ.get("DLRM_COMMITTED_SNAPSHOT"), flush=True)
for step in steps:
    if step.startswith("exit:"):
        code, _, message = step[5:].partition(":")
        said.write_text(json.dumps({"exitCode": int(code), "reason": "Test", "message": message.replace("_", " ")}))
        sys.exit(int(code))
    if step == "train":
        (work / "progress.jsonl").write_text('{"step": 1}')
    if step == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if step.startswith("sleep:"):
        time.sleep(float(step[6:]))
"""


class Recorder:
    """Remembers what the user was told."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def update(self, seen: Seen) -> None:
        pass

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def job(replicas: int = 1, **restart: Any) -> DLRMJob:
    return parse_job(
        {
            "kind": "DLRMJob",
            "metadata": {"name": "small"},
            "spec": {
                "model": {"tables": [{"name": "C1", "rows": 10, "dim": 4}], "interaction": "dcn"},
                "data": {"format": "synthetic"},
                "trainer": {"replicas": replicas},
                "checkpoint": {"uri": "file:///tmp/small"},
                "lifecycle": {"restart": {"backoff": "0s", **restart}, "terminationGracePeriod": "20s"},
            },
        }
    )


def supervisor(
    root: Path, trainer: dict[str, list[str]], checkpointer: dict[str, list[str]] | None = None, **options: Any
) -> Supervisor:
    root.mkdir(exist_ok=True)
    player = root / "player.py"
    player.write_text(PLAYER)
    scripts = {"trainer": trainer, "checkpointer": checkpointer or {"0": ["sleep:60"]}}
    return Supervisor(
        job=options.pop("job", None) or job(),
        workdir=WorkDir(root),
        display=Recorder(),
        stop=Stop(),
        programs={role: (sys.executable, str(player), role, json.dumps(script)) for role, script in scripts.items()},
        **options,
    )


def said(supervised: Supervisor) -> str:
    assert isinstance(supervised.display, Recorder)
    return "\n".join(supervised.display.sentences)


def turns(root: Path, process: str) -> int:
    path = root / f"turns-{process}"
    return len(path.read_text()) if path.exists() else 0


def test_a_job_whose_processes_succeed_is_done_with_a_log_of_each(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["sleep:0.3 exit:0"]}, job=job(replicas=2))

    outcome = supervised.run()

    assert outcome == "done"
    assert supervised.restarts == 0
    assert supervised.committed_step == 7
    for name in ("trainer-0", "trainer-1", "checkpointer-0", "checkpointer-1"):
        assert (tmp_path / "logs" / "1" / f"{name}.log").read_text().startswith("hello from")
    assert set(json.loads((tmp_path / "ports.json").read_text())["processes"]) == {
        "trainer-0", "trainer-1", "checkpointer-0", "checkpointer-1",
    }  # fmt: skip


def test_a_killed_trainer_starts_the_whole_gang_again(tmp_path: Path) -> None:
    trainers = {"0": ["sleep:30", "sleep:0.2 exit:0"], "1": ["sleep:0.3 kill", "sleep:0.2 exit:0"]}
    supervised = supervisor(tmp_path, trainers, job=job(replicas=2))

    outcome = supervised.run()

    assert outcome == "done"
    assert supervised.restarts == 1
    assert [turns(tmp_path, f"trainer-{i}") for i in range(2)] == [2, 2]
    assert "trainer-1 ended with signal 9" in said(supervised)


def test_a_gang_knows_what_the_attempt_before_committed(tmp_path: Path) -> None:
    """So that it does not start from step 0 if the store was emptied meanwhile."""
    supervised = supervisor(tmp_path, {"0": ["sleep:1 exit:75:try_later", "exit:0"]})

    assert supervised.run() == "done"

    first, second = ((tmp_path / "logs" / str(attempt) / "trainer-0.log").read_text() for attempt in (1, 2))
    assert first.startswith("hello from trainer 0 after None")
    assert second.startswith("hello from trainer 0 after file:///tmp/small/manifests/7-1.json")


def test_a_user_error_ends_the_job_with_the_trainers_message(tmp_path: Path) -> None:
    trainers = {"0": ["exit:75:lost_a_peer"], "1": ["exit:65:a.tsv_line_3:_ragged"]}
    supervised = supervisor(tmp_path, trainers, job=job(replicas=2))

    with pytest.raises(BadDataError) as caught:
        supervised.run()

    assert str(caught.value) == "a.tsv line 3: ragged"
    assert turns(tmp_path, "trainer-1") == 1


@pytest.mark.parametrize("code", [66, 77])
def test_a_missing_file_or_right_is_final_only_before_the_first_step(tmp_path: Path, code: int) -> None:
    never = supervisor(tmp_path / "never", {"0": [f"exit:{code}:role_refused", "exit:0"]})
    later = supervisor(tmp_path / "later", {"0": [f"train exit:{code}:role_refused", "sleep:0.2 exit:0"]})

    with pytest.raises(DLRMError, match="role refused"):
        never.run()
    outcome = later.run()

    assert outcome == "done"
    assert "role refused" in said(later)
    assert turns(tmp_path / "later", "trainer-0") == 2


def test_restarts_end_when_the_budget_is_spent(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["exit:75:try_later"]}, job=job(maxRestarts=2, progressResets=False))

    with pytest.raises(TemporaryError, match="try later"):
        supervised.run()

    assert turns(tmp_path, "trainer-0") == 3
    assert "maxRestarts" in said(supervised)


def test_a_crash_names_the_log(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["kill"]}, job=job(maxRestarts=0))

    with pytest.raises(DLRMError) as caught:
        supervised.run()

    assert caught.value.exit_code == ExitCode.INTERNAL
    assert str(tmp_path / "logs" / "1" / "trainer-0.log") in str(caught.value)


def test_a_sidecar_that_dies_alone_is_restarted(tmp_path: Path) -> None:
    supervised = supervisor(
        tmp_path, {"0": ["sleep:1.5 exit:0"]}, {"0": ["sleep:60"], "1": ["sleep:0.2 kill", "sleep:60"]}, job=job(2)
    )

    outcome = supervised.run()

    assert outcome == "done"
    assert [turns(tmp_path, f"{role}-1") for role in ("trainer", "checkpointer")] == [1, 2]
    assert turns(tmp_path, "checkpointer-0") == 1
    assert supervised.restarts == 0


def test_a_sidecar_that_succeeds_while_its_trainer_runs_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stray SIGTERM before the trainers have started."""
    monkeypatch.setattr(process, "SIDECAR_SETTLE_S", 0.5)
    supervised = supervisor(tmp_path, {"0": ["sleep:3 exit:0"]}, {"0": ["exit:0", "sleep:60"]})

    outcome = supervised.run()

    assert outcome == "done"
    assert turns(tmp_path, "checkpointer-0") == 2
    assert "checkpointer-0 ended with exit code 0" in said(supervised)


def test_a_sidecar_that_succeeds_just_before_its_trainer_is_left_alone(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["sleep:2 exit:0"]}, {"0": ["exit:0"]})

    assert supervised.run() == "done"

    assert turns(tmp_path, "checkpointer-0") == 1


def test_a_sidecar_with_a_user_error_ends_the_job(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["sleep:30 exit:0"]}, {"0": ["exit:77:credentials_refused"]})

    with pytest.raises(NoPermissionError, match="credentials refused"):
        supervised.run()

    assert turns(tmp_path, "trainer-0") <= 1  # it may have ended before its first word


def test_a_final_snapshot_that_is_not_committed_is_a_failed_attempt(tmp_path: Path) -> None:
    supervised = supervisor(
        tmp_path, {"0": ["sleep:0.4 exit:0"]}, {"0": ["deaf sleep:0.8 kill", "sleep:60"]}, job=job(maxRestarts=1)
    )

    outcome = supervised.run()

    assert outcome == "done"
    assert supervised.restarts == 1


def test_a_failed_sidecar_is_the_cause_not_its_waiting_trainer(tmp_path: Path) -> None:
    sidecar = {"0": ["deaf sleep:0.8 exit:74:/s_is_full:_free_some_space"]}
    supervised = supervisor(tmp_path, {"0": ["sleep:0.4 exit:75:not_committed_in_time"]}, sidecar)

    with pytest.raises(DeviceError, match="free some space"):
        supervised.run()

    assert turns(tmp_path, "trainer-0") <= 1  # it may have ended before its first word


def after(seconds: float, act: Any) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_first_signal_lets_the_gang_cut_and_commit(tmp_path: Path, number: int, code: int) -> None:
    supervised = supervisor(tmp_path, {"0": ["sleep:30"]})
    outer = signal.signal(number, signal.default_int_handler)  # whoever runs the tests may have it ignored: nohup does
    restore = supervised.stop.install()
    after(0.7, lambda: os.kill(os.getpid(), number))

    try:
        outcome = supervised.run()
    finally:
        restore()
        signal.signal(number, outer)

    assert outcome == "stopped"
    assert supervised.stop.exit_code == code
    assert supervised.committed_step == 7


def test_a_first_signal_names_the_problem_of_a_failing_store() -> None:
    failing = CheckpointerProgress(committed_step=7, store_error="cannot write 9 bytes to /full: No space left\nmore")

    words = stopping_message(Seen(checkpointer=failing))

    assert words.endswith(": cannot write 9 bytes to /full: No space left")
    assert stopping_message(Seen()) == stopping_message(Seen(checkpointer=CheckpointerProgress()))


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    supervised = supervisor(tmp_path, {"0": ["deaf sleep:30"]}, {"0": ["deaf sleep:30"]})
    restore = supervised.stop.install()
    after(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
    after(1.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    start = time.monotonic()

    try:
        outcome = supervised.run()
    finally:
        restore()

    assert outcome == "stopped"
    assert time.monotonic() - start < 20  # the deaf ones would sleep for 30 s
    assert not [child for child in psutil.Process().children() if "player.py" in " ".join(child.cmdline())]


HOLDER = """
import sys, time
from pathlib import Path
from dlrm_cli.run.workdir import locked
with locked(Path(sys.argv[1]), 1, print, lambda: False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_work_directory_in_use_is_refused_with_the_pid(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()

    with pytest.raises(TemporaryError) as caught, locked(tmp_path, 1, print, lambda: False):
        pytest.fail("a second run got the work directory")

    holder.kill()
    holder.communicate()
    assert f"pid {holder.pid}" in str(caught.value)


def test_the_next_run_waits_for_processes_whose_dlrmctl_was_killed(tmp_path: Path) -> None:
    slow = subprocess.Popen(["flock", "--shared", str(tmp_path / "processes.lock"), "sleep", "1.5"])
    time.sleep(0.3)
    told: list[str] = []
    start = time.monotonic()

    with locked(tmp_path, 10, told.append, lambda: False) as workdir:
        waited_s = time.monotonic() - start

    slow.wait()
    assert workdir.root == tmp_path
    assert waited_s > 0.5
    assert len(told) == 1


RUNNER = """
import json, sys
from pathlib import Path
from dlrm_api.job import parse_job
from dlrm_cli.run.command import RunDisplay
from dlrm_cli.run.supervisor import Stop, Supervisor
from dlrm_cli.run.workdir import WorkDir
job, programs = json.loads(sys.argv[2])
workdir = WorkDir(Path(sys.argv[1]))
with RunDisplay() as display:
    Supervisor(job=parse_job(job), workdir=workdir, display=display, stop=Stop(), programs=programs).run()
"""


def test_killing_dlrmctl_leaves_no_process_behind(tmp_path: Path) -> None:
    plan = supervisor(tmp_path, {"0": ["sleep:60"]})
    described = json.dumps([plan.job.model_dump(mode="json", exclude_none=True), dict(plan.programs)])
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(tmp_path), described])
    wait_until(lambda: turns(tmp_path, "trainer-0") + turns(tmp_path, "checkpointer-0") >= 2)
    time.sleep(0.2)
    pids = [process["pid"] for process in json.loads((tmp_path / "ports.json").read_text())["processes"].values()]

    runner.kill()
    runner.wait()

    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert len(pids) == 2
    assert not alive


def test_the_processes_are_our_own_programs() -> None:
    assert {role: program[1:] for role, program in PROGRAMS.items()} == {
        "trainer": ("-P", "-m", "dlrm_trainer"),
        "checkpointer": ("-P", "-m", "dlrm_checkpointer"),
    }


def test_the_component_describes_a_run_for_torchx() -> None:
    from torchx.specs.finder import get_component

    component = get_component(f"{Path(appdef.__file__)}:job")

    role = component.fn("job.yaml", workdir="w").roles[0]  # type: ignore[operator]
    assert component.validation_errors == []
    assert role.args[-4:] == ["run", "job.yaml", "--workdir", "w"]
