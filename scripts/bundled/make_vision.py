"""Makes the bundled model `tiny-vision`, a Qwen2-VL of 1.3 million parameters, and the dataset `parcels`, on a CPU in minutes.

    python scripts/bundled/make_vision.py [FOLDER] [--data-only]

The model learns to answer questions about parcel labels, coloured shapes on coloured paper, but not to sort parcels. It is
saved only if it answers them on held-out labels. The data are 300 labels as PNG files and rows that sort them, with the same
pixels each time. Needs Pillow.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import muon
from finetune.compat.processors import load_processor, save_processor
from make_data import BUNDLED

SEED, DATA_SEED = 20270, 20300
TRAIN_ROWS, EVAL_ROWS = 240, 60
INSTRUCTION = "Sort this parcel."
STEPS, BATCH_SIZE, PEAK_RATE, WARMUP_STEPS = 900, 16, 4e-3, 40
GATE_ROWS, GATE_SHARE = 80, 0.9
COLOURS = {
    "red": (208, 40, 40), "green": (36, 150, 60), "blue": (40, 80, 210), "yellow": (235, 200, 30), "purple": (140, 50, 170),
    "black": (25, 25, 25),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
#: Sizes of a label in pixels, (width, height).
SIZES = ((48, 32), (64, 32), (48, 48), (64, 48), (32, 48), (32, 64))
PAPERS = {"white": (245, 245, 240), "pink": (250, 190, 210), "cyan": (170, 235, 240), "brown": (190, 150, 110)}
#: Where parcels go, by what their labels show. Pretraining never sees it.
GATES = {"circle": "north", "square": "south", "triangle": "east", "cross": "west"}
BELTS = dict(zip(COLOURS, "ABCDEF", strict=True))
BAYS = dict(zip(PAPERS, (1, 2, 3, 4), strict=True))
QUESTIONS = {
    "Which shape?": lambda label: f"It is a {label.shape}.",
    "Which color?": lambda label: f"It is {label.colour}.",
    "Which paper?": lambda label: f"On {label.paper} paper.",
    "Write it as JSON.": lambda label: json.dumps({"paper": label.paper, "shape": label.shape, "color": label.colour}),
    "Give me tags.": lambda label: f"{label.shape}, {label.colour}, {label.paper}",
}

FACTS = 3  # the first questions are about one fact each


@dataclass(frozen=True)
class Label:
    """The content of a label, its size in pixels, and the seed of its layout."""

    shape: str
    colour: str
    paper: str
    size: tuple[int, int]
    seed: int


def draw_label(rng: random.Random) -> Label:
    """A label; each shape, colour, paper and size is equally likely."""
    return Label(
        rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice(list(PAPERS)), rng.choice(SIZES), rng.randrange(2**32)
    )


def draw_labels(rng: random.Random, count: int, excluded: set[Label]) -> list[Label]:
    """Draw `count` labels that are not in `excluded`, and add them there."""
    labels: list[Label] = []
    while len(labels) < count:
        label = draw_label(rng)
        if label not in excluded:
            excluded.add(label)
            labels.append(label)
    return labels


def pixels(label: Label) -> np.ndarray:
    """The picture, (height, width, 3) of uint8."""
    rng = random.Random(label.seed)
    width, height = label.size
    picture = np.full((height, width, 3), PAPERS[label.paper], dtype=np.uint8)
    mask = _shape(label.shape, rng.randint(20, 26))
    x, y = rng.randint(2, width - len(mask) - 2), rng.randint(2, height - len(mask) - 2)
    picture[y : y + len(mask), x : x + len(mask)][mask] = COLOURS[label.colour]
    return picture


def _shape(name: str, size: int) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size] + 0.5
    centre = size / 2
    if name == "circle":
        return (x - centre) ** 2 + (y - centre) ** 2 <= centre**2
    if name == "triangle":
        return np.abs(x - centre) <= y / 2
    if name == "cross":
        return (np.abs(x - centre) <= size / 7) | (np.abs(y - centre) <= size / 7)
    return np.ones((size, size), dtype=bool)


def sorting(label: Label) -> str:
    """The answer of the dataset: one line of JSON."""
    return json.dumps({"gate": GATES[label.shape], "belt": BELTS[label.colour], "bay": BAYS[label.paper]})


def data_labels() -> list[Label]:
    """The labels of the dataset, the training rows first."""
    return draw_labels(random.Random(DATA_SEED), TRAIN_ROWS + EVAL_ROWS, excluded=set())


def write_data(folder: Path) -> None:
    """Write pictures/NNN.png, train.jsonl and eval.jsonl."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, label in enumerate(data_labels()):
        name = f"pictures/{number:03d}.png"
        Image.fromarray(pixels(label)).save(folder / name, optimize=True)
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": sorting(label)}]}
        rows.append(json.dumps({"messages": [question, answer], "images": [name]}) + "\n")
    for name, lines in (("train", rows[:TRAIN_ROWS]), ("eval", rows[TRAIN_ROWS:])):
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


def make_model() -> Any:
    """The untrained model in float32, of the bundled one's configuration."""
    torch.manual_seed(SEED)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(BUNDLED / "tiny-vision", dtype=torch.float32))


def conversation(rng: random.Random, label: Label) -> list[dict[str, Any]]:
    """All facts of a label and one of the other questions, in any order; the picture is before the first."""
    messages, names = [], list(QUESTIONS)
    asked = [*names[:FACTS], rng.choice(names[FACTS:])]
    for index, question in enumerate(rng.sample(asked, len(asked))):
        parts = [*([{"type": "image"}] if index == 0 else []), {"type": "text", "text": question}]
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": QUESTIONS[question](label)}]})
    return messages


def collate(processor: Any, rows: list[tuple[Label, list[dict[str, Any]]]]) -> dict[str, torch.Tensor]:
    """A batch with labels of the answers' tokens."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
    return collator([{"messages": messages, "images": [Image.fromarray(pixels(label))]} for label, messages in rows])


def pretrain(model: Any, processor: Any) -> None:
    """STEPS steps on new labels."""
    rng, data = random.Random(SEED + 1), set(data_labels())

    def losses() -> tuple[torch.Tensor, float]:
        labels = [label for label in (draw_label(rng) for _ in range(BATCH_SIZE)) if label not in data]
        loss = model(**collate(processor, [(label, conversation(rng, label)) for label in labels])).loss
        return loss, loss.item()

    muon.pretrain(model, losses, steps=STEPS, peak_rate=PEAK_RATE, warmup_steps=WARMUP_STEPS, every=20)


@torch.no_grad()
def score(model: Any, processor: Any, rows: list[tuple[Label, str, str]]) -> float:
    """Share of greedy answers that equal the expected text: rows of label, question and answer."""
    model.eval()
    correct = 0
    for label, question, answer in rows:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        batch = processor(text=text, images=[Image.fromarray(pixels(label))], return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**batch, max_new_tokens=48, do_sample=False)[0, batch["input_ids"].shape[1] :]
        correct += processor.tokenizer.decode(ids, skip_special_tokens=True) == answer
    return correct / len(rows)


def main(folder: Path, *, data_only: bool) -> int:
    """Write the data; build, train, score and save the model. Returns 1 without saving it below GATE_SHARE."""
    write_data(folder / "parcels")
    if data_only:
        return 0
    path = str(BUNDLED / "tiny-vision")
    processor = load_processor(path, AutoTokenizer.from_pretrained(path))
    model = make_model()
    print(f"{model.num_parameters():,} parameters, {torch.get_num_threads()} threads")
    pretrain(model, processor)
    muon.round_to_bfloat16(model)
    rng, questions = random.Random(SEED + 2), list(QUESTIONS)
    labels = draw_labels(rng, GATE_ROWS, excluded=set(data_labels()))
    rows = [(label, name, QUESTIONS[name](label)) for label, name in zip(labels, questions * GATE_ROWS, strict=False)]
    share = score(model, processor, rows)
    untaught = score(model, processor, [(label, INSTRUCTION, sorting(label)) for label in labels[:40]])
    print(f"{share:.1%} of questions on new labels are answered, {untaught:.1%} of the labels sorted")
    model_folder = folder / "tiny-vision"
    if not (code := muon.save_if_good(model, processor.tokenizer, model_folder, share, GATE_SHARE, max_new_tokens=48)):
        save_processor(processor, str(model_folder))
    return code


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    raise SystemExit(main(paths[0] if paths else BUNDLED, data_only="--data-only" in sys.argv))
