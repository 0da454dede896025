"""The command line. Every command that reports has --json; errors fit one screen, with a fix and without traceback."""

from finetune.cli.entry import main, process

__all__ = ["main", "process"]
