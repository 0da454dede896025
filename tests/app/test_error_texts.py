"""Errors on the page in Chinese: each text of the source has its entry, and what users meet has no English but names."""

import ast
import errno
import html
import re

import pytest
from written_runs import make_run

from app.language import catalogue, spoken
from app.planning.blocker import blocker_of
from app.planning.draft import Draft, parse_draft
from app.views.engine_texts import english
from app.views.error_texts import of_error, of_message
from app.views.plan import blocker_note
from app.views.problems import problem, settings_problem
from app.views.settings import examined
from app.workspace import Workspace
from finetune.card import find_card
from finetune.card.vendor import Device
from finetune.doctor.machine import _card_finding, check_disk, check_driver, check_memory, check_port, check_spill
from finetune.doctor.packages import architecture_finding, check_compiler, check_packages, cuda_finding
from finetune.errors import FinetuneError
from finetune.planner.planning import plan_recipe, read_rows, without_rows
from finetune.recipe import load_recipe
from finetune.run.failures import cause_of
from finetune.run.prepare import prepare
from finetune.run.rename_delete import rename_run
from finetune.units import GIB
from tests.app.error_templates import ROOT, error_templates, shape
from tests.app.test_language import english_in

#: Names beside those of every page: what is quoted, commands to their end, paths, settings; and what other libraries say.
NAMES = re.compile(
    r"`[^`]*`|'[^']*'|\"[^\"]*\"|\{.*\}|\b(finetune|jq|hf|sudo apt) .*|uv pip install [^，]*|\S*/\S*|\S+[._=]\S+|"
    r"found undefined alias|Expecting value|(?i:nvml shared library not found)|NVIDIA|Parquet.*"
)
#: A setting's name, value or choice, the name of a card.
ONE_WORD = re.compile(r"(?<![A-Za-z] )\b[A-Za-z][\w-]*\b(?! ?[A-Za-z])")
CARD = {"name": "RTX 2080", "capability": [7, 5]}
TORCH = {"version": "2.13.0", "cuda": "13.0", "hip": None, "architectures": ["sm_75"], "devices": [], "cuda_error": None}
BASE = "model_name_or_path: tiny\ndataset: {path: a.jsonl}\n"
DRAFTS = {
    "no YAML": "a: *b", "unknown setting": f"{BASE}lora_rr: 3", "unknown in a section": f"{BASE}launch: {{nodes: 2}}",
    "out of range": f"{BASE}lora_r: 0\nlora_dropout: 2\nlearning_rate: -1", "another kind": f"{BASE}num_train_epochs: many",
    "true for a number": f"{BASE}max_length: true", "no such choice": f"{BASE}method: grpo",
    "no size": f"{BASE}memory_budget: 3XB", "of another method": f"{BASE}method: sft\nbeta: 0.2",
    "exclude each other": f"{BASE}load_in_4bit: true\nload_in_8bit: true", "missing": "lora_r: 3",
    "does not divide": f"{BASE}effective_batch_size: 7\nper_device_train_batch_size: 2", "empty": "", "a list": "- a",
    "twice": f"{BASE}lora_r: 3\nlora_r: 4", "a secret": f"{BASE}hf_token: abc",
    "own code": f"{BASE}trust_remote_code: true\nmodel_revision: {'a' * 40}",
    "sharded": f"{BASE}launch: {{strategy: fsdp}}\nadapter_dtype: bfloat16",
}  # fmt: skip
GOOD = '{"prompt": "2+2=", "completion": "4"}\n'
DATA = {
    "missing.jsonl": None, "empty.jsonl": "", "broken.jsonl": GOOD + '{"prompt":\n', "unknown.jsonl": '{"foo": 1, "bar": 2}',
    "answers.jsonl": GOOD + '{"prompt": "a", "completion": ""}\n' * 3, "numbers.jsonl": '{"prompt": 3, "completion": "4"}',
    "role.jsonl": '{"messages": [{"role": "usr", "content": "a"}]}', "rows.parquet": GOOD, "rows.xyz": GOOD,
    "first.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}',
    "label.jsonl": '{"prompt": "a", "completion": "b", "label": true}',
}  # fmt: skip
PLANS = {
    "no such card": ["gpu=rtx-9999"], "budget": ["gpu=rtx-4090", "memory_budget=100MiB"],
    "no such model": ["model_name_or_path=./none"], "no such layer": ["target_modules=[foo]"],
    "no such adapter": ["adapter_name_or_path=none"],
    "too many layers": ["layer_offloading=cpu", "offloaded_layers=99", "activation_checkpointing=true"],
}  # fmt: skip


def english_of(shown):
    return english_in(ONE_WORD.sub("", NAMES.sub("·", html.unescape(re.sub(r"<[^>]*>", "\n", shown)))))


def refusal_of(action, *arguments, **options):
    """The box of the error that a call raises, in Chinese."""
    with pytest.raises(FinetuneError) as raised:
        action(*arguments, **options)
    return problem(raised.value.title, raised.value.problems, raised.value.fix)


def plan_of(overrides):
    recipe = load_recipe("tiny-cpu", overrides)
    return plan_recipe(recipe, find_card(recipe.gpu), read_rows)


@pytest.fixture(autouse=True)
def _chinese():
    with spoken("zh"):
        yield


def test_every_error_has_its_chinese():
    """Those that lack it, as entries to fill in: PYTHONPATH=. python -m tests.app.error_templates"""
    entries = {shape(text) for text in catalogue("zh", "error")}
    assert sorted(text for text in error_templates() if shape(text) not in entries) == []


def test_the_catalogue_has_no_error_that_is_in_no_text_of_the_source():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    shapes = {shape(text) for text in error_templates()}
    assert [text for text in catalogue("zh", "error") if shape(text) not in shapes and text not in texts] == []


def test_each_text_with_its_values_is_translated_as_its_own_entry():
    def filled(text):
        return re.sub(r"\{(\w+)\}", lambda value: f"Q{len(value[1])}", text)

    entries = catalogue("zh", "error").items()
    assert [text for text, chinese in entries if english(of_error(filled(text)))[0] > english(filled(chinese))[0]] == []


@pytest.mark.parametrize("text", DRAFTS.values(), ids=list(DRAFTS))
def test_what_is_wrong_with_a_draft_is_chinese(text):
    edited = parse_draft(text)
    assert edited.problems and english_of(settings_problem(edited.problems, edited.fix)) == []


@pytest.mark.parametrize("name", DATA)
def test_what_is_wrong_with_data_is_chinese(tmp_path, name):
    path = tmp_path / name
    if DATA[name] is not None:
        path.write_text(DATA[name], encoding="utf-8")
    recipe = load_recipe("tiny-cpu", [f"dataset.path={path}"])
    blocker = blocker_of(recipe, plan_recipe(recipe, find_card("cpu"), read_rows), tmp_path)
    assert english_of(blocker_note(blocker) + problem(blocker.title, blocker.problems, blocker.fix)) == []


@pytest.mark.parametrize("overrides", PLANS.values(), ids=list(PLANS))
def test_why_there_is_no_plan_is_chinese(overrides):
    assert english_of(refusal_of(plan_of, overrides)) == []


def test_a_plan_for_another_machine_says_so_in_chinese(tmp_path):
    recipe = load_recipe("tiny-cpu", ["gpu=rtx-4090"])
    blocker = blocker_of(recipe, plan_recipe(recipe, find_card("rtx-4090"), without_rows), tmp_path)
    assert english_of(blocker_note(blocker)) == []


@pytest.mark.slow
def test_why_a_run_does_not_start_is_chinese(tmp_path):
    recipe = load_recipe("tiny-cpu", ["memory_budget=400MiB", f"output_dir={tmp_path / 'run'}"])
    assert english_of(refusal_of(prepare, recipe)) == []


def test_what_a_run_refuses_is_chinese(tmp_path):
    run = make_run(tmp_path, "first", [])
    make_run(tmp_path, "second", [])
    refusals = [refusal_of(rename_run, run, name) for name in ("second", "/", "")]
    refusals.append(refusal_of(Draft(Workspace(tmp_path, tmp_path)).start_from, "none"))
    assert english_of("".join(refusals)) == []


#: Other tools' files with keys that can't be converted.
OTHER_TOOLS = {
    "axolotl": "base_model: a/b\ndatasets: [{path: a/b, type: sharegpt}]\nadapter: lora\nrl: orpo\nmicro_batch_size: 1\n",
    "llama_factory": "model_name_or_path: a/b\nstage: rm\nfinetuning_type: full\ndataset: x\ntemplate: qwen\n"
    "quantization_type: fp4\n",
    "trl": "model_name_or_path: a/b\nper_device_train_batch_size: 2\ndataset_name: a/b\ninit_lora_weights: pissa\n"
    "label_smoothing_factor: 0.1\nuse_peft: false\n",
}


@pytest.mark.parametrize("text", OTHER_TOOLS.values(), ids=list(OTHER_TOOLS))
def test_why_the_file_of_another_tool_is_not_converted_is_chinese(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert english_of(refusal_of(load_recipe, str(path))) == []


@pytest.mark.parametrize(("minimum", "device"), [(0, CARD), (2**60, {**CARD, "capability": [5, 2]})])
def test_what_is_wrong_with_the_machine_is_chinese(tmp_path, minimum, device):
    card = Device("RTX 2080", 16 * GIB, 4 * GIB, (7, 5), None, ("python (pid 7) 9.00 GiB",))
    findings = [
        check_driver(tmp_path), check_driver(tmp_path, "Darwin"), check_memory(2**60, minimum), check_port(1), check_port(0),
        *check_disk({"runs": tmp_path}, 2**60, minimum), check_spill("Windows", "11"), check_spill("Linux", "microsoft"),
        _card_finding(card, hidden=False), _card_finding(card, hidden=True), check_compiler(str(tmp_path)), check_packages([]),
        *(cuda_finding({**TORCH, **torch}, ("570", (12, 8))) for torch in ({}, {"cuda": None}, {"devices": [device]})),
        cuda_finding(TORCH, None), cuda_finding({**TORCH, "hip": "7.1"}, None), architecture_finding(TORCH, device),
    ]  # fmt: skip
    answer = {"time_s": 0.0, "findings": [finding.as_json() for finding in findings]}
    assert english_of(examined(answer, is_running=False)) == []


def test_a_message_with_its_fix_in_one_line_is_chinese(tmp_path):
    plan = plan_of([])
    errors = [cause_of(OSError(code, "No space left on device", "/x"), plan, tmp_path) for code in (errno.ENOSPC, errno.EDQUOT)]
    assert english_of("".join(of_message(" ".join([*error.problems, error.fix])) for error in errors)) == []
    assert of_message("its process is gone") == "进程已不存在。"


def test_what_is_no_text_of_the_catalogue_stays_as_it_is():
    for text in ("ValueError: the kernel failed here", "a line\nand another one", "x" * 3000, ""):
        assert of_error(text) == text
    assert of_error("Set packing=false.\nno text of ours") == "请设 packing=false。\nno text of ours"


def test_a_text_in_an_error_is_escaped_and_english_stays_as_it_was():
    assert "没有配方 &lt;b&gt;" in problem("x", ["there is no recipe <b>"])
    with spoken("en"):
        assert "there is no recipe &lt;b&gt;" in problem("x", ["there is no recipe <b>"], "Set packing=false.")
