"""Check that random jobs under random faults of API server, nodes, users and operator end as the model allows.

``FAULT_SCHEDULES`` is the number of schedules, ``FAULT_SEED`` the first seed (see ``make faults``).
"""

import asyncio
import math
import os
import random
import secrets
import time
from collections import Counter
from pathlib import Path

import pytest

from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.definitions import install_crds, pod_group_crd
from dlrm_testing.operator.fault_job import MAX_WAIT_S
from dlrm_testing.operator.fault_run import GROUPS, run_jobs
from dlrm_testing.operator.fault_server import WorldError
from dlrm_testing.operator.fault_world import World
from dlrm_testing.operator.job_schedule import Schedule, random_schedule, traits
from dlrm_testing.operator.operator_cluster import OperatorProcess
from dlrm_testing.operator.unruly_proxy import UnrulyProxy, Weather

pytestmark = pytest.mark.cluster

SCHEDULES = int(os.environ.get("FAULT_SCHEDULES", "20"))
FIRST_SEED = int(os.environ.get("FAULT_SEED", "0"))
AT_ONCE = int(os.environ.get("FAULT_AT_ONCE", "25"))
"""Schedules that share the operator at any moment."""
MAX_STEPS = 100
"""Largest number of job changes and new pods between two kills: a slow machine kills less often."""
MAX_UPTIME_S = 60.0
NO_KILL_WAIT_S = MAX_WAIT_S / 2
"""No kill while a job has waited this long: on a slow machine the operator would never make progress."""
MAX_SCHEDULE_S = 4 * MAX_WAIT_S
TIMEOUT_S = MAX_SCHEDULE_S * (1 + math.ceil(SCHEDULES / AT_ONCE))
"""Above the sum of the schedules' own timeouts, so that these fail first."""
CUT_OFF = (
    r"ignore:Exception ignored in. <(function _SelectorTransport|socket\.socket):"
    "pytest.PytestUnraisableExceptionWarning"
)
"""Half-open connections of a killed operator or a closed proxy are expected."""
PROGRESS = 10
"""Schedules between two progress lines."""


async def kill_at_random(operator: OperatorProcess, world: World, dice: random.Random) -> None:
    """Kill the operator at random moments and start it again, also if it ended by itself."""
    while True:
        while not operator.ended and not await asyncio.to_thread(operator.answers, "readyz"):
            # Killing an operator that never became ready would prove nothing.
            await asyncio.sleep(0.2)
        last, deadline = world.steps + dice.randint(0, MAX_STEPS), time.monotonic() + MAX_UPTIME_S
        while not operator.ended:
            over = world.steps >= last or time.monotonic() >= deadline
            if over and world.longest_wait_s() < NO_KILL_WAIT_S:
                break
            await asyncio.sleep(0.02)
        world.trace_all("the operator ended by itself" if operator.ended else "the operator is killed")
        await asyncio.to_thread(operator.kill)
        await asyncio.sleep(dice.choice([0.0, 0.0, 3.0]))
        operator.start()


async def run_schedule(seed: int, world: World, proxy: UnrulyProxy, places: asyncio.Semaphore) -> tuple[Schedule, str]:
    """Run one schedule; return its trace if it failed."""
    schedule = random_schedule(seed)
    async with places:
        namespace = f"life-{seed}-{secrets.token_hex(2)}"
        proxy.weather[namespace] = schedule.weather
        jobs = run_jobs(schedule.scripts, world, namespace, schedule.slow_kubelet_s, lambda: proxy.calm(namespace))
        try:
            await asyncio.wait_for(jobs, MAX_SCHEDULE_S)
        except (WorldError, TimeoutError) as error:
            again = f"make faults SCHEDULES=1 SEED={seed}"
            trace = [f"{schedule}", *world.traces[namespace], f"WRONG: {error}", f"again: {again}"]
            return schedule, "\n".join(trace)
        finally:
            world.forget(namespace)
    return schedule, ""


async def run_schedules(control_plane: ControlPlane, original: Path, folder: Path) -> list[str]:
    world = World(control_plane)
    proxy = UnrulyProxy(control_plane.server, control_plane.ca, on_fault=world.trace)
    seeds = range(FIRST_SEED, FIRST_SEED + SCHEDULES)
    places = asyncio.Semaphore(AT_ONCE)
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    async with proxy.serve(), world.running():
        proxy.weather[""] = Weather(seed=FIRST_SEED, rate=0.05)
        kubeconfig = proxy.kubeconfig(folder, original)
        with OperatorProcess(kubeconfig, None, folder / "operator.log") as operator:
            killer = asyncio.create_task(kill_at_random(operator, world, random.Random(FIRST_SEED)))
            tasks = [asyncio.create_task(run_schedule(seed, world, proxy, places)) for seed in seeds]
            try:
                for number, task in enumerate(asyncio.as_completed(tasks), 1):
                    schedule, trace = await task
                    counts.update(traits(schedule))
                    if trace:
                        wrong.append(trace)
                        print(trace, flush=True)
                    if number % PROGRESS == 0:
                        print(f"{number} of {SCHEDULES} schedules, {len(wrong)} wrong", flush=True)
            finally:
                # First, so that it does not start another operator.
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
                # In a thread: this loop serves the proxy, which must answer the operator's last requests.
                await asyncio.to_thread(operator.stop)
    counts["pods with a restart in place"] = world.restarts_in_place
    print(f"requests and watches: {dict(proxy.faults)}\nschedules: {dict(counts.most_common())}")
    return wrong


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.filterwarnings(CUT_OFF)
def test_every_job_under_faults_ends_as_the_model_allows(
    api_types: ControlPlane, cluster_account: Identity, tmp_path: Path
) -> None:
    install_crds(api_types.api, *map(pod_group_crd, GROUPS))  # no scheduler looks at them here

    wrong = asyncio.run(run_schedules(api_types, cluster_account.kubeconfig, tmp_path))

    assert not wrong, "\n\n".join(wrong)
