"""The real supervisor, starting the worker with a fault: `python faulty_supervisor.py FAULT RUN`. Not a test."""

import sys
from pathlib import Path

from finetune.run import supervise

fault, run = sys.argv[1:3]
supervise.worker_command = lambda _, *__: [sys.executable, str(Path(__file__).with_name("faulty_worker.py")), fault, run]
sys.argv = ["supervise", run]
sys.exit(supervise.main())
