"""``dlrmctl describe``: show a job, its pods and its Events on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from rich.text import Text

from dlrm_api.choice import NOT_CALIBRATED
from dlrm_api.errors import NoPermissionError
from dlrm_api.progress import TerminationMessage
from dlrm_cli.cluster.client import JobClient, Object, dig
from dlrm_cli.cluster.get import (
    STYLES,
    JobFacts,
    age,
    condition,
    containers,
    event_time,
    grid,
    job_facts,
    moment,
    one_line,
    parse_number,
    pod_attempt,
    pod_index,
    print_lines,
    time_left,
)
from dlrm_cli.views import UNKNOWN, accuracy_rows, format_bytes

MAX_EVENTS = 20
MAX_PODS = 64
INDENT = "  "
LABEL_WIDTH = 14

Objects = Sequence[Object] | str
"""Objects, or why the user may not read them."""


def page_lines(job: Object, now: datetime, *, pods: Objects = (), events: Objects = ()) -> list[Text]:
    """Return the whole page."""
    facts = job_facts(job)
    lines = [_field(name, words) for name, words in _summary(job, facts, now)]
    if rows := accuracy_rows(facts.accuracy):
        lines += _section("Steps", grid(("FIGURE", "PREDICTED", "MEASURED", "RATIO"), rows, INDENT))
    lines += _section("Conditions", _conditions(job, now))
    lines += _section("Failures", _failures(job, now))
    lines += _section("Pods", _pods(pods, now))
    return lines + _section("Events", _events(events, now))


def _summary(job: Object, facts: JobFacts, now: datetime) -> Iterator[tuple[str, str]]:
    status = job.get("status") or {}
    yield "Name", facts.name
    yield "Namespace", facts.namespace
    yield "Phase", facts.phase
    if facts.reason:
        yield "", one_line(facts.reason)
    if dig(job, "spec", "lifecycle", "suspend"):
        yield "Suspend", "requested; dlrmctl resume continues the job"
    yield "Created", f"{age(facts.created, now)} ago"
    for name, time in (("Started", status.get("startTime")), ("Ended", status.get("completionTime"))):
        if time:
            yield name, f"{age(time, now)} ago"
    in_pods = f", in the pods of attempt {facts.pod_attempt}" if facts.pod_attempt != facts.attempt else ""
    yield "Attempt", f"{facts.attempt or UNKNOWN}{in_pods}"
    yield "Plan", _plan(job)
    if choice := status.get("choice"):
        yield "Choice", _choice(choice)
        for other in choice.get("rejected") or ():
            yield "", f"rejected: {_candidate(other)}: {one_line(other.get('lacks') or '')}"
    yield "Progress", _progress(job, facts)
    yield "Speed", _speed(job, facts)
    if slow := dig(status, "progress", "straggler"):
        yield "Straggler", _straggler(slow)
    for note in dig(status, "progress", "notes") or ():
        yield "Note", one_line(note)
    if reserve := status.get("memoryReserveBytes"):
        yield "Memory", f"each pod keeps {format_bytes(reserve)} more free since one ran out of it"
    if avoided := status.get("avoidedNodes"):
        yield "Avoided", ", ".join(f"{node['name']} for {time_left(node['until'], now)}" for node in avoided)
    if facts.eta:
        yield "ETA", f"in {time_left(facts.eta, now)}, at {_utc(facts.eta)}"
    yield "Snapshot", _snapshot(job, now)
    yield "Restarts", _restarts(job, now)


def _plan(job: Object) -> str:
    plan = dig(job, "status", "plan")
    if not plan:
        return "none"
    sizes = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in sorted((plan.get("bytesPerTier") or {}).items()))
    hardware = f" of {plan['hardware']}" if plan.get("hardware") else ""
    parts = [f"{plan.get('worldSize')} ranks on {plan.get('nodes')} nodes{hardware}"]
    if shards := plan.get("virtualShards"):
        parts.append(f"{shards:,} virtual shards")
    if sizes:
        parts.append(f"largest rank: {sizes}")
    mark = f" ({NOT_CALIBRATED})" if plan.get("uncalibrated") else ""
    if plan.get("predictedSamplesPerSecond"):
        parts.append(f"predicted {plan['predictedSamplesPerSecond']:,.0f} samples/s{mark}")
    if plan.get("pricePerBillionSamples"):
        parts.append(f"{plan['pricePerBillionSamples']:,.2f} per billion samples{mark}")
    return "; ".join(parts)


def _choice(choice: Object) -> str:
    verdict = "meets" if choice.get("met") else "comes closest to"
    kept = ", hardware kept from the attempt before" if choice.get("kept") else ""
    lacks = f": {one_line(choice['lacks'])}" if choice.get("lacks") else ""
    return f"{_candidate(choice)} {verdict} {one_line(choice.get('objective') or '')}{lacks}{kept}"


def _candidate(found: Object) -> str:
    """Return a number of replicas of some hardware, with its figures."""
    hardware = f" of {found['hardware']}" if found.get("hardware") else ""
    mark = f" ({NOT_CALIBRATED})" if found.get("uncalibrated") else ""
    figures = (
        ("samplesPerSecond", f"{{:,.0f}} samples/s{mark}"),
        ("pricePerHour", "{:,.2f} per hour"),
        ("pricePerBillionSamples", f"{{:,.2f}} per billion samples{mark}"),
    )
    known = [text.format(found[key]) for key, text in figures if found.get(key) is not None]
    return f"{found.get('replicas')} replicas{hardware}" + (f" ({', '.join(known)})" if known else "")


def _progress(job: Object, facts: JobFacts) -> str:
    if facts.step is None:
        return "none"
    progress = dig(job, "status", "progress") or {}
    done = f"step {facts.step:,}"
    if facts.total_steps:
        done += f" of {facts.total_steps:,} ({facts.step / facts.total_steps:.1%})"
    parts = [done, f"epoch {progress.get('epoch') or 0}", f"{progress.get('samples') or 0:,} samples"]
    for name, key in (("loss", "loss"), ("NE", "ne"), ("AUC", "auc")):
        if progress.get(key) is not None:
            parts.append(f"{name} {progress[key]:.5f}")
    return ", ".join(parts)


def _speed(job: Object, facts: JobFacts) -> str:
    if facts.samples_per_second is None:
        return UNKNOWN
    parts = [f"{facts.samples_per_second:,.0f} samples/s"]
    if facts.step_seconds is not None:
        parts.append(f"{facts.step_seconds * 1_000:,.1f} ms per step")
    if predicted := dig(job, "status", "plan", "predictedSamplesPerSecond"):
        mark = f" ({NOT_CALIBRATED})" if dig(job, "status", "plan", "uncalibrated") else ""
        parts.append(f"{facts.samples_per_second / predicted:.0%} of the predicted speed{mark}")
    return ", ".join(parts)


def _straggler(slow: Object) -> str:
    own, others = (slow.get(key) or 0.0 for key in ("seconds", "medianSeconds"))
    where = f"rank {slow.get('rank')} in pod {slow.get('pod')} on node {slow.get('node') or UNKNOWN}"
    return f"{where} slows down the others: {own * 1_000:,.1f} ms per step, median {others * 1_000:,.1f} ms"


def _snapshot(job: Object, now: datetime) -> str:
    found = dig(job, "status", "lastSnapshot")
    if not found:
        return "none"
    what = f"{found.get('kind')}, {found.get('bits')} bits, {format_bytes(found.get('bytes') or 0)}, {found.get('uri')}"
    return f"step {found.get('step') or 0:,}, {age(found.get('time'), now)} ago: {what}"


def _restarts(job: Object, now: datetime) -> str:
    status = job.get("status") or {}
    count, reasons = status.get("restarts") or 0, status.get("restartsByReason") or {}
    words = str(count)
    if reasons:
        words += f" ({', '.join(f'{reason} {n}' for reason, n in sorted(reasons.items(), key=lambda kv: -kv[1]))})"
    limit = dig(job, "spec", "lifecycle", "restart", "maxRestarts")
    if limit is not None:
        words += f"; {status.get('chargedRestarts') or 0} of {limit} charged to the restart budget"
    then = moment(status.get("restartNotBefore"))
    if then is not None and then > now:
        words += f"; next attempt in {time_left(status['restartNotBefore'], now)}"
    return words


def _conditions(job: Object, now: datetime) -> list[Text]:
    rows = []
    for each in dig(job, "status", "conditions") or ():
        state = (str(each.get(key)) for key in ("type", "status", "reason"))
        rows.append((*state, age(each.get("lastTransitionTime"), now), one_line(each.get("message") or "")))
    return grid(("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), rows, INDENT)


def _failures(job: Object, now: datetime) -> list[Text]:
    """Return the evidence of the last failures, newest first."""
    status = job.get("status") or {}
    rows = []
    for each in filter(None, (status.get("lastFailure"), *(status.get("earlierFailures") or ()))):
        pod, node, reason = (each.get(key) or UNKNOWN for key in ("pod", "node", "reason"))
        rank, code = (UNKNOWN if each.get(key) is None else str(each[key]) for key in ("rank", "exitCode"))
        message = one_line(each.get("message") or "")
        rows.append((str(each.get("attempt")), age(each.get("time"), now), pod, rank, node, code, reason, message))
    return grid(("ATTEMPT", "AGE", "POD", "RANK", "NODE", "CODE", "REASON", "MESSAGE"), rows, INDENT)


def _pods(pods: Objects, now: datetime) -> list[Text]:
    if isinstance(pods, str):
        return [Text(f"{INDENT}not available: {pods}")]
    ordered = sorted(pods, key=lambda pod: (-pod_attempt(pod), pod_index(pod)))
    rows = [
        (*pod_state(pod), age(dig(pod, "metadata", "creationTimestamp"), now), waits_for(pod) or UNKNOWN)
        for pod in ordered[:MAX_PODS]
    ]
    lines = grid(("POD", "NODE", "PHASE", "READY", "AGE", "WAITING FOR"), rows, INDENT)
    if len(ordered) > MAX_PODS:
        lines.append(Text(f"{INDENT}and {len(ordered) - MAX_PODS} more"))
    return lines


def _events(events: Objects, now: datetime) -> list[Text]:
    if isinstance(events, str):
        return [Text(f"{INDENT}not available: {events}")]

    def order(event: Object) -> tuple[str, int]:
        """Order by time, which is in whole seconds, then by resource version."""
        return event_time(event) or "", parse_number(dig(event, "metadata", "resourceVersion"))

    rows = []
    for event in sorted(events, key=order)[-MAX_EVENTS:]:
        kind, reason = (str(event.get(key) or "") for key in ("type", "reason"))
        message = one_line(event.get("message") or "")
        rows.append((age(event_time(event), now), kind, reason, str(event.get("count") or 1), message))
    return grid(("AGE", "TYPE", "REASON", "COUNT", "MESSAGE"), rows, INDENT)


def _section(title: str, lines: Sequence[Text]) -> list[Text]:
    """Return a title and its lines, or ``none`` next to the title."""
    return [Text(""), Text(f"{title}:"), *lines] if lines else [Text(""), _field(title, "none")]


def _field(name: str, words: str) -> Text:
    text = Text(f"{name}:".ljust(LABEL_WIDTH) if name else " " * LABEL_WIDTH)
    return text.append(words, STYLES.get(words, ""))


def _utc(text: str) -> str:
    found = moment(text)
    return found.strftime("%Y-%m-%d %H:%M UTC") if found else text


def describe_job(client: JobClient, name: str) -> None:
    """Print the job's page; what the user may not read is named in its place."""
    job = client.job(name)
    pods, events = _allowed(lambda: client.pods(name)), _allowed(lambda: client.events(name))
    print_lines(page_lines(job, datetime.now(UTC), pods=pods, events=events))


def _allowed(look: Callable[[], list[Object]]) -> Objects:
    try:
        return look()
    except NoPermissionError as error:
        return str(error)


def pod_state(pod: Object) -> tuple[str, ...]:
    """Return the pod's name, node, phase as kubectl shows it, and ready containers, sidecars included."""
    spec = pod.get("spec") or {}
    sidecars = (each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always")
    names = {each["name"] for each in (*(spec.get("containers") or ()), *sidecars)}
    ready = sum(bool(each.get("ready")) for each in containers(pod) if each.get("name") in names)
    name, node = str(dig(pod, "metadata", "name")), str(spec.get("nodeName") or UNKNOWN)
    phase = str(dig(pod, "status", "reason") or dig(pod, "status", "phase") or "Pending")
    is_ending = bool(dig(pod, "metadata", "deletionTimestamp"))
    return name, node, "Terminating" if is_ending else phase, f"{ready}/{len(names)}"


def waits_for(pod: Object) -> str:
    """Return why the pod does not train, or an empty text if it runs."""
    return one_line(_disrupted(pod) or _unscheduled(pod) or _unstarted(pod) or _ended(pod))


def _disrupted(pod: Object) -> str:
    found = condition(pod, "DisruptionTarget")
    if found.get("status") != "True":
        return ""
    return f"disruption: {found.get('reason') or 'disrupted'}: {found.get('message') or ''}".rstrip(": ")


def _unscheduled(pod: Object) -> str:
    if dig(pod, "spec", "nodeName") or dig(pod, "status", "phase") not in (None, "Pending"):
        return ""
    gates = ", ".join(str(gate.get("name")) for gate in dig(pod, "spec", "schedulingGates") or ())
    if gates:
        return f"a node: held by scheduling gate {gates}"
    words = condition(pod, "PodScheduled").get("message")
    who = dig(pod, "spec", "schedulerName")
    return f"a node: {words or f'no status from scheduler {who} yet'}"


def _unstarted(pod: Object) -> str:
    if dig(pod, "status", "phase") != "Pending" or not dig(pod, "spec", "nodeName"):
        return ""
    for each in containers(pod):
        state = dig(each, "state", "waiting")
        if state and state.get("reason") != "PodInitializing":
            return f"{each.get('name')}: {state.get('reason')}: {state.get('message') or ''}".rstrip(": ")
    return "its kubelet to start it"


def _ended(pod: Object) -> str:
    """Return how its first container that failed ended."""
    for each in reversed(containers(pod)):
        ended = dig(each, "state", "terminated")
        if ended and ended.get("exitCode"):
            left = TerminationMessage.decode(ended.get("message") or "")
            words = f"{left.reason}: {left.message}" if left else f"{ended.get('reason')}: {ended.get('message') or ''}"
            return f"{each.get('name')} ended with exit code {ended['exitCode']}: {words}".rstrip(": ")
    return str(dig(pod, "status", "message") or "") if dig(pod, "status", "phase") == "Failed" else ""
