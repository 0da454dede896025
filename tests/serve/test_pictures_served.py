"""Pictures in requests of OpenAI's interface: answered as in chat, refused by name where they can't be."""

import base64
import sys
from io import BytesIO
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from picture_models import save_picture_model, save_picture_rows

from finetune.data.pictures.placement import PICTURE_MARK
from finetune.data.pictures.processing import processor_for
from finetune.data.pictures.source import PictureSource, digest_of
from finetune.evaluate.answerer import Answerer
from finetune.recipe import recipe_from
from finetune.run.prepare import create_run, prepare
from finetune.run.worker import Worker

pytestmark = pytest.mark.slow
SIZES = [(60, 40), (150, 60), (57, 57), (40, 90)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from finetune.serve.models import Models, runs_by_name

    folder = tmp_path_factory.mktemp("served")
    run = create_run(prepare(recipe_from({
        "model_name_or_path": save_picture_model("qwen2_5_vl", folder / "vl"), "gpu": "cpu", "dtype": "float32",
        "dataset": {"path": save_picture_rows(folder / "rows", SIZES)}, "lora_r": 4, "effective_batch_size": 2,
        "max_steps": 1, "sample_answers": 0, "output_dir": str(folder / "run"),
    })))  # fmt: skip
    assert Worker(run).main() == 0
    return Models(runs_by_name([run]))


@pytest.fixture
def ask(models):
    from finetune.serve.api import build
    from finetune.serve.engine import Engine

    engine = Engine(models, tokens=512)
    client = TestClient(build(engine, "t" * 16), headers={"authorization": f"Bearer {'t' * 16}"})

    def post(*parts):
        body = {"model": "run", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": list(parts)}]}
        answer = client.post("/v1/chat/completions", json=body)
        return answer.status_code, answer.json()

    yield post
    engine.close()


def png(width, height, colour):
    buffer = BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def part(content, kind="image/png"):
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}


TEXT = {"type": "text", "text": "Which number"}


def test_a_picture_is_answered_as_the_model_does_alone_and_decides_the_answer(models, ask):
    content = png(60, 40, "red")
    source = PictureSource(None, content, digest_of(content), 60, 40)
    answerer = models._answerers["run"]
    ids = answerer.prompt_ids([{"role": "user", "content": f"{PICTURE_MARK}Which number", "pictures": 1}], (), [source])
    alone = answerer.answer([ids], max_new_tokens=8, pictures=[[source]])[0]
    status, answer = ask(part(content), TEXT)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, alone)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_picture_larger_than_any_that_was_planned_for_is_scaled_down(models, ask):
    answerer = models._answerers["run"]
    assert answerer.encoder.picture_processor.size(1000, 1000) == (94, 94)  # 150 x 60 pixels
    assert ask(part(png(2000, 1500, "red")), TEXT)[0] == 200
    own = Answerer(answerer.run).encoder.picture_processor  # as in chat and in an evaluation, whose rows have tokens already
    assert own.size(1000, 1000) == (1000, 1000)


def test_a_model_that_gets_each_picture_in_one_size_scales_none_down_before(tmp_path):
    for kind, size in (("gemma3", (1000, 1000)), ("qwen2_5_vl", (60, 60))):
        folder = save_picture_model(kind, tmp_path / kind)
        processor = processor_for(
            recipe_from({"model_name_or_path": folder, "dataset": "unread"}),
            AutoTokenizer.from_pretrained(folder),
            Path(folder),
        )
        processor.limit(60 * 60)
        assert processor.size(1000, 1000) == size


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a picture", "is not a picture"), (png(2, 2, "red"), "shorter side"), (png(60, 40, "red")[:60], "is"),
        (b"", "is empty"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_by_its_message(ask, content, reason):
    status, answer = ask(part(content), TEXT)
    assert status == 400 and answer["error"]["param"] == "messages" and reason in answer["error"]["message"]


def test_a_model_of_text_refuses_pictures(ask, models, monkeypatch):
    monkeypatch.setattr(models, "reads_pictures", lambda name: False)
    status, answer = ask(part(png(60, 40, "red")), TEXT)
    assert status == 400 and "reads no pictures" in answer["error"]["message"]
