"""Planner: a pure function from a model and hardware to the plan that trainers execute."""

from dlrm_planner.memory import working_set_bytes
from dlrm_planner.planner import plan_job

__all__ = ["plan_job", "working_set_bytes"]
