"""Out of memory explained from the allocator's snapshot: the request, the fragments, the expectation, the holders."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from finetune.events import Memory, OutOfMemory
from finetune.run.out_of_memory import MOST_HOLDERS, explanation_lines, holders, out_of_memory_event
from finetune.units import GIB, MIB


def block(size, state="active_allocated", frames=()):
    return {"size": size, "state": state, "frames": list(frames)}


def segment(*blocks, stream=0, kind="large"):
    """As torch 2.13 writes it, without what is not read."""
    active = sum(block["size"] for block in blocks if block["state"] != "inactive")
    return {"allocated_size": active, "stream": stream, "segment_type": kind, "blocks": list(blocks)}


def free(size):
    return block(size, "inactive")


def snapshot(*segments, traces=()):
    return {"segments": list(segments), "device_traces": [list(traces)]}


FRAGMENTED = snapshot(
    segment(block(600 * MIB), free(900 * MIB), block(100 * MIB)),
    segment(free(700 * MIB), block(GIB)),
    segment(block(MIB // 2), free(3 * MIB // 2), kind="small"),
    segment(free(4 * GIB), stream=7),
)


def described(snapshot, error="CUDA out of memory. Tried to allocate 1.00 GiB", reserved=0, **card):
    """The event of this failure in a run that may reserve 9 GiB."""
    settings = SimpleNamespace(per_device_train_batch_size=1, max_length=8)
    plan = SimpleNamespace(settings=settings, forecast=None, usable_bytes=10 * GIB, card=SimpleNamespace(context_bytes=GIB))
    return out_of_memory_event(RuntimeError(error), "train", plan, Memory(reserved_bytes=reserved, **card), snapshot)


def explanation(event):
    return " ".join(explanation_lines(event))


def test_free_memory_of_other_streams_and_of_small_requests_is_not_usable():
    large, small = described(FRAGMENTED, reserved=9 * GIB), described(FRAGMENTED, "you tried to allocate 10000 bytes")
    assert (large.free_bytes, large.free_blocks) == (4 * GIB + 1600 * MIB + 3 * MIB // 2, 4)
    assert (large.largest_free_block_bytes, large.largest_usable_block_bytes) == (4 * GIB, 900 * MIB)
    assert (large.asked_bytes, large.fragmented) == (GIB, True)
    assert (small.asked_bytes, small.largest_usable_block_bytes, small.fragmented) == (10_000, 3 * MIB // 2, False)


def test_what_another_stream_still_uses_is_neither_free_nor_held():
    event = described(snapshot(segment(block(GIB), block(2 * GIB, "active_awaiting_free"), free(MIB))))
    assert event.free_bytes == MIB and event.holders == {"one of 1.00 GiB": GIB}


def frame(file, line, name):
    return {"filename": file, "line": line, "name": name}


def test_holders_are_named_by_the_line_that_allocated_them_or_by_size():
    torch_first = [
        frame("/x/site-packages/torch/nn/functional.py", 9, "linear"),
        frame("/x/peft/tuners/lora/bnb.py", 540, "forward"),
    ]
    native = [frame("??", 0, "c10::cuda::malloc"), frame("CUDAAllocator.cpp", 3, "malloc")]
    shown = snapshot(
        segment(*(block(MIB, frames=torch_first) for _ in range(5)), *(block(2 * MIB, frames=native) for _ in range(4))),
        segment(block(MIB, frames=[frame("C:\\w\\peft\\tuners\\lora\\bnb.py", 1, "x")])),
    )
    assert holders(shown) == {"4 x 2 MiB": 8 * MIB, "lora/bnb.py:540 forward": 5 * MIB, "lora/bnb.py:1 x": MIB}


def test_only_the_largest_holders_are_named():
    named = holders(snapshot(segment(*(block(size * MIB) for size in range(1, 40)))))
    assert len(named) == MOST_HOLDERS and list(named.values()) == sorted(named.values(), reverse=True)
    assert next(iter(named.values())) == 39 * MIB


def test_with_the_history_the_request_is_known_to_the_byte():
    traces = [
        {"action": "oom", "device_free": 0, "size": 5, "time_us": 10, "frames": []},
        {"action": "alloc", "size": 7, "time_us": 30},
        {"action": "oom", "device_free": 0, "size": 123_456_789, "time_us": 20, "frames": []},
    ]
    assert described(snapshot(traces=traces)).asked_bytes == 123_456_789
    assert described(snapshot(traces=traces[1:2])).asked_bytes == GIB and described({}, "CUDA error").asked_bytes is None


@pytest.mark.parametrize(("reserved", "card_free", "reservable"), [(7, 5, 2), (7, 1, 1), (10, 4, 0), (7, None, 2)])
def test_room_is_what_the_limit_and_the_card_both_leave(reserved, card_free, reservable):
    card = {} if card_free is None else {"card_total_bytes": 24 * GIB, "card_used_bytes": (24 - card_free) * GIB}
    assert described(FRAGMENTED, reserved=reserved * GIB, **card).room_bytes == reservable * GIB


def out_of_memory(free=0, usable=0, **more):
    """A failed request of 1 GiB; `free`: bytes of the only free block, `usable`: bytes of it that may be used."""
    free = {"free_bytes": free, "free_blocks": 1, "largest_free_block_bytes": free, "largest_usable_block_bytes": usable}
    return OutOfMemory(
        phase="train", asked_bytes=GIB, forecast_allocated_bytes=20 * GIB, forecast_reserved_bytes=21 * GIB,
        peak_allocated_bytes=20 * GIB, peak_reserved_bytes=22 * GIB, **{**free, "fragmented": False, **more},
    )  # fmt: skip


def test_fragmentation_is_named_with_the_pieces():
    message = explanation(
        out_of_memory(
            free_bytes=1600 * MIB, free_blocks=3, largest_free_block_bytes=900 * MIB, largest_usable_block_bytes=900 * MIB,
            fragmented=True, room_bytes=100 * MIB, holders={"32 x 448 MiB": 14 * GIB},
        )
    )  # fmt: skip
    assert message.startswith("An allocation of 1.00 GiB failed in phase train, 100 MiB more could be reserved. Fragmentation")
    assert "3 pieces" in message and "has 900 MiB" in message and "32 x 448 MiB (14.0 GiB)" in message
    assert "expected 20.0 GiB allocated and 21.0 GiB reserved at most" in message and "more than forecast" not in message


def test_more_than_forecast_and_too_little_altogether_are_distinguished_from_fragmentation():
    message = explanation(out_of_memory(free=MIB, usable=MIB))
    assert "too little in total" in message and "Fragmentation" not in message
    assert "Fragmentation" not in explanation(out_of_memory()) and "No reserved memory is free" in explanation(out_of_memory())
    assert "more than forecast" in explanation(replace(out_of_memory(), peak_allocated_bytes=21 * GIB))


def test_a_large_block_that_could_not_be_used_has_its_reason():
    assert "belongs to another stream or to small requests" in explanation(out_of_memory(free=4 * GIB))
    assert "has freed its tensors" in explanation(out_of_memory(free=4 * GIB, usable=4 * GIB))


def test_nothing_but_the_error_is_known_on_a_cpu():
    assert explanation(OutOfMemory(phase="load")) == "Memory ran out in phase load."
    assert explanation(OutOfMemory(asked_bytes=GIB)) == "An allocation of 1.00 GiB failed."
