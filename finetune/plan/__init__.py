"""Plan: recipe + card + data statistics -> every setting resolved, with reasons and a forecast."""

from finetune.plan.make import make_plan
from finetune.plan.plan import DataStatistics, Plan, Verdict

__all__ = ["DataStatistics", "Plan", "Verdict", "make_plan"]
