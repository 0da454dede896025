"""A small model of each kind is planned, and trains within its forecast, in float32 on the CPU."""

import pytest

from families import FAMILIES, PHASES, trained

#: Beside the stand-in GPU fla can be imported, which has no kernels for the CPU.
DELTA_NET = pytest.param("qwen3_5", marks=pytest.mark.standin)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "falcon_h1", "opt", DELTA_NET])  # dense, mixture, mixers, positions
def test_a_toy_trains_in_float32_and_every_phase_needs_what_its_plan_says(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(FAMILIES, "opt", {"ffn_dim": 512, "word_embed_proj_dim": 256})
    planned, seen, losses = trained(kind, 16, tmp_path, dtype="float32")
    assert {phase: planned[phase] for phase in PHASES} == pytest.approx({phase: seen[phase] for phase in PHASES}, rel=0.005)
    assert losses[0] > losses[1] > losses[2]
