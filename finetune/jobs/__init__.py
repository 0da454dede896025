"""Job files: the same recipe, for engines that hold many cards and machines."""

from finetune.jobs.job import ENGINES, Job, job_file

__all__ = ["ENGINES", "Job", "job_file"]
