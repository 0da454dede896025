"""Settings that stay, the examination of this machine, and the list of models that runs have made."""

from app.views.models import models_of, models_table
from app.views.settings import examined
from finetune.run.directory import RunDirectory


def test_what_is_wrong_with_the_machine_stands_first():
    findings = [{"check": check, "state": state, "what": "<b>", "fix": ""} for check, state in (("a", "ok"), ("b", "fail"))]
    html = examined({"findings": findings, "time_s": 0.0}, is_running=False)
    assert html.index("Broken") < html.index("Good") and "<b>b</b>" in html and "&lt;b&gt;" in html


def test_models_are_adapters_merged_folders_and_gguf_files_with_their_size(tmp_path, kept_run):
    run = RunDirectory(kept_run(tmp_path / "runs"))
    (run.path / "merged").mkdir()
    for name in ("merged/config.json", "merged/model.safetensors", "model.gguf"):
        (run.path / name).write_bytes(b"x" * 100)
    models = list(models_of(run, "tiny", ""))
    assert [(model.kind, model.bytes) for model in models][1:] == [("merged model", 200), ("GGUF", 100)]
    assert models[0].kind == "adapter" and models[0].bytes > 1000
    assert "runs/finished/model.gguf" in models_table(models, tmp_path)
