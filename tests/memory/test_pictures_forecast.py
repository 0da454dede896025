"""On the CPU: a run on rows with pictures of uneven size against its dry run, phase by phase."""

import pytest
from picture_models import kinds, picture_run, save_picture_rows
from real_run import assert_close, by_phase, measured

from finetune.memory.ledger import batch_of
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import load_config

SIZES = [(60, 40), (150, 60), (57, 57), (40, 90), (140, 110), (84, 28)]
KINDS = sorted(kinds())
#: frozen and trained tower, 32 and 16 bit, 4 bit, recomputed
TECHNIQUES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "nf4": {"load_in_4bit": True},
    "projector": {"train_vision": "projector"},
    "tower": {"train_vision": "all"},
    "tower-nf4": {"train_vision": "all", "load_in_4bit": True},
    "recomputed": {"activation_checkpointing": True},
    "tower-recomputed": {"train_vision": "all", "activation_checkpointing": True},
    "scaled": {"max_pixels": 4096},
}
USUAL = {
    ("qwen2_5_vl", "bfloat16"), ("gemma3", "tower"), ("qwen3_vl", "tower-nf4"),
}  # fmt: skip
CASES = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if (kind, name) in USUAL else pytest.mark.exhaustive)
    for kind in KINDS
    for name in TECHNIQUES
]
USUAL_SETTINGS = {
    "dtype": "bfloat16", "per_device_train_batch_size": 1, "activation_checkpointing_every_n_layers": 1, "eval_steps": 2,
    "save_steps": 2, "per_device_eval_batch_size": 1,
}  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_phase_of_a_run_with_pictures_needs_what_its_dry_run_says(picture_model, tmp_path, kind, name):
    eval_path = save_picture_rows(tmp_path / "rows", SIZES[1:3], "held-out")
    run, plan = picture_run(picture_model(kind), tmp_path, SIZES, eval_path, **USUAL_SETTINGS | TECHNIQUES[name])
    settings = plan.settings
    batch = batch_of(settings, plan.data.row_shape(settings, plan.data.longest))
    assert_close(by_phase(simulate(load_config(settings), settings, batch, None)), measured(run))
