"""Generated recipes through `finetune run`: each refused in words that name the cause, nothing left behind."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.settings.reference import settings_reference

pytestmark = pytest.mark.slow

#: Datasets that nothing can be trained on.
BROKEN = {
    "missing.jsonl": None,
    "empty.jsonl": b"",
    "torn.jsonl": b'{"messages": [{"role": "user", "con',
    "bytes.csv": bytes(range(256)),
    "nulls.jsonl": b'{"prompt": null, "completion": null}\n',
    "mixed.jsonl": b'{"text": "a"}\n{"prompt": "b"}\n',
    "broken.parquet": b"PAR1",
    "list.json": b"[1, 2, 3]",
    "roles.jsonl": b'{"messages": [{"content": "who?"}]}\n',
}
KEYS = [row.name for row in settings_reference() if row.name != "output_dir" and not row.name.startswith("dataset.")]
TRAPS = ["1e-4", "no", "010", "12:30", ".inf", "-.nan", "~", "0x1F", "1_000", "!!python/object:os.system x", "&a [*a]", "{a: 1",
         "'", "\t", "null", "[]", "{}", "auto", "true", "=", "2024-01-01", "\x00", "é\u202e", "x" * 300]  # fmt: skip
plain = st.one_of(
    st.booleans(), st.integers(-5, 10**12), st.floats(), st.text(max_size=12), st.none(), st.lists(st.integers(), max_size=3)
)
values = st.one_of(st.sampled_from(TRAPS), plain.map(json.dumps), st.sampled_from(["2", "16", "0.1", "cpu"]))
lines = st.tuples(st.one_of(st.sampled_from(KEYS), st.sampled_from(["lorar", "batch", "", "LORA_R"])), values)


@st.composite
def recipes(draw):
    """The text of a recipe: a sound beginning with a broken dataset, then anything."""
    dataset = draw(st.sampled_from(sorted(BROKEN)))
    text = f"gpu: cpu\nmodel_name_or_path: tiny\ndataset: data/{dataset}\n"
    text += "".join(f"{key}: {value}\n" for key, value in draw(st.lists(lines, max_size=4)))
    cut = draw(st.sampled_from([None, None, None, 12]))
    return dataset, text[:cut]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    (folder / "data").mkdir()
    for name, content in BROKEN.items():
        if content is not None:
            (folder / "data" / name).write_bytes(content)
    return folder


@given(recipes())
@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_300_recipes_are_refused_with_their_cause_and_nothing_half_made(workspace, finetune, recipe):
    dataset, text = recipe
    with contextlib.chdir(workspace):
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        before = sorted(path.name for path in workspace.iterdir())
        code, output = finetune("run", "recipe.yaml")
        assert code in (2, 3, 4), f"{code}: {output}\n{text}"
        assert "Traceback" not in output and "Internal error" not in output
        keys = [line.partition(":")[0] for line in text.splitlines()[3:]]
        assert any(word in output for word in ("recipe.yaml", dataset, *keys)), output
        assert sorted(path.name for path in workspace.iterdir()) == before
