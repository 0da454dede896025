"""`python -m finetune`, the same as `finetune`."""

import sys

from finetune.cli import process

sys.exit(process())
