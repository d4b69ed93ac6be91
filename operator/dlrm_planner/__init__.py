"""Plan jobs: a pure function from a model and hardware to the plan that trainers execute."""

from dlrm_planner.choose import plan_job
from dlrm_planner.dims import DimAdvice, advise_dims
from dlrm_planner.fit import FittedRun, PastRun, ProfileFit, fit_profile
from dlrm_planner.hit_rates import read_traces, trace_references
from dlrm_planner.memory import CUDA_SHARED_BYTES, asks_for_hbm, checkpointer_bytes, working_set_bytes
from dlrm_planner.objective import WorkDone, choose_plan
from dlrm_planner.replan import FIELDS_WITHOUT_PLAN, PastPlan, continue_plan, with_reason
from dlrm_planner.tables import table_paths
from dlrm_planner.virtual_shards import max_replicas, virtual_shards

__all__ = [
    "CUDA_SHARED_BYTES", "FIELDS_WITHOUT_PLAN", "DimAdvice", "FittedRun", "PastPlan", "PastRun", "ProfileFit",
    "WorkDone", "advise_dims", "asks_for_hbm", "checkpointer_bytes", "choose_plan", "continue_plan", "fit_profile",
    "max_replicas", "plan_job", "read_traces", "table_paths", "trace_references", "virtual_shards", "with_reason",
    "working_set_bytes",
]  # fmt: skip
