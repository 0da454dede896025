"""No process of this program sends telemetry or loads native code from the hub, whatever is installed."""

import os
import subprocess
import sys

import pytest

from finetune.system import SETTINGS

ENTRIES = {
    "command": "from finetune.cli import process; sys.argv = ['finetune', 'recipes']; process()",
    "supervisor": "from finetune.run.supervise import main; sys.argv = ['supervise', 'no/run']; main()",
    "worker": "from finetune.run.worker import main; sys.argv = ['worker', 'no/run']; main()",
    "page": "from app.__main__ import main; sys.argv = ['app', '--help']; main()",
    "chat": "import os; os._exit = sys.exit; from app.worker import serve; serve(None, 0.1)",
}
THEN = """
import huggingface_hub.constants
assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
try:
    import kernels
except ImportError:
    from transformers.utils import is_kernels_available
    assert not is_kernels_available()
    sys.exit(7)
"""


@pytest.mark.parametrize(
    "entry",
    [pytest.param(entry, marks=[pytest.mark.slow] * (entry == "worker")) for entry in ENTRIES],  # it imports torch
)
def test_telemetry_is_off_and_kernels_are_not_loaded_from_the_hub(tmp_path, entry):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.11.1'\ndef get_kernel(*_, **__): raise SystemExit(1)")
    code = f"import sys\ntry:\n    {ENTRIES[entry]}\nexcept (Exception, SystemExit):\n    pass\n{THEN}"
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert process.returncode == 7, process.stderr[-2000:]
