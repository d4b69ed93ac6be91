"""Planner: a pure function from a model and hardware to the plan that trainers execute."""
