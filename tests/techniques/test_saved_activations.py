"""Saved activations, fewer, recomputed or moved beside the computation: losses to the bit, fewer bytes, each storage once."""

import contextlib
import functools
import weakref
from types import SimpleNamespace

import pytest
import tiny_training
import torch
from lean_models import adapter_gradients, fill_adapters
from peft.tuners.lora import LoraLayer
from tiny_training import (
    BASES,
    KINDS,
    RECOMPUTED,
    VOCABULARY,
    Operators,
    adapted,
    autocast,
    batch,
    forecast_model,
    forecast_saved_bytes,
    losses,
    plain_losses,
    saved_bytes,
    settings_for,
    trained,
)

from finetune.layers.checkpointing import decoder_layers
from finetune.layers.offload import WINDOW, InOrder, Offload, SavedActivations, SideStream
from finetune.model.techniques import apply_techniques, step_context

#: The logits of tiny_training's batch in fp32.
LOGITS_BYTES = batch(0)["input_ids"].numel() * VOCABULARY * 4


def at_once(window: int = WINDOW) -> Offload:
    return Offload(InOrder(), pinned=False, window=window)


class Seen(SavedActivations):
    """Records which tensors the hooks replaced and which not."""

    def __init__(self, offload):
        self.left, self.taken = [], []
        super().__init__(offload)

    def _pack(self, tensor):
        packed = super()._pack(tensor)
        (self.left if isinstance(packed, torch.Tensor) else self.taken).append(tensor)
        return packed


@pytest.fixture
def offloaded(monkeypatch):
    """offloaded(window) -> every saved activation is offloaded from here on."""

    def offload_all(window=WINDOW):
        monkeypatch.setattr(tiny_training, "step_context", lambda settings, device: SavedActivations(at_once(window)))

    return offload_all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_offloading_gives_the_same_losses_to_the_bit(base, kind, recompute, offloaded):
    expected = plain_losses(base, kind)
    offloaded()
    assert losses(settings_for(base, **BASES[kind], activation_checkpointing=recompute)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_fewer_bytes_are_saved(base, kind, offloaded):
    (plain,) = forecast_saved_bytes(base, kind, {})
    offloaded()
    (moving,) = forecast_saved_bytes(base, kind, {})
    offloaded(window=0)
    (moved,) = forecast_saved_bytes(base, kind, {})
    assert moved < 0.10 * plain
    assert moved <= moving <= moved + WINDOW * LOGITS_BYTES  # the largest tensor that is moved


@pytest.mark.parametrize("form", [{}, RECOMPUTED["full"], RECOMPUTED["every-2"]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saves_the_bytes_of_its_forecast(base, form, dtype):
    eager = {"dtype": dtype, "attn_implementation": "eager"}  # sdpa skips its mask depending on data
    assert forecast_saved_bytes(base, "lora", form, **eager) == [saved_bytes(settings_for(base, **form, **eager))]


def test_neither_weights_nor_their_casts_nor_integers_are_touched(base):
    model = adapted(settings_for(base, **BASES["nf4"]))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in trained(model)}
    with Seen(at_once()) as seen, autocast(settings_for(base, **BASES["nf4"])):
        model(**batch(0)).loss.backward()
    assert seen.taken
    for tensor in seen.taken:
        assert tensor.is_floating_point()
        assert tensor.untyped_storage().data_ptr() not in weights
        assert tuple(tensor.shape) not in shapes and tuple(tensor.shape[::-1]) not in shapes
    assert any(tensor.untyped_storage().data_ptr() in weights for tensor in seen.left)


def test_a_tensor_saved_by_several_operations_is_stored_once_and_again_when_changed_in_place():
    x = torch.randn(8, 64, 128, requires_grad=True) * 1
    views = x, x.view(4, 128, 128), x.transpose(0, 1), x
    with SavedActivations(at_once()) as hooks:
        handles = [hooks._pack(view) for view in views]
    assert len({id(handle.moved) for handle in handles}) == 1
    assert all(torch.equal(hooks._unpack(handle), view) for handle, view in zip(handles, views, strict=True))
    with SavedActivations(at_once()) as hooks:
        before, old = hooks._pack(x), x.detach().clone()
        x.add_(1)
        after = hooks._pack(x)
    assert torch.equal(hooks._unpack(before), old) and torch.equal(hooks._unpack(after), x)


def test_a_freed_storage_is_not_mistaken_for_a_new_one_and_nothing_stays_allocated_after_the_backward():
    with SavedActivations(at_once()) as hooks:
        pairs = []
        for value in range(50):
            x = torch.full((64, 128), float(value), requires_grad=True) * 1
            pairs.append((value, hooks._pack(x)))
            del x
        assert all((hooks._unpack(handle) == value).all() for value, handle in pairs)
    targets = []

    class Watched(InOrder):
        def copy(self, target, source):
            targets.append(weakref.ref(target))
            super().copy(target, source)

    with SavedActivations(Offload(Watched(), pinned=False)) as hooks:
        x = torch.randn(64, 64, 128, requires_grad=True)
        (x * 1).sin().sum().backward()
        assert all(stored() is None for _, stored in hooks._stored.values())
    assert not hooks._stored and targets and all(target() is None for target in targets)


class LateCopies:
    """Copies as late as the waits allow, as a busy PCIe bus does; what is not waited for is garbage.

    A source that was freed before its copy was waited for has been overwritten by later computation.
    """

    def __init__(self):
        self.pending, self.copied = [], 0

    def copy(self, target, source):
        target.fill_(torch.nan if target.is_floating_point() else 77)
        self.pending.append((target, weakref.ref(source)))
        self.copied += 1
        return self.copied

    def wait(self, copied):
        while self.copied - len(self.pending) < copied:
            target, source = self.pending.pop(0)
            if source() is not None:
                target.copy_(source())


class Careless(LateCopies):
    """Computation does not wait for the copies."""

    def wait(self, copied):
        pass


class Hasty(Offload):
    """Frees a tensor on the card before it has been copied."""

    def _free_copied(self, most_bytes):
        self._departing.clear()


def gradients(settings, hooks) -> torch.Tensor:
    model = adapted(settings)
    with hooks, autocast(settings):
        model(**batch(0)).loss.backward()
    return adapter_gradients(model)


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16"}], ids=str)
def test_late_copies_give_the_same_gradients_to_the_bit(base, kind):
    settings = settings_for(base, **kind)
    plain = gradients(settings, contextlib.nullcontext())
    assert torch.equal(gradients(settings, SavedActivations(Offload(LateCopies(), pinned=False))), plain)


@pytest.mark.parametrize("wrong", [Offload(Careless(), pinned=False), Hasty(LateCopies(), pinned=False)])
def test_without_a_wait_the_gradients_would_be_garbage(base, wrong):
    assert gradients(settings_for(base), SavedActivations(wrong)).isnan().any()


@pytest.mark.parametrize("marked", [False, True])
def test_a_copy_waits_for_the_computation_or_a_mark_in_it_and_the_computation_for_the_copy(marked):
    log, on = [], []

    class Stream:
        def __init__(self, device=None):
            self.name = "side" if device else "compute"

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

        def record_event(self):
            return f"event {len(log)} of {self.name}"

    class Target:
        def copy_(self, source, non_blocking):
            log.append(f"{on[-1].name} copies, {non_blocking=}")

    def stream(entered):
        on.append(entered)
        return contextlib.nullcontext()

    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda device: Stream(), stream=stream)
    copies = SideStream(torch.device("cuda", 0), cuda)
    copies.wait(copies.copy(Target(), torch.zeros(1), after=copies.mark() if marked else None))
    before = "side waits for event 0 of compute" if marked else "side waits for compute"
    assert log == [before, "side copies, non_blocking=True", "compute waits for event 2 of side"]


def test_at_most_two_of_the_largest_tensor_are_in_flight_and_one_used_three_times_is_copied_once():
    offload, largest = Offload(LateCopies(), pinned=False), 4000
    tensors = [torch.full((size,), float(index)) for index, size in enumerate([1000, 10, 600, 1000, 1000, 300, 1000])]
    alive, moved = [weakref.ref(tensor) for tensor in tensors], []
    while tensors:
        moved.append(offload.move(tensors.pop(0)))
        offload.note_saved(moved[-1])
        here = [tensor().nbytes for tensor in alive[: len(moved)] if tensor() is not None]
        assert here[-1] == moved[-1].bytes and sum(here) <= WINDOW * largest
    for index in reversed(range(len(moved))):
        assert (offload.load(moved[index]) == index).all()
        ahead = sum(tensor.bytes for tensor in moved[:index] if tensor.on_device is not None)
        assert ahead <= WINDOW * largest and (ahead > 0 or index == 0)
        moved.pop()
    assert all(tensor() is None for tensor in alive)
    copies = LateCopies()
    with SavedActivations(Offload(copies, pinned=False)):
        x = torch.randn(64, 128, requires_grad=True) * 1
        sum(x.sin().sum() for _ in range(3)).backward()
    assert copies.copied == 2


FORMS = {
    **RECOMPUTED,
    "offload-every-2": {"activation_checkpointing": "offload", "activation_checkpointing_every_n_layers": 2},
    "selective-every-2": {"activation_checkpointing": "selective", "activation_checkpointing_every_n_layers": 2},
}


def attention_runs(settings) -> int:
    model = adapted(settings)
    apply_techniques(model, settings)
    with Operators() as seen:
        model(**batch(0)).loss.backward()
    return seen.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_recomputing_gives_the_same_losses_to_the_bit(base, kind, form):
    assert losses(settings_for(base, **BASES[kind], **FORMS[form])) == plain_losses(base, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_each_form_saves_fewer_bytes_in_the_expected_order(base, kind):
    none, *forms = forecast_saved_bytes(base, kind, {}, *FORMS.values())
    saved_bytes = dict(zip(FORMS, forms, strict=True))
    assert saved_bytes["offload"] < saved_bytes["full"] < saved_bytes["selective"] < saved_bytes["every-2"] < none
    assert saved_bytes["offload-every-2"] < saved_bytes["every-2"] < saved_bytes["selective-every-2"] < none


def test_offload_frees_the_input_of_each_layer_and_full_recomputes_attention_but_selective_does_not(base):
    full, offload = forecast_saved_bytes(base, "lora", FORMS["full"], FORMS["offload"])
    layers, rows, tokens, hidden, itemsize = 4, 2, 64, 128, 4
    assert full - offload == (layers - 1) * rows * tokens * hidden * itemsize
    assert attention_runs(settings_for(base)) == 4
    assert attention_runs(settings_for(base, activation_checkpointing=True)) == 8
    assert attention_runs(settings_for(base, activation_checkpointing=True, activation_checkpointing_every_n_layers=2)) == 6
    assert attention_runs(settings_for(base, activation_checkpointing="selective")) == 4


def test_the_reentrant_form_that_zero_3_needs_trains_alike(base):
    zero_3 = {"strategy": "deepspeed", "zero_stage": 3}
    wanted = settings_for(base, activation_checkpointing=True, launch=zero_3, gpu="rtx-4090")
    assert losses(wanted) == plain_losses(base, "lora")


def test_techniques_can_be_changed_on_one_model(base):
    model = adapted(settings_for(base))
    flags = []
    for changes in ({"activation_checkpointing": True}, FORMS["every-2"], {}, FORMS["offload"]):
        apply_techniques(model, settings_for(base, **changes))
        flags.append([layer.gradient_checkpointing for layer in decoder_layers(model)])
        embedding = model.get_input_embeddings()
        assert len(embedding._forward_hooks) <= 2  # one hook on the input, not one per change
    assert flags == [[True] * 4, [True, False, True, False], [False] * 4, [True] * 4]


EXACT = {
    "16 bit": {},
    "fp16": {"dtype": "float16"},
    "nf4": {"load_in_4bit": True},
    "rsLoRA": {"use_rslora": True},
    **RECOMPUTED,
}
KEPT_CAST = {"dropout": {"lora_dropout": 0.1}, "DoRA": {"use_dora": True}}
settings = functools.partial(settings_for, dtype="bfloat16")


def with_pefts_cast(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        module.__dict__.pop("_cast_input_dtype", None)
    return model


def step(model, wanted) -> tuple[float, torch.Tensor]:
    fill_adapters(model)
    apply_techniques(model, wanted)
    torch.manual_seed(2)
    with step_context(wanted, "cpu"), autocast(wanted):
        loss = model(**batch(0)).loss
        loss.backward()
    return loss.item(), adapter_gradients(model)


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_gradients_are_those_with_pefts_cast_to_the_bit(base, name):
    wanted = settings(base, **EXACT[name])
    loss, gradients = step(adapted(wanted), wanted)
    expected, expected_gradients = step(with_pefts_cast(adapted(wanted)), wanted)
    assert loss == expected and torch.equal(gradients, expected_gradients)
    assert gradients.count_nonzero() > 0.9 * gradients.numel()


@pytest.mark.parametrize("name", ["16 bit", "nf4"])
def test_at_least_14_percent_fewer_bytes_are_saved_in_a_step_and_in_its_forecast(base, name):
    wanted = settings(base, **EXACT[name])
    real, cast = saved_bytes(wanted, adapted(wanted)), saved_bytes(wanted, with_pefts_cast(adapted(wanted)))
    assert real <= 0.86 * cast
    with forecast_model(wanted) as model:
        assert saved_bytes(wanted, model) <= 0.86 * saved_bytes(wanted, with_pefts_cast(model))


@pytest.mark.parametrize("name", KEPT_CAST)
def test_pefts_cast_stays_where_results_would_change(base, name):
    wanted = settings(base, **KEPT_CAST[name])
    model = adapted(wanted)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers and not any("_cast_input_dtype" in vars(layer) for layer in layers)
    expected = step(model, wanted)[0]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    model.zero_grad()
    assert step(model, wanted)[0] != expected


def test_outside_autocast_a_16_bit_model_still_answers(base):
    model = adapted(settings(base)).eval()
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, with_pefts_cast(model)(input_ids=ids).logits)
