"""What the planner chooses, keeps, explains and refuses. Memory comes from the arithmetic forecast of conftest.py."""

import dataclasses
import json

import pytest
from arithmetic_forecast import LLAMA_8B

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.model.hybrid import PACKAGES
from finetune.planner import defaults, strategy
from finetune.planner.plan import Choices, DataStatistics, Plan, Verdict
from finetune.planner.planner import make_plan
from finetune.recipe import parse_recipe
from finetune.settings import unresolved
from finetune.settings.base_formats import INT8, NF4
from finetune.units import GIB

QWEN_8B, LLAMA_1B, LLAMA_70B = "Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"

TOTALS = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_low_bytes", "peak_high_bytes")


@pytest.fixture
def planned(arithmetic):
    def make(model, gpu="rtx-4090", *overrides, data=None, free_bytes=None, **more):
        recipe = parse_recipe(f"model_name_or_path: {model}\ndataset: data.jsonl\n", overrides=overrides)
        return make_plan(recipe, find_card(gpu, free_bytes=free_bytes), data, **more)

    return make


def rows(*lengths, eval_rows=0):
    ordered = tuple(sorted(lengths))
    return DataStatistics(len(ordered), eval_rows, sum(ordered), sum(ordered) // 2, ordered)


SHORT = rows(*[128] * 1000)


def test_the_same_inputs_give_the_same_plan_which_survives_json_with_a_reason_for_every_setting(planned):
    plan = planned(QWEN_8B)
    assert unresolved(plan.settings) == []
    assert all(plan.reasons[name] for name in unresolved(parse_recipe("model_name_or_path: m\ndataset: d\n")))
    assert planned(QWEN_8B) == plan == Plan.from_json(json.loads(json.dumps(plan.as_json())))
    names = {planned(LLAMA_1B, "rtx-4090", override).settings.output_dir for override in ("lora_r=8", "lora_r=16", "lora_r=16")}
    assert len(names) == 2 and all(name.startswith("runs/Llama-3.2-1B-Instruct-") for name in names)


@pytest.mark.parametrize(("model", "nf4", "reason"), [(QWEN_8B, True, "do not fit"), (LLAMA_1B, False, "no dequantisation")])
def test_an_8b_model_on_24_gb_is_nf4_with_nothing_recomputed_and_a_1b_model_stays_16_bit(planned, model, nf4, reason):
    """16-bit weights of 8B would leave room only with recomputation, and that is slower than NF4 without."""
    plan = planned(model)
    assert plan.verdict == "fits" and reason in plan.reasons["load_in_4bit"]
    assert (plan.settings.load_in_4bit, plan.settings.activation_checkpointing) == (nf4, False)


def test_a_plan_on_more_memory_is_slower_only_within_the_price_of_nf4(planned):
    """16 bit is chosen unless NF4 is 10 % faster."""
    total = find_card("a100-40gb").total_bytes
    less, more = (planned("google/gemma-2-9b-it", "a100-40gb", free_bytes=round(share * total)) for share in (0.75, 0.8))
    assert (less.settings.load_in_4bit, more.settings.load_in_4bit) == (True, False)
    assert 1 < more.modelled_step_s / less.modelled_step_s < NF4.price


def test_a_smaller_card_is_planned_slower_and_smaller_until_only_offload_or_nothing_is_left(planned):
    speeds, peaks = [], []
    for gib in (22, 14, 10, 9):
        plan = planned(QWEN_8B, "rtx-4090", free_bytes=gib * GIB)
        assert plan.verdict == "fits", gib
        speeds.append(plan.forecast.tokens_per_s)
        peaks.append(plan.forecast.peak_high_bytes)
    assert speeds == sorted(speeds, reverse=True) and peaks == sorted(peaks, reverse=True)
    assert planned(QWEN_8B, free_bytes=5 * GIB).verdict == "does not fit"
    enough, little = planned(QWEN_8B, free_bytes=12 * GIB), planned(QWEN_8B, free_bytes=round(7.9 * GIB))
    assert "offload" not in (enough.settings.activation_checkpointing, enough.settings.optim)
    assert little.settings.activation_checkpointing == "offload" or little.settings.optim == "adamw_cpu_offload"


@pytest.mark.parametrize(("free_gib", "verdict"), [(13.56, "does not fit"), (25, "fits")])
def test_16_bit_weights_are_planned_where_int8_needs_more_in_all(planned, arithmetic, forecast_by, free_gib, verdict):
    """Adapters on int8 weights are not lean: they save 1.8 times the bytes, more than the weights take less."""

    def lean(config, settings, card, *, rows, **_):
        saved = 47.6 * 1536 * 28 * rows.tokens * settings.per_device_train_batch_size
        more = 0 if settings.load_in_8bit else round(-0.45 * saved)
        whole = arithmetic(config, settings, card, rows=rows)
        parts = {**whole.parts, "activations": whole.parts["activations"] + more}
        return dataclasses.replace(whole, parts=parts, **{name: getattr(whole, name) + more for name in TOTALS})

    fixed = ("load_in_4bit=false", "activation_checkpointing=false", "per_device_train_batch_size=8", "max_length=2048")
    forecast_by(lean)
    plan = planned("Qwen/Qwen2.5-1.5B-Instruct", "a100-40gb", *fixed, free_bytes=round(free_gib * GIB))
    assert (plan.verdict, plan.settings.load_in_8bit) == (verdict, False)
    assert plan.forecast.peak_high_bytes == min(row.peak_high_bytes for row in plan.alternatives)


@pytest.mark.slow
def test_no_chosen_plan_is_slower_than_another_that_was_forecast_to_fit(planned):
    plan = planned("Qwen/Qwen3-14B")
    fitting = [row.step_s for row in plan.alternatives if row.verdict == "fits"]
    assert plan.alternatives[0].chosen
    assert plan.alternatives[0].step_s <= 1.15 * min(fitting)


def test_comparing_forecasts_what_differs_in_one_setting_chooses_the_same_and_leaves_out_weights_too_large(planned):
    alone, beside = planned(QWEN_8B), planned(QWEN_8B, compare=True)
    assert beside.settings == alone.settings and beside.alternatives[0].chosen
    differing = {row.differs for row in beside.alternatives[1:]}
    assert {"load_in_4bit=false", "load_in_4bit=false load_in_8bit=true"} <= differing
    assert "activation_checkpointing=true activation_checkpointing_every_n_layers=1" in differing
    assert "per_device_train_batch_size=2 gradient_accumulation_steps=8" in differing
    plan = planned("Qwen/Qwen3-32B", compare=True)
    assert len(plan.alternatives) > 3
    assert not any(row.plan.startswith("16 bit") for row in plan.alternatives)


@pytest.mark.parametrize("more", [(), ("activation_checkpointing_every_n_layers=2",), ("load_in_4bit=true", "lora_r=8")])
def test_the_overrides_of_an_alternative_give_it(planned, more):
    plan = planned(QWEN_8B, "rtx-4090", *more, compare=True)
    assert plan.alternatives[0].chosen and len(plan.alternatives) >= 4
    for row in plan.alternatives[1:]:
        typed = planned(QWEN_8B, "rtx-4090", *more, *row.overrides.split())
        assert typed.alternatives[0].plan == row.plan
        assert typed.alternatives[0].peak_bytes == row.peak_bytes


def test_comparing_a_sharded_model_whose_weights_exceed_one_card(planned, arithmetic, forecast_by):
    def split_over_8(*inputs, **named):
        whole = arithmetic(*inputs, **named)
        return dataclasses.replace(whole, **{name: getattr(whole, name) // 8 for name in TOTALS})

    split = ("launch.strategy=fsdp", "launch.num_processes=8", "effective_batch_size=8", "load_in_4bit=true")
    forecast_by(split_over_8)
    plan = planned("Qwen/Qwen3-32B", "rtx-4090", *split, free_bytes=10 * GIB, compare=True)
    assert plan.verdict == "fits" and plan.alternatives[0].chosen


@pytest.mark.parametrize("model", [LLAMA_1B, QWEN_8B, "Qwen/Qwen3-32B"])
def test_a_search_needs_few_forecasts(planned, arithmetic, model):
    planned(model)
    assert arithmetic.calls <= 6


@pytest.mark.parametrize(
    "override",
    [
        "load_in_4bit=true", "load_in_8bit=true", "activation_checkpointing=true", "activation_checkpointing=offload",
        "optim=adafactor", "per_device_train_batch_size=2", "gradient_accumulation_steps=4", "max_length=512", "lora_r=8",
        "learning_rate=1e-3", "eval_steps=7", "per_device_eval_batch_size=3", "output_dir=runs/mine", "dtype=float16",
        "effective_batch_size=24", "activation_checkpointing_every_n_layers=2", "memory_budget=16GiB", "packing=false",
    ],
)  # fmt: skip
def test_what_the_recipe_sets_is_kept(planned, override):
    plan = planned(LLAMA_1B, "rtx-4090", override)
    asked = parse_recipe(f"model_name_or_path: {LLAMA_1B}\ndataset: d\n", overrides=[override])
    name = override.partition("=")[0]
    assert getattr(plan.settings, name) == getattr(asked, name)
    assert plan.reasons[name].startswith("as the recipe sets it")


@pytest.mark.parametrize(
    ("overrides", "decided"),
    [
        ("effective_batch_size=12 gradient_accumulation_steps=4", (3, 4, 12)),
        ("per_device_train_batch_size=3", (3, 6, 18)),
        ("per_device_train_batch_size=2 gradient_accumulation_steps=5", (2, 5, 10)),
    ],
)
def test_parts_of_the_batch_that_are_set_decide_the_rest(planned, overrides, decided):
    chosen = planned(LLAMA_1B, "rtx-4090", *overrides.split()).settings
    assert (chosen.per_device_train_batch_size, chosen.gradient_accumulation_steps, chosen.effective_batch_size) == decided


def test_an_indivisible_batch_an_unknown_model_and_a_budget_below_the_context_are_refused(planned):
    with pytest.raises(RecipeError, match="16 can't be divided over 3 processes"):
        planned(LLAMA_1B, "rtx-4090", "launch.num_processes=3", "effective_batch_size=16")
    with pytest.raises(RecipeError, match="nobody/nothing") as error:
        planned("nobody/nothing")
    assert error.value.fix.startswith("Give the hub id in full, or the folder that holds its config.json: finetune plan path/")
    with pytest.raises(RecipeError, match="memory_budget 200MiB on rtx-4090, but the CUDA context alone may take"):
        planned(LLAMA_1B, "rtx-4090", "memory_budget=200MiB")
    plan = planned(LLAMA_1B, "rtx-4090", "memory_budget=100GiB")
    assert plan.budget_bytes == find_card("rtx-4090").free_bytes and "are free" in plan.reasons["memory_budget"]


def test_memory_and_max_length_follow_the_rows_and_a_limit_that_nobody_set_is_lowered_until_it_fits(planned):
    short = planned(QWEN_8B, "rtx-4090", "max_length=8192", data=rows(*[200] * 500, 700))
    full = planned(QWEN_8B, "rtx-4090", "max_length=8192")
    assert short.forecast.tokens_per_s > full.forecast.tokens_per_s
    assert short.settings.per_device_train_batch_size * 700 >= full.settings.per_device_train_batch_size * 700
    plan = planned(QWEN_8B, "rtx-4090", "packing=false", data=rows(*[100] * 900, *[900] * 100))
    assert plan.settings.max_length == 960 and "900" in plan.reasons["max_length"]
    plan = planned(QWEN_8B, "rtx-4090", free_bytes=round(7.75 * GIB))
    assert plan.verdict == "fits" and plan.settings.max_length < 2048 and "do not fit" in plan.reasons["max_length"]


@pytest.mark.slow
def test_rows_that_must_be_kept_are_not_shortened_to_fit(planned):
    data = rows(*[200] * 50, 40_000)
    all_rows = planned(QWEN_8B, "rtx-4070", data=data)
    dropped = planned(QWEN_8B, "rtx-4070", "excess_length=drop", data=data)
    assert all_rows.settings.max_length >= 40_000 and all_rows.verdict != "fits"
    assert dropped.settings.max_length < 40_000 and dropped.verdict == "fits"
    assert "1 rows are longer" in dropped.reasons["max_length"]


@pytest.mark.slow
def test_a_rank_that_does_not_fit_is_lowered_unless_set_or_in_vain(planned):
    many = DataStatistics(100_000, 0, 10**9, 10**9)
    assert planned(QWEN_8B, "rtx-4090", data=many).settings.lora_r == 256
    lowered = planned(QWEN_8B, "rtx-4090", data=many, free_bytes=10 * GIB)
    assert lowered.verdict == "fits" and lowered.settings.lora_r < 256 and "rank 256" in lowered.reasons["lora_r"]
    assert planned(QWEN_8B, "rtx-4090", "lora_r=256", data=many, free_bytes=8 * GIB).settings.lora_r == 256
    # the advised rank is planned when none fits, and its reason is the advice
    plan = planned(LLAMA_70B, "rtx-4090", data=many)
    assert plan.verdict == "does not fit" and plan.settings.lora_r == 64
    assert "does not fit" not in plan.reasons["lora_r"] and "LoRA Without Regret" in plan.reasons["lora_r"]


def test_what_does_not_fit_is_explained_with_suggestions_that_undo_what_the_recipe_insists_on(planned):
    plan = planned(LLAMA_70B)
    assert plan.verdict == "does not fit" and plan.headroom_bytes < 0
    assert [row.saves_bytes for row in plan.suggestions] == sorted((row.saves_bytes for row in plan.suggestions), reverse=True)
    stubborn = ["load_in_4bit=false", "load_in_8bit=false", "max_length=2048", "optim=adamw_8bit"]
    stubborn += ["per_device_train_batch_size=8", "activation_checkpointing=false"]
    plan = planned(QWEN_8B, "rtx-4090", *stubborn)
    assert plan.verdict == "does not fit"
    offered = {row.override: row for row in plan.suggestions}
    assert {"load_in_4bit=true", "per_device_train_batch_size=1 gradient_accumulation_steps=16"} <= set(offered)
    four_bit = planned(QWEN_8B, "rtx-4090", *stubborn, "load_in_4bit=true")
    saved = plan.forecast.peak_high_bytes - four_bit.forecast.peak_high_bytes
    assert saved == offered["load_in_4bit=true"].saves_bytes
    assert four_bit.forecast.peak_high_bytes == offered["load_in_4bit=true"].peak_bytes  # what the verdict compares


@pytest.mark.parametrize(
    ("model", "gpu"),
    [("google/gemma-3-4b-it", "t4"), ("google/gemma-3-12b-it", "v100-32gb"), ("google/gemma-4-E4B-it", "rtx-2080-ti"),
     ("Qwen/Qwen3.5-4B", "quadro-rtx-5000"), ("openai/gpt-oss-20b", "quadro-rtx-8000")],
)  # fmt: skip
def test_models_that_exceed_float16_are_planned_in_float32_where_there_is_no_bfloat16(planned, model, gpu):
    plan = planned(model, gpu)
    assert plan.settings.dtype == "float32" and "exceeds its range (" in plan.reasons["dtype"]
    assert not any("float16" in note for note in plan.forecast.notes)
    assert planned(model, "rtx-4090").settings.dtype == "bfloat16"


def test_a_float32_plan_on_a_gpu_takes_4_bit_weights_where_plain_ones_do_not_fit_and_never_int8_by_itself(planned):
    """bitsandbytes' int8 kernels cast their inputs to float16."""
    plan = planned("google/gemma-3-4b-it", "t4")
    assert plan.settings.load_in_4bit is True and "vs 32-bit weights, which do not fit" in plan.reasons["load_in_4bit"]
    half = planned(QWEN_8B, "t4", "load_in_4bit=false")
    assert half.settings.load_in_8bit is True
    assert planned(QWEN_8B, "t4", "load_in_4bit=false", "dtype=float32").settings.load_in_8bit is False


def test_turing_trains_in_float16_said_to_be_a_risk_and_an_explicit_dtype_stays(planned):
    turing = planned(LLAMA_1B, "t4")
    assert turing.settings.dtype == "float16" and "7.5" in turing.reasons["dtype"]
    assert planned(LLAMA_1B, "rtx-3060").settings.dtype == "bfloat16"

    def note(*inputs):
        (remark,) = (note for note in planned(*inputs).forecast.notes if "float16" in note)
        return remark

    assert note(LLAMA_1B, "t4").endswith("; if the loss becomes NaN, set dtype=float32")
    gemma = planned("google/gemma-3-1b-it", "t4", "dtype=float16")
    assert gemma.settings.dtype == "float16" and gemma.reasons["dtype"] == "as the recipe sets it"
    assert "gemma3_text exceeds its range (huggingface/tran" in note("google/gemma-3-1b-it", "t4", "dtype=float16")
    assert note(LLAMA_1B, "rtx-4090", "dtype=float16").endswith("leave dtype out")
    assert not any("float16" in remark for remark in planned(LLAMA_1B, "rtx-4090").forecast.notes)


def test_only_a_model_published_in_bfloat16_or_unknown_or_of_a_named_type_may_exceed_float16():
    for config in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"text_config": {"dtype": "bfloat16"}}, {}):
        risk = defaults.float16_risk({"model_type": "llama", **config})
        assert risk == (False, "models published in bfloat16 may exceed its range")
        assert defaults.float16_risk({"model_type": "llama", **config, "torch_dtype": "float16"}) == (False, "")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(defaults.EXCEEDS_FLOAT16) <= set(CONFIG_MAPPING_NAMES) and all(defaults.EXCEEDS_FLOAT16.values())
    assert defaults.float16_risk({"model_type": "paligemma", "text_config": {"model_type": "gemma2"}})[0]
    assert not defaults.float16_risk({"model_type": "gemma"})[0] and not defaults.float16_risk({})[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_a_mixture_with_4_bit_experts_fits_a_24_gb_card(planned, model):
    plan = planned(model, "rtx-4090", "max_length=2048")
    assert plan.verdict == Verdict.FITS and plan.settings.load_in_4bit is True
    assert plan.forecast.parts["weights"] <= 17 * GIB


def test_with_int8_a_mixtures_experts_stay_16_bit_and_a_format_that_is_not_planned_is_used_where_asked_for(
    planned, monkeypatch
):
    plan = planned("Qwen/Qwen3-30B-A3B", "a100-80gb", "load_in_8bit=true")
    assert plan.settings.load_in_8bit is True and "experts stay 16-bit" in plan.reasons["load_in_8bit"]
    assert planned(QWEN_8B, "rtx-4090", "load_in_4bit=false", free_bytes=14 * GIB).settings.load_in_8bit is True
    monkeypatch.setattr(strategy, "QUANTISED", (NF4, dataclasses.replace(INT8, planned=False)))
    assert planned(QWEN_8B, "rtx-4090", "load_in_4bit=false", free_bytes=14 * GIB).settings.load_in_8bit is False
    assert planned(QWEN_8B, "rtx-4090", "load_in_8bit=true", free_bytes=14 * GIB).settings.load_in_8bit is True


def test_a_cpu_is_planned_in_float32_without_checkpointing_and_packs_where_asked_to(planned):
    plan = planned("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu", data=rows(*[80] * 200, eval_rows=20))
    settings = plan.settings
    assert (settings.dtype, settings.load_in_4bit, settings.activation_checkpointing) == ("float32", False, False)
    assert settings.optim == "adamw_torch" and plan.forecast.step_s is None
    assert planned("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu", "load_in_4bit=true").settings.load_in_4bit is True
    plan = planned("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu", "packing=true", data=SHORT)
    assert plan.settings.packing is True and plan.settings.attn_implementation == "torch_varlen"


def test_disk_is_counted_and_steps_evaluations_and_checkpoints_follow_from_the_rows(planned):
    plan = planned(LLAMA_1B, "rtx-4090", "packing=false", data=rows(*[100] * 330, eval_rows=30))
    assert plan.total_steps == 2 * 21  # 330 rows are 20 batches of 16 and one of 10
    assert plan.settings.eval_steps == plan.settings.save_steps == 5
    assert planned(LLAMA_1B, "rtx-4090", data=rows(*[100] * 330)).settings.eval_steps == 0
    disk = next(row for row in planned(QWEN_8B).checks if row.what == "disk")
    assert disk.needs_bytes > 0 and disk.free_bytes is None and disk.enough is None
    here = next(row for row in planned("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu").checks if row.what == "disk")
    assert here.enough is True


@pytest.mark.parametrize(("tokens", "batch"), [(128, 1), (512, 4)])
def test_short_rows_are_packed_and_a_step_still_has_about_16_of_them(planned, tokens, batch):
    plan = planned(QWEN_8B, "rtx-4090", "num_train_epochs=1", data=rows(*[tokens] * 1000))
    assert plan.settings.packing is True and plan.settings.attn_implementation == "torch_varlen"
    assert (plan.settings.max_length, plan.settings.effective_batch_size) == (2048, batch)
    assert plan.total_steps == -(-1000 * tokens // (2048 * batch))
    assert "about 16 rows per" in plan.reasons["effective_batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "overrides", "data", "because"),
    [
        (QWEN_8B, "t4", (), SHORT, "capability 8.0"),
        ("google/gemma-2-2b-it", "rtx-4090", (), SHORT, "can't be used"),
        ("tiiuae/falcon-7b", "rtx-4090", (), SHORT, "rows of falcon models"),
        ("openai/gpt-oss-20b", "rtx-4090", (), SHORT, "rows of gpt_oss models"),
        ("Qwen/Qwen3-0.6B", "rtx-4090", ("effective_batch_size=16",), SHORT, "change the rows per step"),
        (QWEN_8B, "rtx-4090", ("attn_implementation=eager",), SHORT, "dense mask"),
        (QWEN_8B, "rtx-4090", (), None, "not been read"),
        (QWEN_8B, "rtx-4090", (), rows(*[2000] * 100), "rows are long"),
    ],
)
def test_packing_is_off_where_it_would_not_pay_or_not_be_right(planned, model, gpu, overrides, data, because):
    plan = planned(model, gpu, *overrides, data=data)
    assert plan.settings.packing is False and because in plan.reasons["packing"]
    assert plan.settings.attn_implementation != "torch_varlen"


def test_rows_are_not_packed_in_hybrids_or_where_packed_sequences_do_not_fit(planned):
    plan = planned(QWEN_8B, data=SHORT, free_bytes=round(7.6 * GIB))
    assert plan.verdict == "fits" and plan.settings.packing is False and "do not fit" in plan.reasons["packing"]
    stateful = {*PACKAGES, "lfm2", "lfm2_moe", "lfm3", "inkling2", "recurrent_gemma", "minimax", "rwkv", "xlstm"}
    assert not defaults.SEPARATES_PACKED_ROWS & stateful
    assert "10 layers" in planned("LiquidAI/LFM2-350M", data=SHORT).reasons["packing"]
    with pytest.raises(RecipeError, match="10 layers of this lfm2 model pass a state"):
        planned("LiquidAI/LFM2-350M", "rtx-4090", "packing=true", data=SHORT)
    recipe = parse_recipe("model_name_or_path: some/model\ndataset: d\npacking: true\n")
    for kind in defaults.DROPS_BOUNDARIES:
        with pytest.raises(RecipeError, match=f"code of {kind} models drops the boundaries") as caught:
            defaults.choose_packing(Choices(recipe, SHORT), find_card("rtx-4090"), {"model_type": kind}, False, 21)
        assert caught.value.fix == "Set packing=false."


@pytest.mark.parametrize(
    ("family", "hidden", "rate"), [("llama", 4096, 2.9e-4), ("qwen3", 4096, 4.7e-4), ("llama", 2048, 4.9e-4)]
)
def test_llama_and_qwen_use_the_fitted_formula(family, hidden, rate):
    advised, reason = defaults.advise_learning_rate(dataclasses.replace(LLAMA_8B, family=family, hidden=hidden))
    assert advised == pytest.approx(rate) and "LoRA Without Regret" in reason


@pytest.mark.parametrize(("billions", "rate"), [(7, 2e-4), (13, 2e-4), (33, 1e-4), (65, 1e-4)])
def test_other_families_use_qloras_table(billions, rate):
    advised, reason = defaults.advise_learning_rate(dataclasses.replace(LLAMA_8B, family="falcon", parameters=billions * 10**9))
    assert advised == rate and "QLoRA" in reason


@pytest.mark.parametrize(
    ("trained_tokens", "rank"), [(10_000, 16), (80_000_000, 16), (90_000_000, 32), (1_000_000_000, 256), (10**11, 256)]
)
def test_rank_grows_with_the_trained_tokens(trained_tokens, rank):
    """Rank 16 of an 8B model: 41.9M parameters at 2 bits hold 83.9M tokens at 1 bit."""
    advised, reason = defaults.advise_rank(LLAMA_8B, DataStatistics(1000, 0, trained_tokens, trained_tokens))
    assert advised == rank and "LoRA Without Regret" in reason


def test_rank_stabilised_scaling_has_the_same_scale_at_rank_16():
    recipe = parse_recipe("model_name_or_path: m\ndataset: d.jsonl\n")
    recipes = (recipe, recipe.model_copy(update={"use_rslora": True}))
    plain, stabilised = (defaults.advise_alpha(advised, 16)[0] for advised in recipes)
    assert plain / 16 == stabilised / 16**0.5
