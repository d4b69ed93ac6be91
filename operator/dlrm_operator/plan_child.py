"""``python -m dlrm_operator.plan_child``: one plan, from JSON on standard input to JSON on standard output."""

from __future__ import annotations

import json
import math
import signal
import sys

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_operator.tier_volumes import check_mounts
from dlrm_planner import plan_job, read_traces


def main() -> None:
    """Answer ``{"plan": …}``, or ``{"refusal": …}`` in the planner's words where there can be none."""
    asked = json.load(sys.stdin)
    signal.alarm(math.ceil(asked["deadline"]) + 1)  # an operator that died must not leave a planner behind
    try:
        profile = parse_profile(asked["profile"]) if asked["profile"] else None
        spec = parse_job(asked["job"]).spec
        plan = plan_job(spec, profile, traces=read_traces(spec, asked["traces"]))
        check_mounts(plan, profile)
    except InvalidSpecError as error:
        json.dump({"refusal": str(error)}, sys.stdout)
    else:
        json.dump({"plan": plan.model_dump(mode="json")}, sys.stdout)


if __name__ == "__main__":
    main()
