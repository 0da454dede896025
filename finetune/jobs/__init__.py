"""Job files: a recipe for Slurm, Kubernetes or SkyPilot."""

from finetune.jobs.job import ENGINES, Job, job_file

__all__ = ["ENGINES", "Job", "job_file"]
