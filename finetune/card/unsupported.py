"""Cards that can't train here, with the reason and an alternative."""

from __future__ import annotations

import re

_TRY = "To see what an NVIDIA GPU would do: finetune plan RECIPE --gpu rtx-3060. A tiny model trains on the CPU: gpu=cpu."
#: Pattern of the names, the reason, and advice to give before `_TRY`.
_UNSUPPORTED = (
    (
        r"gtx ?-?([79]|10)\d\d|^(7[4-8]|9[5-8]|10[1-8])0( ?-?(ti|m|max-?q|\d+ ?gb))*$|\b(p100|p40|p4|m40|m60|k80)\b|"
        r"quadro p\d|titan x",
        "GPUs before Volta (GTX 10, Tesla P, Quadro P) have no tensor cores, and CUDA 13 no longer supports them",
        "Trained adapters still run on it.",
    ),
    (
        r"^(gtx ?-?)?16[356]0( ?-?(ti|super|s|d|m|max-?q))*$",
        "GTX 16 GPUs have no tensor cores and are not in the catalogue",
        "On that machine, gpu=auto measures it; rtx-2060 has the same memory.",
    ),
    (
        r"\bamd\b|radeon|^[67]\d00 ?-?(xtx|xt|gre)$|^90[67]0 ?-?(xt|gre)$|\brx ?-?\d{4}|instinct|\bmi ?-?\d{3}|\bvega|ryzen",
        "an AMD GPU needs torch's ROCm build; forecasts and kernels are not tested on it",
        "",
    ),
    (
        r"apple|mac|\bm[1-9]( |-)?(pro|max|ultra)?$|metal|\bmps\b",
        "Apple's chips have no CUDA, which 4-bit training and the forecast need",
        "MLX (mlx-lm) trains LoRA adapters on them.",
    ),
    (r"intel|\barc\b|iris|\b[ab](3[18]0|5[78]0|7[57]0)m?$", "an Intel GPU needs torch's XPU build, which is not tested", ""),
    (r"jetson|orin|xavier|gb10|dgx.?spark", "its memory is shared by CPU and GPU, which the forecast does not support", ""),
    (r"\btpu\b|\bv[2-6]e?-\d+$|trillium", "a TPU has no CUDA, which 4-bit training and the forecast need", ""),
    (r"colab|kaggle", "this is a service, not a GPU", "Its free GPU is a Tesla T4: gpu=t4."),
)


def why_unsupported(name: str) -> tuple[str, str] | None:
    """Return why a card of this name can't train, and an alternative."""
    for pattern, why, instead in _UNSUPPORTED:
        if re.search(pattern, name.strip().lower()):
            return why, f"{instead} {_TRY}" if instead else _TRY
    return None
