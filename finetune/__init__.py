"""finetune: LoRA fine-tuning on the card you own, with a memory forecast you can trust."""

import os

__version__ = "0.1.0"

# Before torch is imported: OpenMP's threads sleep while they wait. By default they spin for milliseconds; on a processor that
# other programs use, too, small operators then take twenty times as long (benchmarks/waiting_threads.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
