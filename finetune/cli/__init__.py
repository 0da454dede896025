"""The command line. Every command that reports has --json; errors are one screen, with the fix, and never a traceback."""

from finetune.cli.app import main, process

__all__ = ["main", "process"]
