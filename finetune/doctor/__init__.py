"""Doctor: what of this machine a fine-tuning run needs, each part really tried, with the fix for what fails."""

from finetune.doctor.examine import examine
from finetune.doctor.finding import Finding, worst

__all__ = ["Finding", "examine", "worst"]
