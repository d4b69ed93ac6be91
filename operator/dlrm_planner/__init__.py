"""Planner: a pure function from a model and hardware to the plan that trainers execute."""

from dlrm_planner.devices import asks_for_hbm
from dlrm_planner.memory import working_set_bytes
from dlrm_planner.planner import plan_job
from dlrm_planner.tables import table_paths
from dlrm_planner.traces import read_traces, trace_references

__all__ = ["asks_for_hbm", "plan_job", "read_traces", "table_paths", "trace_references", "working_set_bytes"]
