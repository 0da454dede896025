"""Every model type is forecast or refused with a reason; each family trains in 16 and 4 bit in the memory of its forecast."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from one_step import random_model
from peft import LoraConfig, get_peft_model
from real_run import planned
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import model_types
from families import BITS, FAMILIES, PHASES, TABLE, bundled_tokenizer, config_values, trained
from finetune.errors import RecipeError
from finetune.layers import experts
from finetune.layers.varlen_attention import register
from finetune.model.configuration import default_attention
from finetune.model.names import entries
from finetune.model.padding import MAX_CHANGE, MAX_MEDIAN_CHANGE, changes_with_other_example, require_isolated_examples
from finetune.planner.defaults import SEPARATES_PACKED_ROWS, VARLEN
from finetune.run.worker import Worker
from model_types import FORECAST, REFUSED, YES, check, outcome_of
from tables import read_table

PACK = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
#: Three of different kinds in the ordinary run: all together take minutes.
USUAL = {("gemma4", 4), ("qwen3_5_moe", 16), ("gpt_oss", 4)}
CASES = [
    pytest.param(family, bits, {}, id=f"{family}-{bits}", marks=[] if (family, bits) in USUAL else pytest.mark.exhaustive)
    for family in FAMILIES
    for bits in BITS
]
#: In float32: dense, a mixture, mixers, learned positions, a delta net. Beside the stand-in GPU fla can be imported; it has no
#: kernels for the CPU.
CASES += [
    pytest.param(family, 16, {"dtype": "float32"}, id=f"{family}-32", marks=[pytest.mark.standin] * (family == "qwen3_5"))
    for family in ("llama", "qwen3_moe", "falcon_h1", "opt", "qwen3_5")
]


def test_every_family_of_the_catalogue_is_here_and_in_the_table_with_no_error_over_half_a_percent():
    assert {entry.config["model_type"] for entry in entries().values()} <= FAMILIES.keys()
    assert len(FAMILIES) >= 30
    rows = read_table(TABLE)
    assert [(row["family"], int(row["bits"])) for row in rows] == [
        (family, bits) for family in sorted(FAMILIES) for bits in BITS
    ]
    assert all(abs(float(row["worst_error"])) <= 0.005 and float(row["last_loss"]) < float(row["first_loss"]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits", "more"), CASES)
def test_a_family_trains_and_every_phase_needs_what_its_dry_run_says(tmp_path, monkeypatch, family, bits, more):
    monkeypatch.setitem(FAMILIES, "opt", {"ffn_dim": 512, "word_embed_proj_dim": 256})
    monkeypatch.setattr(experts, "used_experts", lambda offsets, ends: None)  # all, as the dry run has it
    expected, seen, losses = trained(family, bits, tmp_path, **more)
    far = {phase: (expected[phase], seen[phase]) for phase in PHASES if abs(expected[phase] / seen[phase] - 1) > 0.005}
    assert not far
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(9, 2000, (length,), generator=generator).tolist()} for length in (40, 70)]


def model_of(family, attention):
    """A small model with random weights, large enough that what a token sees changes its loss."""
    register()
    return random_model(config_values(family), attention, scale=3).eval()


@torch.no_grad()
def losses(model, rows):
    batch = PACK(rows)
    labels = batch.pop("labels")[0]
    by_token = torch.nn.functional.cross_entropy(model(**batch, use_cache=False).logits[0, :-1], labels[1:], reduction="none")
    return by_token[labels[1:] != -100]


def packed_and_alone(family, attention, rows):
    """How far the losses of packed rows are from those of rows alone, and what the check before a run finds."""
    model = model_of(family, attention)
    alone = torch.cat([losses(model, [row]) for row in rows])
    return (losses(model, rows) - alone).abs().max().item(), changes_with_other_example(model, PACK).max().item()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_have_the_losses_of_rows_alone_or_are_refused(family, rows):
    """Always so where the planner packs; with the attention of a recipe that asks for packing, one or the other."""
    if family in SEPARATES_PACKED_ROWS:
        apart, change = packed_and_alone(family, VARLEN, rows)
        assert apart < 1e-4 and change <= MAX_CHANGE
    try:
        apart, change = packed_and_alone(family, default_attention(config_values(family)), rows)
    except ValueError as error:  # a state that transformers itself can't keep apart here
        assert "packed sequences" in str(error) and family not in SEPARATES_PACKED_ROWS
        return
    assert apart < 1e-4 if change <= MAX_CHANGE else apart > 1e-2


@pytest.mark.slow
def test_a_run_whose_packed_rows_see_each_other_ends_before_its_first_step(tmp_path):
    row = tmp_path / "row.jsonl"
    row.write_text('{"text": "one two three"}\n' * 4)
    model_of("falcon", "sdpa").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    bundled_tokenizer().save_pretrained(tmp_path / "model")
    run, _ = planned(str(tmp_path / "model"), tmp_path, dataset={"path": str(row), "eval_path": str(row)}, packing=True)
    with pytest.raises(RecipeError, match="depends on the example before it in this falcon model") as caught:
        Worker(run)._train()
    assert caught.value.fix == "Set packing=false."


# A state or a convolution that crosses a row's end is found, however fast the state decays.
CONVOLUTION, RULE = qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule


def convolution(leaks, states, *weights, seq_idx, activation, **_):
    counts = [states.shape[2]] if leaks else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([CONVOLUTION(row, *weights, activation=activation) for row in states.split(counts, dim=2)], dim=2)


def rule(leaks, *states, cu_seqlens, g, beta, **_):
    counts = [g.shape[1]] if leaks else cu_seqlens.diff().tolist()
    rows = zip(*(part.split(counts, dim=1) for part in (*states, g, beta)), strict=True)
    return torch.cat([RULE(*row, use_qk_l2norm_in_kernel=True)[0] for row in rows], dim=1), None


def toy(monkeypatch, decay, leaking=None, dtype=torch.float32):
    """Qwen3.5 with one of its parts, or none, computed over the ends of rows; `decay`: the logarithm of the state's rate."""
    monkeypatch.setattr(qwen3_5, "causal_conv1d_fn", partial(convolution, leaking == "convolution"))
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", partial(rule, leaking == "state"))
    torch.manual_seed(0)
    model = qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**config_values("qwen3_5")["text_config"])).to(dtype)
    for layer in model.model.layers[:3]:
        layer.linear_attn.A_log.data.fill_(decay)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_kept_apart_do_not_change_at_all(monkeypatch, dtype):
    model = toy(monkeypatch, decay=-3, dtype=dtype)
    require_isolated_examples(model, PACK)
    assert changes_with_other_example(model.get_base_model(), PACK).max() == 0


@pytest.mark.parametrize("leaking", ["state", "convolution"])
@pytest.mark.parametrize("decay", [-3, 1.5])
def test_a_state_or_a_convolution_that_crosses_a_rows_end_is_found(monkeypatch, leaking, decay):
    model = toy(monkeypatch, decay, leaking)
    with pytest.raises(RecipeError, match="depends on the example before it in this qwen3_5_text model"):
        require_isolated_examples(model, PACK)
    if (leaking, decay) == ("state", 1.5):  # the median over a row's tokens would not show it
        assert changes_with_other_example(model.get_base_model(), PACK)[:16].median() < MAX_MEDIAN_CHANGE / 1000


ROWS = model_types.table()
KINDS = model_types.model_types()
FEW = ("deepseek_v3", "gemma4", "bamba", "llama4", "qwen3_5", "bert")  # of different layers and parts


def test_no_type_of_the_installed_transformers_is_missing_from_the_table_or_ends_in_an_internal_error():
    assert set(KINDS) - set(ROWS) == set()
    rows = ROWS.values()
    assert {row["result"] for row in rows} == {FORECAST, REFUSED} and all(row["detail"] for row in rows)
    assert all("dry run" in row["detail"] and row["trains"] for row in rows if row["result"] == FORECAST)
    assert sum(row["trains"] == YES for row in rows) > 150


def test_the_check_names_new_types_and_those_that_no_longer_train(monkeypatch, capsys):
    monkeypatch.setattr(model_types, "table", lambda: {"bert": ROWS["bert"] | {"trains": YES}})
    monkeypatch.setattr(model_types, "model_types", lambda: ["bert", "brand_new"])
    assert check(ThreadPoolExecutor(1))
    assert capsys.readouterr().out.startswith("never tried: brand_new\nbert no longer trains: model_type bert is an encoder")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS])
def test_a_type_is_forecast_or_refused_and_trains_as_the_table_says(kind):
    outcome = outcome_of(kind)
    assert (outcome["result"], outcome["trains"] == YES) == (ROWS[kind]["result"], ROWS[kind]["trains"] == YES), outcome
