"""The parts of a model of images and text: which of its modules are the vision tower, and which the projector behind it."""

from __future__ import annotations

import re
from typing import Any

#: Names of projectors in transformers' models: those beside the tower, and those at its end.
_PROJECTORS = (
    "multi_modal_projector", "connector", "merger", "deepstack_merger_list", "embed_vision", "vision_projection", "aligner",
    "patch_merger",
)  # fmt: skip


def untrained_vision(model: Any, trained: str) -> str | None:
    """PEFT's `exclude_modules` for what of the vision part is not trained: all with `none`, all but the projector with
    `projector`, nothing with `all`. None for a model of text."""
    path = getattr(model, "decoder_path", "")
    if not path:
        return None
    if trained == "all":
        return _unread_layers(model)
    adapted = rf"{re.escape(path)}(\.|$)|lm_head(\.|$)"
    if trained == "projector":
        names = "|".join(_PROJECTORS)
        adapted += rf"|(.*\.)?({names})(\.|$)"
    return rf"(?!({adapted})).*"


def _unread_layers(model: Any) -> str | None:
    """A pattern of the tower's last layers, where the model reads an earlier one's output, as LLaVA does: they would get no
    gradient."""
    read = getattr(model.config, "vision_feature_layer", None)
    count = getattr(getattr(model.config, "vision_config", None), "num_hidden_layers", None)
    if read is None or not count:
        return None
    indices = read if isinstance(read, (list, tuple)) else [read]
    end = max(index if index >= 0 else count + 1 + index for index in indices)  # the embeddings' output is number 0
    numbers = "|".join(map(str, range(end, count)))
    return rf"(.*\.)?vision_tower\.(.*\.)?layers\.({numbers})\..*" if numbers else None
