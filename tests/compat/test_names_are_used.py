"""Patches and overrides exist and are really called by the library, in dry runs, a training and the doctor's probe."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets.utils.file_utils import _raise_if_offline_mode_is_enabled
from huggingface_hub.errors import OfflineModeIsEnabled
from patched_names import OVERRIDDEN, PATCHED, UNSEEN

from finetune.compat import hub, owner_of
from finetune.compat.bitsandbytes import _compile_when_called
from finetune.compat.transformers import quiet_libraries

HERE = Path(__file__).resolve().parent
CALLED = [name for name in (*PATCHED, *OVERRIDDEN) if name not in UNSEEN]
CHECKPOINT = "transformers.modeling_layers.GradientCheckpointingLayer._gradient_checkpointing_func"


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hits")
    environment = {**os.environ, "FINETUNE_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / "count_hits.py"), str(folder / "hits.json")]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((folder / "hits.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLED, CHECKPOINT])
def test_the_library_calls_the_patch(counted, name):
    assert counted.get(name, 0) > 0


#: What a new process finds.
STARTS = {
    "a forecast imports no compiler": (
        "import sys; from finetune.compat.bitsandbytes import import_without_compiler as imported; imported();"
        "import finetune.memory.simulate; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    ),
    "a report needs no server": "import sys; sys.modules |= dict.fromkeys(['fastapi', 'starlette']); import app.report",
    "TRL is imported without listing packages and still knows them": (
        "import importlib.metadata as metadata, sys; listed = []; list_all = metadata.packages_distributions;"
        "metadata.packages_distributions = lambda: listed.append(1) or list_all();"
        "from finetune.compat.trl import import_without_listing_packages as imported; imported();"
        "import trl.import_utils as utils; before = len(listed);"
        "distributions = [utils.PACKAGE_DISTRIBUTION_MAPPING[name] for name in ('torch', 'yaml')];"
        "sys.exit(before != 0 or distributions != [['torch'], ['PyYAML']])"
    ),
    "no packages for rows are read, transformers' files once, and both are still there": (
        "import sys; from finetune.compat.trl import fused_lm_head, import_libraries;"
        "import_libraries(); fused_lm_head();"
        "assert not {'pandas', 'datasets', 'pyarrow'} & set(sys.modules);"
        "import datasets, pandas; from transformers import models;"
        "from transformers.utils import import_utils;"
        "assert pandas.DataFrame({'a': [1]}).shape == datasets.Dataset.from_list([{'a': 1}]).shape == (1, 1);"
        "scans = import_utils.create_import_structure_from_path; scans.cache_clear();"
        "import_utils.define_import_structure.cache_clear(); again = import_utils.define_import_structure(models.__file__);"
        "fresh = import_utils._LazyModule('fresh', models.__file__, again, module_spec=models.__spec__);"
        "assert fresh._class_to_module == models._class_to_module"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", STARTS.values(), ids=STARTS)
def test_a_cold_start(code):
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_bitsandbytes_compiles_is_compiled_when_called_and_it_says_errors_only(caplog):
    compiled = []
    double = _compile_when_called(lambda function, **named: compiled.append(named) or function, lambda x: 2 * x, dynamic=False)
    assert not compiled
    assert (double(2), double(3), compiled) == (4, 6, [{"dynamic": False}])
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    logger.warning("MatMul8bitLt: inputs will be cast from %s to float16 during quantization", "torch.bfloat16")
    logger.error("an error")
    assert [record.msg for record in caplog.records] == ["an error"]


def test_the_libraries_follow_when_the_hub_is_switched_off(monkeypatch):
    for home in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(home, "HF_HUB_OFFLINE", home.HF_HUB_OFFLINE)  # put back at the end
    hub.set_offline(False)
    _raise_if_offline_mode_is_enabled()
    assert not huggingface_hub.is_offline_mode()
    hub.set_offline(True)
    assert huggingface_hub.is_offline_mode()
    with pytest.raises(OfflineModeIsEnabled):
        _raise_if_offline_mode_is_enabled()


@pytest.mark.parametrize("name", [*PATCHED, *OVERRIDDEN])
def test_the_library_has_the_name(name):
    owner, attribute = owner_of(name)
    assert hasattr(owner, attribute)


def test_only_patched_and_overridden_names_are_listed_as_unseen():
    assert {name for name in UNSEEN if not name.startswith("triton.")} <= {*PATCHED, *OVERRIDDEN}


@pytest.mark.parametrize("name", ["torch.nn.gone.name", "no_library.name"])
def test_a_name_whose_owner_is_gone_is_detected(name):
    with pytest.raises((AttributeError, ImportError)):
        owner_of(name)
