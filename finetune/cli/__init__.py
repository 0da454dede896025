"""The command line. Every report has `--json`, every error a fix."""

from finetune.cli.entry import main, process

__all__ = ["main", "process"]
