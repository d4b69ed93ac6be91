from __future__ import annotations

import functools
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.errors import TemporaryError
from dlrm_api.names import ANY_ADDRESS, TOKEN_HEADER, token_digest
from dlrm_api.progress import EvalMetrics, Progress, TrainerPhase
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_trainer import endpoint as endpoint_module
from dlrm_trainer.checkpointing.control import Agreement, CutControl
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.endpoint import Endpoint, RankStacks
from dlrm_trainer.metrics.progress import ProgressBoard, Schedule

SCHEDULE = Schedule(num_samples=1_000, batch_size=100, batches_per_epoch=10, total_steps=20)


def agree(control: CutControl, loss: float, step: int) -> Agreement:
    return control.agreed(loss, control.votes(step))


class Idle:
    """A hand-off that is always free."""

    def ready(self) -> bool:
        return True


@dataclass
class Served:
    """An endpoint and what it shows."""

    endpoint: Endpoint
    board: ProgressBoard
    control: CutControl

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, host: str = LOOPBACK
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(host, self.endpoint.port, timeout=10)
        connection.request(
            method, path, body=b'{"reason": "test"}' if method == "POST" else None, headers=headers or {}
        )
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body


@functools.cache  # to the end of the process, whose signal handler has the file
def own_stacks() -> RankStacks:
    stacks = RankStacks([0])
    stacks.answer(0)
    return stacks


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(endpoint_module, "CUT_WAIT_S", 0.5)
    collectives = Collectives(0, 1, lambda: "")
    board = ProgressBoard(attempt=4, world_size=2)
    control = CutControl(CheckpointSpec(uri="file:///nowhere", interval_steps=1_000), collectives)
    control.attach(Idle())  # type: ignore[arg-type]
    board.begin(3, 3, SCHEDULE)
    endpoint = Endpoint(LOOPBACK, free_port(), board, control, token_digest("secret"), (), own_stacks().dump)
    yield Served(endpoint, board, control)
    endpoint.close()


def test_progress_is_the_newest_step(served: Served) -> None:
    served.board.stepped(12, 0.25, SCHEDULE)

    status, body = served.ask("GET", "/progress")

    progress = Progress.model_validate_json(body)
    assert status == 200
    assert (progress.attempt, progress.step, progress.samples, progress.epoch) == (4, 12, 1_200, 1)
    assert (progress.restored_step, progress.total_steps, progress.loss) == (3, 20, 0.25)
    assert progress.samples_per_second is not None
    assert progress.eta_seconds is not None


def test_a_shortened_job_has_no_more_steps_done_than_in_total() -> None:
    board = ProgressBoard(attempt=4, world_size=2)

    board.begin(25, 25, SCHEDULE)

    assert (board.now.step, board.now.total_steps, board.now.samples) == (25, 25, 2_500)


def test_metrics_are_in_prometheus_form_with_our_names(served: Served) -> None:
    served.board.stepped(12, 0.25, SCHEDULE)
    served.board.evaluated(EvalMetrics(step=12, samples=9, log_loss=0.4, ne=0.8, auc=0.7, calibration=1.1))
    served.control.withdrawn()
    served.control.waited_s += 1.5

    _, body = served.ask("GET", "/metrics")

    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert all(name.startswith("dlrm_trainer_") for name in samples)
    assert samples["dlrm_trainer_steps_total"] == 12
    assert samples["dlrm_trainer_cuts_abandoned_total"] == 1
    assert samples["dlrm_trainer_cut_wait_seconds_total"] == 1.5
    assert samples["dlrm_trainer_loss_nats"] == 0.25
    assert samples["dlrm_trainer_eval_auc_ratio"] == 0.7


def test_metrics_say_which_form_they_have(served: Served) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, served.endpoint.port, timeout=10)
    connection.request("GET", "/metrics")

    assert connection.getresponse().headers["Content-Type"] == CONTENT_TYPE_LATEST
    connection.close()


@pytest.mark.parametrize("phase", [TrainerPhase.STARTING, TrainerPhase.RESTORING])
def test_steps_and_samples_have_no_series_before_their_first_value(served: Served, phase: TrainerPhase) -> None:
    """A rate from 0 to the restored step would count all earlier attempts."""
    served.board.phase(phase)

    _, before = served.ask("GET", "/metrics")
    served.board.begin(3, 3, SCHEDULE)
    _, after = served.ask("GET", "/metrics")

    assert b"dlrm_trainer_world_size_ranks 2.0" in before
    assert b"dlrm_trainer_steps_total" not in before
    assert b"dlrm_trainer_samples_total" not in before
    assert b"dlrm_trainer_steps_total 3.0" in after
    assert b"dlrm_trainer_samples_total 300.0" in after


def test_stacks_show_what_the_threads_are_doing(served: Served) -> None:
    status, body = served.ask("GET", "/stacks")

    assert status == 200
    assert b"test_stacks_show_what_the_threads_are_doing" in body


@pytest.mark.parametrize("token", [None, "guess"])
def test_a_cut_needs_the_token(served: Served, token: str | None) -> None:
    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: token} if token else {})

    assert status == 403
    assert TOKEN_HEADER in json.loads(body)["error"]
    assert not agree(served.control, 0.1, 4).cut


def test_without_a_digest_nobody_may_ask_for_a_cut(served: Served) -> None:
    served.endpoint.token_sha256 = None

    answers = [served.ask("POST", "/cut", {TOKEN_HEADER: token}) for token in ("", "secret", "None")]

    assert [status for status, _ in answers] == [403, 403, 403]
    assert not agree(served.control, 0.1, 4).cut


def test_the_digest_itself_is_no_token(served: Served) -> None:
    status, _ = served.ask("POST", "/cut", {TOKEN_HEADER: token_digest("secret")})

    assert status == 403


def test_a_cut_is_answered_with_its_step_once_it_is_handed_over(served: Served) -> None:
    def train() -> None:
        while not agree(served.control, 0.1, 4).cut:
            time.sleep(0.01)
        served.control.made(4)

    trainer = threading.Thread(target=train)
    trainer.start()

    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: "secret"})
    trainer.join()

    assert (status, json.loads(body)) == (200, {"step": 4})


def test_a_slow_cut_is_answered_with_its_first_possible_step(served: Served) -> None:
    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: "secret"})

    assert (status, json.loads(body)) == (202, {"step": 4})
    assert agree(served.control, 0.1, 4).cut


def test_asking_again_for_a_step_that_was_cut_makes_no_second_cut(served: Served) -> None:
    served.control.made(3)

    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: "secret"})

    assert (status, json.loads(body)) == (200, {"step": 3})
    assert not agree(served.control, 0.1, 4).cut


def test_at_the_end_the_final_cut_answers_a_request(served: Served) -> None:
    served.board.stepped(20, 0.1, SCHEDULE)
    served.board.phase(TrainerPhase.FINISHING)

    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: "secret"})

    assert (status, json.loads(body)) == (202, {"step": 20})


def test_without_snapshots_a_cut_is_refused(served: Served) -> None:
    served.control.attach(None)

    status, body = served.ask("POST", "/cut", {TOKEN_HEADER: "secret"})

    assert status == 409
    assert "no checkpoints" in json.loads(body)["error"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/progress"), ("GET", "/cut")])
def test_other_paths_are_not_found(served: Served, method: str, path: str) -> None:
    status, _ = served.ask(method, path)

    assert status == 404


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_a_pod_is_asked_at_an_address_of_either_family(served: Served) -> None:
    endpoint = Endpoint(ANY_ADDRESS, free_port(), served.board, served.control, None, (), bytes)
    everywhere = Served(endpoint, served.board, served.control)

    answers = [everywhere.ask("GET", "/progress", host=host)[0] for host in (LOOPBACK, "::1")]
    endpoint.close()

    assert answers == [200, 200]


def test_a_port_that_is_taken_is_named(served: Served) -> None:
    with pytest.raises(TemporaryError, match=str(served.endpoint.port)):
        Endpoint(LOOPBACK, served.endpoint.port, served.board, served.control, None, (), bytes)


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_no_traceback(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        with socket.create_connection((LOOPBACK, served.endpoint.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not a clean end
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")

    status, _ = served.ask("GET", "/progress")

    assert status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_bug_in_an_answer_keeps_its_traceback(
    served: Served, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.endpoint, "stacks", lambda: 1 / 0)

    with pytest.raises(http.client.HTTPException):
        served.ask("GET", "/stacks")

    assert "ZeroDivisionError" in capfd.readouterr().err
