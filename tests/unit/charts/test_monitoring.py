"""What the chart makes for Prometheus and Grafana: whom it scrapes, what it alerts on, what it shows; and helm test."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from hack.generate import metrics

from dlrm_api import names
from dlrm_api.model import MAX_TABLES
from dlrm_api.tiers import TIERS
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import refuse
from dlrm_operator.manifests.objects import labels
from dlrm_testing.charts.chart import CHART, ROOT, Object, helm_run, of_kind, only, render, variant
from dlrm_testing.operator.operator_cluster import OperatorProcess, eventually
from dlrm_trainer.metrics import stages, tiers, unique_tables

NAMESPACE = "dlrm-system"
RULES = CHART / "files" / "monitoring" / "rules.yaml"
RULES_TEST = Path(__file__).with_name("rules_test.yaml")
RUNBOOKS = ROOT / "docs" / "runbooks.md"
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((CHART / "files/monitoring/dashboards").glob("*.json"))]
BUILT_IN = ("process_", "python_")


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own checker."""
    found = shutil.which("promtool")
    if found is None:
        refuse(MissingToolError("the program 'promtool' is not on PATH: install Debian's package prometheus"))
    return found


def checked(*words: str | Path) -> str:
    answer = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def alerts() -> list[Object]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]


def known_names() -> set[str]:
    """Every series that a process has by our pages, and what the rules record."""
    found = {
        rule["record"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    for rows in metrics().values():
        for each in rows:
            found |= {each.name} | {
                f"{each.name}_{end}" for end in ("bucket", "sum", "count") if each.kind == "histogram"
            }
    return found


@pytest.mark.parametrize("process", metrics())
def test_metrics_are_named_by_the_conventions(process: str) -> None:
    for each in metrics()[process]:
        assert re.fullmatch(rf"dlrm_{process}_[a-z0-9_]+", each.name)
        assert (each.kind == "counter") == each.name.endswith("_total")
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|kilobytes|percent)(_|$)", each.name)
        assert each.description.endswith((".", ")."))
        assert each.kind != "histogram" or each.name.endswith("_seconds")


@pytest.mark.slow
def test_rules_are_sound_and_fire_when_they_should(promtool: str) -> None:
    checked(promtool, "check", "rules", RULES)
    checked(promtool, "test", "rules", RULES_TEST)


def panel_query(dashboard: str, title: str) -> str:
    """The first query of a panel, of all namespaces and jobs."""
    [found] = [each for each in DASHBOARDS if each["uid"] == dashboard]
    [panel] = [each for each in found["panels"] if each["title"] == title]
    expr = str(panel["targets"][0]["expr"])
    return (
        expr.replace('="$namespace"', '=~".+"')
        .replace("$namespace", ".*")
        .replace('="$job"', '=~".+"')
        .replace("$__rate_interval", "5m")
    )


def ask_promtool(promtool: str, folder: Path, series: dict[str, str], asked: list[tuple[int, str, Object]]) -> None:
    """Hold what expressions give of recorded series, a value a minute, against what is expected by minute."""
    document = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": expr,
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
                    }
                    for minute, expr, values in asked
                ],
            }
        ],
    }
    (folder / "rules_test.yaml").write_text(yaml.safe_dump(document))
    checked(promtool, "test", "rules", folder / "rules_test.yaml")


@pytest.mark.parametrize("dashboard", ["dlrm-fleet", "dlrm-operator"])
def test_restarts_by_reason_show_the_first_of_a_reason(promtool: str, tmp_path: Path, dashboard: str) -> None:
    """The series of a reason begins with its first restart, which ``increase`` leaves out."""
    name = "dlrm_operator_restarts_total"
    series = {
        f'{name}{{namespace="n", pod="a", reason="NodeLost"}}': "_x30 1x90",
        f'{name}{{namespace="n", pod="a", reason="OOMKilled"}}': "7x50 9x70",
        f'{name}{{namespace="n", pod="gone", reason="OOMKilled"}}': "_x10 2x20 stale",
    }
    expr = f"round({panel_query(dashboard, 'Restarts by reason')})"

    ask_promtool(
        promtool,
        tmp_path,
        series,
        [
            (80, expr, {'{reason="NodeLost"}': 1, '{reason="OOMKilled"}': 2}),
            (119, expr, {'{reason="NodeLost"}': 0, '{reason="OOMKilled"}': 0}),
        ],
    )


def test_the_fleet_shows_the_cost_of_a_failure_of_each_running_job(promtool: str, tmp_path: Path) -> None:
    """Of one that has no snapshot all since it trains; of one that was resumed nothing of the time before."""
    snapshot, running = (f"dlrm_operator_job_{name}_timestamp_seconds" for name in ("last_snapshot", "running"))
    series = {
        f'{running}{{namespace="n", dlrm_job="never"}}': "600x60",
        f'{running}{{namespace="n", dlrm_job="saved"}}': "0x60",
        f'{snapshot}{{namespace="n", dlrm_job="saved"}}': "2400x60",
        f'{running}{{namespace="n", dlrm_job="resumed"}}': "_x40 2700x20",
        f'{snapshot}{{namespace="n", dlrm_job="resumed"}}': "60x60",
        f'{snapshot}{{namespace="n", dlrm_job="finished"}}': "60x60",
    } | {
        f'dlrm_operator_job_snapshot_interval_seconds{{namespace="n", dlrm_job="{job}"}}': "300x60"
        for job in ("never", "saved", "resumed", "finished")
    }
    costs = {
        f'{{namespace="n", dlrm_job="{job}"}}': s for job, s in (("never", 2400), ("saved", 600), ("resumed", 300))
    }

    ask_promtool(
        promtool,
        tmp_path,
        series,
        [
            (50, panel_query("dlrm-fleet", "Oldest snapshot"), {"{}": 2400}),
            (50, panel_query("dlrm-fleet", "Snapshot age"), costs),
            (50, panel_query("dlrm-fleet", "Snapshot age in intervals"), {job: s / 300 for job, s in costs.items()}),
        ],
    )


def test_a_snapshot_is_one_commit_however_many_pods_see_it(promtool: str, tmp_path: Path) -> None:
    name = "dlrm_checkpointer_commits_total"
    series = {
        f'{name}{{namespace="n", dlrm_job="j", pod="j-trainer-1-{pod}", kind="{kind}"}}': values
        for pod in range(4)
        for kind, values in (("full", "0x10"), ("increment", "0+1x10"))
    }

    ask_promtool(
        promtool,
        tmp_path,
        series,
        [(10, panel_query("dlrm-job", "Commits and removals"), {'{kind="full"}': 0, '{kind="increment"}': 5})],
    )


def test_times_of_a_step_are_left_out_while_a_job_evaluates(promtool: str, tmp_path: Path) -> None:
    """No step is done then, and a time divided by none would be infinite."""
    series = {
        'dlrm_trainer_steps_total{namespace="n", dlrm_job="j"}': "0+60x20 1200x20",
        'dlrm_trainer_stage_seconds_total{namespace="n", dlrm_job="j", stage="read"}': "0+30x20 600x20",
        'dlrm_trainer_stage_seconds_total{namespace="n", dlrm_job="j", stage="evaluation"}': "0x20 0+60x20",
    }
    expr = panel_query("dlrm-job", "Step time by stage")

    ask_promtool(
        promtool,
        tmp_path,
        series,
        [(20, expr, {'{stage="read"}': 0.5, '{stage="evaluation"}': 0}), (40, f"({expr}) >= 0", {})],
    )


def test_an_alert_tells_of_a_leader_that_never_ended_a_turn() -> None:
    """Its rate needs the series of turns that are done: a Prometheus client shows none before the first."""
    program = "import dlrm_operator.metrics, prometheus_client; print(prometheus_client.generate_latest().decode())"

    shown = checked(sys.executable, "-c", program)

    assert 'dlrm_operator_reconciles_total{result="done"} 0.0' in shown


def test_each_alert_is_tested_to_fire_and_to_keep_still() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    for alert in alerts():
        name = alert["alert"]
        mine = [each for test in tests if test["name"].split()[0] == name for each in test.get("promql_expr_test", ())]
        fires = [sample["labels"] for each in mine for sample in each["exp_samples"] if name in sample["labels"]]
        series = {
            label
            for test in tests
            if test["name"].split()[0] == name
            for each in test["input_series"]
            for label in re.findall(r'(?:dlrm_job|namespace)="(.+?)"', each["series"])
        }

        assert fires, name
        assert series - {label for one in fires for label in re.findall(r'="(.+?)"', one)}, (
            f"{name}: nobody keeps still"
        )


def test_each_alert_says_what_to_do_in_a_runbook() -> None:
    headings = {
        line.removeprefix("## ").lower() for line in RUNBOOKS.read_text().splitlines() if line.startswith("## ")
    }
    for alert in alerts():
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["alert"].lower() in headings


def test_rules_and_dashboards_ask_for_series_that_exist() -> None:
    texts = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    texts += [target["expr"] for each in DASHBOARDS for panel in each["panels"] for target in panel.get("targets", ())]
    texts += [variable.get("definition", "") for each in DASHBOARDS for variable in each["templating"]["list"]]
    asked = {
        name
        for text in texts
        for name in re.findall(r"\b(?:dlrm|process|python)_[a-z0-9_:]+", re.sub(r'".*?"', "", text))
    }

    assert {name for name in asked if not name.startswith(BUILT_IN)} - known_names() - {"dlrm_job"} == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: str(each["uid"]))
def test_dashboards_are_whole(dashboard: Object) -> None:
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]

    assert dashboard["schemaVersion"] >= 36
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    taken = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken)), "panels overlap"


OF_DATA_SOURCE = {"definition", "step", "titleFormat", "useValueForTime"}
"""Fields of variables and annotations that Prometheus' data source adds to Grafana's schema."""


def lost(ours: object, known: object, place: str = "") -> list[str]:
    """Return the fields of a document that another lacks or changes."""
    if isinstance(ours, dict) and isinstance(known, dict):
        missing = [f"{place}.{name}" for name in ours.keys() - known.keys() - OF_DATA_SOURCE]
        return missing + [
            each for name in ours.keys() & known.keys() for each in lost(ours[name], known[name], f"{place}.{name}")
        ]
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        pairs = enumerate(zip(ours, known, strict=True))
        return [each for number, pair in pairs for each in lost(*pair, f"{place}[{number}]")]
    return [] if ours == known else [place]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: str(each["uid"]))
def test_grafanas_own_schema_has_every_field_of_a_dashboard(dashboard: Object) -> None:
    """The models of Grafana's SDK keep known fields alone: what comes back is what Grafana understands."""
    register_default_plugins()

    known = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))

    assert lost(dashboard, known) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    register_default_plugins()
    wrong = json.loads(json.dumps(DASHBOARDS[0]))
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"

    known = json.loads(json.dumps(Dashboard.from_json(wrong), cls=JSONEncoder))

    assert lost(wrong, known) == [".panels[1].fieldConfig.defaults.units"]


@pytest.mark.cluster
def test_nothing_is_made_for_monitoring_until_it_is_asked_for(helm: Path, tmp_path: Path) -> None:
    kinds = {each["kind"] for each in render(helm, tmp_path, "demo", NAMESPACE)}

    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


@pytest.mark.cluster
def test_monitors_find_the_operator_and_the_pods_that_it_makes(helm: Path, tmp_path: Path) -> None:
    objects = render(helm, tmp_path, "demo", NAMESPACE, variant("monitored"))
    service, of_operator, of_pods = (only(objects, kind) for kind in ("Service", "ServiceMonitor", "PodMonitor"))
    [endpoint] = of_operator["spec"]["endpoints"]
    relabelings = of_pods["spec"]["podMetricsEndpoints"][0]["relabelings"]
    job_label = re.sub(r"[^a-z]", "_", names.Label.JOB)

    assert of_operator["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True
    assert of_pods["spec"]["selector"]["matchLabels"].items() <= labels("job", 1, 0).items()
    assert [each["port"] for each in of_pods["spec"]["podMetricsEndpoints"]] == ["trainer", "checkpointer"]
    assert relabelings[0]["sourceLabels"] == [f"__meta_kubernetes_pod_label_{job_label}"]
    assert relabelings[0]["targetLabel"] == "dlrm_job"
    assert of_pods["spec"]["namespaceSelector"] == {"any": True}
    for each in (of_operator, of_pods, only(objects, "PrometheusRule")):
        assert each["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.cluster
def test_scrapes_are_limited_and_without_limits_where_values_say_so(helm: Path, tmp_path: Path) -> None:
    off = [
        f"monitoring.{part}.{limit}"
        for part in ("operator", "trainers")
        for limit in ("sampleLimit=0", "bodySizeLimit=")
    ]
    limited = render(helm, tmp_path, "demo", NAMESPACE, variant("monitored"))
    free = render(helm, tmp_path, "demo", NAMESPACE, variant("monitored"), *off)

    assert only(limited, "PodMonitor")["spec"]["sampleLimit"] == 100_000
    assert only(limited, "PodMonitor")["spec"]["bodySizeLimit"] == "8MB"
    assert only(limited, "ServiceMonitor")["spec"]["sampleLimit"] == 500_000
    assert only(limited, "ServiceMonitor")["spec"]["bodySizeLimit"] == "64MB"
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert not {"sampleLimit", "bodySizeLimit"} & set(only(free, kind)["spec"])


def test_no_limit_cuts_off_a_pod_with_a_class_per_table() -> None:
    families = [*tiers.TierMetrics.describe(), *unique_tables.UniqueMetrics.describe()]
    of_a_table = sum(each.name.startswith((tiers.TABLE, unique_tables.UNIQUE)) for each in families)
    of_a_rank = len(TIERS) * (len(families) - of_a_table) + stages.WORDS
    limit = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["trainers"]["sampleLimit"]

    assert MAX_TABLES * of_a_table + 64 * of_a_rank < limit


@pytest.mark.cluster
def test_network_policies_let_the_scrapes_through(helm: Path, tmp_path: Path) -> None:
    objects = render(helm, tmp_path, "demo", NAMESPACE, variant("monitored"))
    own, trainers = sorted(of_kind(objects, "NetworkPolicy"), key=lambda each: len(each["metadata"]["name"]))
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]

    def ports(policy: Object) -> set[object]:
        rules = [rule for rule in policy["spec"]["ingress"] if rule.get("from") == prometheus]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert ports(own) == {"metrics"}
    assert ports(trainers) == {names.Port.TRAINER, names.Port.CHECKPOINTER}


@pytest.mark.cluster
def test_the_prometheus_rule_holds_the_rules_with_own_labels_and_runbooks(
    helm: Path, tmp_path: Path, promtool: str
) -> None:
    made = only(render(helm, tmp_path, "demo", NAMESPACE, variant("monitored")), "PrometheusRule")["spec"]
    plain = only(render(helm, tmp_path, "demo", NAMESPACE, "monitoring.rules.enabled=true"), "PrometheusRule")["spec"]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(made))

    assert plain == yaml.safe_load(RULES.read_text())
    checked(promtool, "check", "rules", path)
    fired = [rule for group in made["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["labels"]["team"] for rule in fired} == {"ads"}
    assert all(
        rule["annotations"]["runbook_url"].startswith("https://wiki.example.com/dlrm/runbooks.md#dlrm")
        for rule in fired
    )


@pytest.mark.cluster
def test_dashboards_are_config_maps_that_grafana_s_sidecar_loads(helm: Path, tmp_path: Path) -> None:
    made = of_kind(render(helm, tmp_path, "demo", NAMESPACE, variant("monitored")), "ConfigMap")

    assert [json.loads(text) for each in made for text in each["data"].values()] == DASHBOARDS
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in made} == {"1"}
    assert {each["metadata"]["annotations"]["grafana_folder"] for each in made} == {"dlrm"}


class PodRunner:
    """Runs what the pod of ``helm test`` would, beside the API server, and says so in the pod's status."""

    def __init__(self, control_plane: ControlPlane, namespace: str, ready: str, folder: Path) -> None:
        self._control_plane, self._ready, self._folder = control_plane, ready, folder
        self._pod = f"/api/v1/namespaces/{namespace}/pods/demo-dlrm-operator-test"
        self._token = f"/api/v1/namespaces/{namespace}/serviceaccounts/demo-dlrm-operator-test/token"
        self.said = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        api = self._control_plane.api
        eventually(lambda: api.found(self._pod), 60)
        [container] = api.call("GET", self._pod)["spec"]["containers"]
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        (self._folder / "token").write_text(api.call("POST", self._token, request)["status"]["token"])
        shutil.copyfile(self._control_plane.ca, self._folder / "ca.crt")
        program, flag, code, _, _, _, served = container["command"]
        assert (program, flag) == ("python", "-c")
        words = [sys.executable, "-c", code, self._ready, self._control_plane.server, str(self._folder), served]
        ended = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
        self.said = ended.stdout + ended.stderr
        phase = "Failed" if ended.returncode else "Succeeded"
        api.call("PATCH", f"{self._pod}/status", {"status": {"phase": phase}})


@pytest.mark.cluster
def test_helm_test_asks_operator_and_api_server_with_its_own_rights(
    control_plane: ControlPlane, namespace: str, helm: Path, tmp_path: Path
) -> None:
    words = ("demo", CHART, "--namespace", namespace, "--set", "scope.namespaced=true", "--take-ownership")
    helm_run(helm, tmp_path, "install", *words, "--set", "webhook.enabled=false", kubeconfig=control_plane.kubeconfig)
    eventually(lambda: control_plane.api.found("/apis/dlrm.dev/v1alpha1/dlrmjobs"))
    with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / "operator.log") as operator:
        operator.wait_ready()
        runner = PodRunner(control_plane, namespace, f"http://127.0.0.1:{operator.port}/readyz", tmp_path)

        said = helm_run(helm, tmp_path, "test", "demo", "--namespace", namespace, kubeconfig=control_plane.kubeconfig)
        runner.thread.join()

    assert "Phase:          Succeeded" in said, runner.said
    assert "a job would be taken: helm-test" in runner.said
    assert control_plane.api.call("GET", f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs")["items"] == []
    helm_run(helm, tmp_path, "uninstall", "demo", "--namespace", namespace, kubeconfig=control_plane.kubeconfig)
