"""Plan: recipe + card + data statistics -> every setting resolved, with reasons and a forecast."""

from finetune.plan.make import make_plan
from finetune.plan.plan import DataStatistics, Plan, read_plan

__all__ = ["DataStatistics", "Plan", "make_plan", "read_plan"]
