"""Commands on a cluster's jobs against a scripted API server: what a real one shows only with real pods."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from dlrm_api.errors import DLRMError
from dlrm_api.names import ExitCode
from dlrm_api.progress import Progress, TrainerPhase
from dlrm_cli import app
from dlrm_cli.cluster import client, get, lifecycle, top
from dlrm_cli.counters import PodFigures, pod_figures, rates

Object = dict[str, Any]
JOBS = "/apis/dlrm.dev/v1alpha1/namespaces/ml/dlrmjobs"


class ScriptedApi(ThreadingHTTPServer):
    """Answers by path: an object, text, or an HTTP status with words; what it does not know is not found."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.answers: dict[str, Object | str | tuple[int, str]] = {}
        self.scripts: dict[str, list[Object | str | tuple[int, str]]] = {}
        """Answers to lists and watches of jobs, one after the other."""
        self.patches: list[Object] = []
        self.on_patch: Callable[[], None] = lambda: None
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class ScriptedHandler(BaseHTTPRequestHandler):
    server: ScriptedApi

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        path = asked.path
        script = self.server.scripts.get("watch" if "watch=true" in asked.query else "list", [])
        found = (
            script.pop(0)
            if script and path == JOBS
            else self.server.answers.get(path, (404, "the server could not find the requested resource"))
        )
        code, body = 200, found
        if isinstance(found, tuple):
            code, body = found[0], {"kind": "Status", "message": found[1]}
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PATCH(self) -> None:
        self.server.patches.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.on_patch()
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi() as server:
        yield server
        server.shutdown()


@pytest.fixture
def kubeconfig(api: ScriptedApi, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    server = {"server": f"http://127.0.0.1:{api.server_address[1]}"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(json.dumps(config))
    return path


def job(phase: str = "Running", *, suspend: bool = False, generation: int = 2, **status: Any) -> Object:
    return {
        "metadata": {"name": "ads", "namespace": "ml", "generation": generation, "uid": "u", "resourceVersion": "1"},
        "spec": {"data": {"globalBatchSize": 100}, "lifecycle": {"suspend": suspend}},
        "status": {
            "phase": phase,
            "observedGeneration": 2,
            "attempt": 1,
            "progress": {"step": 10, "totalSteps": 50, "samplesPerSecond": 5.0, "loss": 0.7},
            "plan": {"nodes": 2},
            **status,
        },
    }


def listed(*items: Object) -> Object:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def pod(index: int) -> Object:
    labels = {"dlrm.dev/attempt": "1", "dlrm.dev/index": str(index)}
    seen = {"name": "trainer", "ready": True, "state": {"running": {}}}
    return {
        "metadata": {"name": f"ads-trainer-1-{index}", "labels": labels},
        "spec": {"nodeName": f"n{index}", "containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "containerStatuses": [seen]},
    }


def metrics(step: int, hits: float, accesses: float) -> str:
    """As a trainer with tables over DDR and SCM exposes them."""
    registry = CollectorRegistry()
    Counter("dlrm_trainer_steps", "s", registry=registry).inc(step)
    Gauge("dlrm_trainer_samples_per_second", "s", registry=registry).set(2_000)
    Gauge("dlrm_trainer_loss_nats", "s", registry=registry).set(0.5)
    labels = ["rank", "table"]
    found_hits = Counter("dlrm_trainer_table_hits", "s", labels, registry=registry)
    asked = Counter("dlrm_trainer_table_accesses", "s", labels, registry=registry)
    below = Counter("dlrm_trainer_tier_read_rows", "s", ["rank", "tier"], registry=registry)
    stage = Counter("dlrm_trainer_stage_seconds", "s", ["rank", "stage"], registry=registry)
    rows, most = (
        Gauge(f"dlrm_trainer_unique_{each}", "s", labels, registry=registry) for each in ("rows", "capacity_rows")
    )
    looked_up = Counter("dlrm_trainer_unique_lookups", "s", labels, registry=registry)
    absent = Counter("dlrm_trainer_unique_lookups_without_row", "s", [*labels, "reason"], registry=registry)
    kept, full = (
        Gauge(f"dlrm_trainer_sized_{each}_bytes", "s", ["rank", "dim"], registry=registry) for each in ("kept", "full")
    )
    for rank in ("0", "1"):
        kept.labels(rank, "64").set(350)
        full.labels(rank, "64").set(1_000)
        found_hits.labels(rank, "a").inc(hits / 2)
        asked.labels(rank, "a").inc(accesses / 2)
        below.labels(rank, "scm").inc((accesses - hits) / 2)
        stage.labels(rank, "forward").inc(step * 3)
        stage.labels(rank, "agreement").inc(step)
        rows.labels(rank, "a").set(45)
        most.labels(rank, "a").set(50)
        looked_up.labels(rank, "a").inc(accesses)
        absent.labels(rank, "a", "full").inc(accesses - hits)
    return generate_latest(registry).decode()


def proxy(index: int) -> str:
    return f"/api/v1/namespaces/ml/pods/ads-trainer-1-{index}:9400/proxy/metrics"


def run(kubeconfig: Path, *arguments: str) -> int:
    return app.main([*arguments, "--kubeconfig", str(kubeconfig)])


def event(kind: str, found: Object) -> str:
    return json.dumps({"type": kind, "object": found}) + "\n"


def version(number: int, phase: str) -> Object:
    found = job(phase)
    return {**found, "metadata": {**found["metadata"], "resourceVersion": str(number)}}


@pytest.mark.parametrize("more", [[], ["-w"]])
def test_names_with_a_selector_are_refused_before_any_request(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    code = run(kubeconfig, "get", "ads", "-l", "team=ads", *more)

    assert code == ExitCode.USAGE
    assert "--selector" in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_in_a_pod_the_users_own_kubeconfig_goes_before_the_pods_account(
    api: ScriptedApi,
    kubeconfig: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    there: bool,
) -> None:
    api.answers[JOBS] = listed(job())
    own = tmp_path / ".kube" / "config"
    if there:
        own.parent.mkdir()
        kubeconfig.rename(own)
    for name, value in {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBECONFIG", raising=False)

    code = app.main(["get"])

    said = capsys.readouterr()
    assert code == (ExitCode.DONE if there else ExitCode.NO_INPUT)
    assert ("ads" in said.out) == there
    assert ("the pod's service account" in said.err) != there


def test_a_broken_or_expired_watch_restarts_and_shows_each_change_once(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning, restoring, trains = version(1, "Planning"), version(2, "Restoring"), version(3, "Running")
    too_old = {"kind": "Status", "code": 410, "message": "too old resource version: 1 (7)"}
    half_read = {"metadata": {"resourceVersion": "2", "continue": "more"}, "items": [restoring]}
    api.scripts["list"] = [listed(planning), listed(restoring), half_read, (410, "expired"), listed(trains)]
    api.scripts["watch"] = [event("MODIFIED", restoring) + event("ERROR", too_old), event("MODIFIED", trains)[:40], ""]
    waits = iter([None, None, None])

    def wait(_: float) -> None:
        if next(waits, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(get.time, "sleep", wait)

    code = run(kubeconfig, "get", "-w")

    printed = capsys.readouterr()
    assert code == 130
    assert [line.split()[1] for line in printed.out.splitlines()] == ["PHASE", "Planning", "Restoring", "Running"]
    assert api.scripts == {"list": [], "watch": []}


def test_a_first_list_that_expires_while_it_is_read_is_reported(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.scripts["list"] = [{"metadata": {"resourceVersion": "2", "continue": "more"}, "items": []}, (410, "expired")]

    code = run(kubeconfig, "get")

    assert code == ExitCode.TEMPORARY
    assert "list of jobs" in capsys.readouterr().err


def test_figures_are_summed_over_a_pods_ranks() -> None:
    found = pod_figures(metrics(step=7, hits=90, accesses=100))

    assert (found.step, found.samples_per_second, found.loss, found.ne) == (7, 2_000, 0.5, None)
    assert (found.hits, found.accesses) == (90, 100)
    assert {tier: counts.read_rows for tier, counts in found.tiers.items()} == {"scm": 10}


def test_rates_are_those_between_two_looks() -> None:
    before = pod_figures(metrics(step=10, hits=0, accesses=100))
    now = pod_figures(metrics(step=20, hits=90, accesses=200))

    found = rates(now, before)

    assert (found.hit_rate, found.tier_shares) == (0.9, {"scm": 0.1})
    assert (found.stage, found.stage_share) == ("forward", 0.75)


def test_rates_after_a_restart_are_those_of_the_new_process() -> None:
    before = pod_figures(metrics(step=900, hits=1, accesses=1_000))

    assert rates(pod_figures(metrics(step=20, hits=90, accesses=100)), before).hit_rate == 0.9


def test_a_pod_without_levels_has_no_hit_rate() -> None:
    assert rates(PodFigures(step=3), None).hit_rate is None


def test_top_shows_what_pods_say_now(api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers[JOBS] = listed(job())
    api.answers[proxy(0)] = metrics(step=20, hits=90, accesses=100)

    code = run(kubeconfig, "top", "--once")

    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert code == ExitCode.DONE
    assert header[:4] == ["NAME", "PHASE", "STEP", "SAMPLES/S"]
    assert row[:10] == ["ads", "Running", "20/50", "2,000", "50.0ms", "0.50000", "-", "0", "-", "-"]
    # Hits, rows of tiers below, rows of unique tables in use, lookups without a row.
    assert row[10:] == ["90.0%", "scm", "10.0%", "90.0%", "10.0%", "35.0%"]


def test_top_of_a_job_shows_its_pods_and_why_one_is_silent(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers[f"{JOBS}/ads"] = job()
    api.answers["/api/v1/namespaces/ml/pods"] = listed(pod(1), pod(0))
    api.answers[proxy(0)] = metrics(step=20, hits=90, accesses=100)
    api.answers[proxy(1)] = (403, 'User "u" cannot get resource "pods/proxy"')

    code = run(kubeconfig, "top", "ads", "--once")

    text = capsys.readouterr().out
    assert code == ExitCode.DONE
    assert (
        "ads-trainer-1-0   n0     Running   1/1     20     90.0%   scm 10.0%   90.0%    10.0%    35.0%   forward 75%"
        in text
    )
    assert "ads-trainer-1-1   n1     Running   1/1     -      -       -           -        -        -" in text
    assert 'ads-trainer-1-1: metrics unavailable: permission denied: User "u" cannot get' in text


EVIL = (
    "dlrm_trainer_steps_total +Inf\n",
    "<html>",
    "dlrm_trainer_loss_nats NaN\n" + "x" * client.MAX_RESPONSE_BYTES,
    'dlrm_trainer_steps_total 1\ndlrm_trainer_stage_seconds_total{rank="0",stage="\x1b]52;c;x\x07"} 5\n',
)


@pytest.mark.parametrize("evil", EVIL)
def test_a_pod_that_answers_anything_spoils_no_other_row_of_top(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], evil: str
) -> None:
    api.answers[f"{JOBS}/ads"] = job()
    api.answers["/api/v1/namespaces/ml/pods"] = listed(pod(1), pod(0))
    api.answers[proxy(0)] = metrics(step=20, hits=90, accesses=100)
    api.answers[proxy(1)] = evil

    code = run(kubeconfig, "top", "ads", "--once")

    text = capsys.readouterr().out
    assert code == ExitCode.DONE
    assert "ads-trainer-1-0   n0     Running   1/1     20     90.0%   scm 10.0%" in text
    assert "ads-trainer-1-1: metrics unavailable: " in text or "\\x1b]52;c;x 100%" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("evil", EVIL[:3])
def test_a_report_leaves_out_the_counters_of_a_pod_that_answers_anything(
    api: ScriptedApi, kubeconfig: Path, tmp_path: Path, evil: str
) -> None:
    api.answers[f"{JOBS}/ads"] = job()
    api.answers["/api/v1/namespaces/ml/pods"] = listed(pod(1), pod(0))
    api.answers["/api/v1/namespaces/ml/events"] = listed()
    api.answers[proxy(0).replace("metrics", "progress")] = Progress(
        step=20, phase=TrainerPhase.TRAINING
    ).model_dump_json()
    api.answers[proxy(0)] = metrics(step=20, hits=90, accesses=100)
    api.answers[proxy(1)] = evil

    code = run(kubeconfig, "report", "ads", "-o", str(tmp_path / "report.html"))

    text = (tmp_path / "report.html").read_text()
    assert code == ExitCode.DONE
    assert "pod ads-trainer-1-1" in text
    assert "90.0%" in text


def test_top_falls_back_on_the_status(api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers[JOBS] = listed(job())
    api.answers[proxy(0)] = (503, "no endpoints available")

    run(kubeconfig, "top", "--once")

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["ads", "Running", "10/50", "5", "20,000.0ms", "0.70000"]
    assert "metrics unavailable" in lines[3]
    assert "no endpoints available" in lines[3]


def test_what_is_interrupted_as_it_must_be_says_nothing(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers[JOBS] = listed(job())
    api.answers[proxy(0)] = metrics(step=20, hits=90, accesses=100)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupt)

    code = run(kubeconfig, "top")

    printed = capsys.readouterr()
    assert code == 130
    assert printed.err == ""
    assert "ads" in printed.out


def test_suspend_waits_until_the_job_holds_its_step(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "POLL_INTERVAL_S", 0.01)
    api.answers[f"{JOBS}/ads"] = job()
    waits = {
        "type": "Suspended",
        "status": "False",
        "reason": "Checkpointing",
        "message": "the cut of step 12 is committed",
    }
    on_the_way = job("Suspending", suspend=True, conditions=[waits])
    held = job("Suspended", suspend=True, lastSnapshot={"step": 1_200})
    script = iter([job("Suspended", suspend=True, generation=3), on_the_way])

    def next_answer() -> None:
        api.answers[f"{JOBS}/ads"] = next(script, held)

    api.on_patch = next_answer
    monkeypatch.setattr(lifecycle.time, "sleep", lambda _: next_answer())

    code = run(kubeconfig, "suspend", "ads", "--wait")

    printed = capsys.readouterr()
    assert code == ExitCode.DONE
    assert api.patches == [{"spec": {"lifecycle": {"suspend": True}}}]
    assert printed.out == "ads is Suspended at step 1,200\n"
    assert "ads is Suspending: the cut of step 12 is committed" in printed.err


@pytest.mark.slow
def test_a_wait_that_takes_too_long_says_how_far_it_came(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers[f"{JOBS}/ads"] = job("Restoring")

    code = run(kubeconfig, "resume", "ads", "--wait", "--timeout", "1s")

    assert code == ExitCode.TEMPORARY
    assert "after 1 s: ads is Restoring" in capsys.readouterr().err


def test_ctrl_c_while_waiting_leaves_the_wish_and_says_so(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers[f"{JOBS}/ads"] = job("Running", suspend=True)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle.time, "sleep", interrupt)

    code = run(kubeconfig, "suspend", "ads", "--wait")

    assert code == 130
    assert "the request to suspend ads stays" in capsys.readouterr().err


def test_a_finished_job_is_not_suspended(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.answers[f"{JOBS}/ads"] = job("Succeeded")

    code = run(kubeconfig, "suspend", "ads")

    assert code == ExitCode.USAGE
    assert api.patches == []
    assert "ads: it has Succeeded" in capsys.readouterr().err


def test_a_failed_job_is_not_suspended(api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.answers[f"{JOBS}/ads"] = job("Failed")

    code = run(kubeconfig, "suspend", "ads")

    assert code == ExitCode.USAGE
    assert api.patches == []
    assert "ads: it has Failed" in capsys.readouterr().err


def test_a_failed_job_rests_until_the_operator_saw_it_then_starts_again(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen, seen = job("Failed", suspend=True, generation=3), job("Failed", suspend=True)
    wished: list[tuple[bool, bool]] = []

    def on_patch() -> None:
        wanted = api.patches[-1]["spec"]["lifecycle"]["suspend"]
        wished.append((wanted, api.answers[f"{JOBS}/ads"] is seen))
        api.answers[f"{JOBS}/ads"] = unseen if wanted else job("Restarting", generation=4)

    api.answers[f"{JOBS}/ads"] = job("Failed")
    api.on_patch = on_patch
    monkeypatch.setattr(lifecycle.time, "sleep", lambda _: api.answers.update({f"{JOBS}/ads": seen}))

    code = run(kubeconfig, "resume", "ads")

    assert code == ExitCode.DONE
    assert wished == [(True, False), (False, True)]
    assert capsys.readouterr().out == "ads is being resumed\n"


def test_a_failed_job_that_no_operator_sees_stays_at_rest(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(lifecycle, "ACKNOWLEDGE_TIMEOUT_S", 0.05)
    api.answers[f"{JOBS}/ads"] = job("Failed", suspend=True, generation=3)

    code = run(kubeconfig, "resume", "ads")

    assert code == ExitCode.TEMPORARY
    assert api.patches == [{"spec": {"lifecycle": {"suspend": True}}}]
    assert "after 0.05 s: ads has Failed" in capsys.readouterr().err


def test_a_look_at_a_resting_job_that_fails_is_made_again(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(503, "the server is going down"), job("Failed", suspend=True)])
    api.answers[f"{JOBS}/ads"] = job("Failed", suspend=True, generation=3)
    monkeypatch.setattr(lifecycle.time, "sleep", lambda _: api.answers.update({f"{JOBS}/ads": next(answers)}))

    code = run(kubeconfig, "resume", "ads")

    assert code == ExitCode.DONE
    assert [patch["spec"]["lifecycle"]["suspend"] for patch in api.patches] == [True, False]
    assert "the server is going down" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (job("Failed", conditions=[{"type": "Failed", "status": "True", "message": "no budget"}]), "Failed: no budget"),
        (job("Suspended", suspend=True), "was suspended by someone else"),
    ],
)
def test_a_resume_that_never_comes_true_ends(seen: Object, words: str) -> None:
    with pytest.raises(DLRMError, match=words):
        lifecycle.resume_progress(seen)


def test_a_cluster_without_the_operator_is_reported_with_how_to_install_it(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(kubeconfig, "get")

    assert code == ExitCode.NO_INPUT
    said = capsys.readouterr().err
    assert "helm install dlrm-operator charts/dlrm-operator" in said


def test_a_context_that_is_not_there_is_named(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(kubeconfig, "get", "--context", "prod")

    assert code == ExitCode.NO_INPUT
    assert "prod" in capsys.readouterr().err


def test_a_missing_kubeconfig_is_reported_with_the_searched_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))

    code = app.main(["get"])

    assert code == ExitCode.NO_INPUT
    assert f"kubeconfig {tmp_path / 'none'}: " in capsys.readouterr().err


def test_output_on_a_pipe_has_no_colours(
    api: ScriptedApi, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created = datetime.now(UTC).isoformat()
    shown = job("Failed")
    shown["metadata"]["creationTimestamp"] = created
    api.answers[JOBS] = listed(shown)

    run(kubeconfig, "get")

    assert "\x1b" not in capsys.readouterr().out
