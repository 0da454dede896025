"""Real runs of the bundled model, as in tests/run."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("run_fixtures", Path(__file__).parents[1] / "run" / "conftest.py")
_run_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_run_fixtures)
train = _run_fixtures.train
