"""`python -m finetune` runs `finetune`."""

import sys

from finetune.cli import process

sys.exit(process())
