"""The longest rows train in the first two steps, and every row once an epoch, in an order that is the seed's."""

import random

import pytest

from finetune.methods.row_order import LongestEarly

BATCH = 4


def orders(lengths, epochs=2, seed=3, steps=1000):
    sampler, epochs_order = LongestEarly(lengths, seed, BATCH, steps), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        epochs_order.append(list(sampler))
    return epochs_order


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 40])
def test_every_row_trains_once_an_epoch(rows):
    for seed in range(20):
        lengths = random.Random(seed).choices(range(100), k=rows)
        assert all(sorted(order) == list(range(rows)) for order in orders(lengths, seed=seed))


def test_the_longest_row_ends_step_two_also_of_a_short_epoch_or_run_and_the_next_one_starts_step_one():
    for seed in range(20):
        lengths = random.Random(seed).sample(range(1000), 40)
        first = orders(lengths, seed=seed)[0]
        ranked = sorted(range(40), key=lambda row: -lengths[row])
        assert (first[2 * BATCH - 1], first[0]) == tuple(ranked[:2])
    assert orders([1, 9, 2, 3, 4])[0][-1] == 1  # step 2 is a single row
    assert [orders([1, 9, 2])[0][0], orders([1, 9, 2])[1][-1]] == [1, 1]  # step 2 is the second epoch
    assert orders(list(range(40)), steps=1)[0][0] == 39
    pixels = [0] * 40
    pixels[7] = 9
    assert {39, 7} <= set(list(LongestEarly(list(range(40)), 3, BATCH, 1, pixels))[:BATCH])


@pytest.mark.parametrize("rows", [5, 7, 8, 9, 40])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_the_row_with_most_pixels_is_in_the_first_two_steps_beside_the_longest(rows, batch):
    for seed in range(20):
        drawn = random.Random(seed)
        lengths, pixels = drawn.sample(range(1000), rows), drawn.sample(range(1000), rows)
        order = list(LongestEarly(lengths, seed, batch, 1000, pixels))
        longest, largest = lengths.index(max(lengths)), pixels.index(max(pixels))
        assert sorted(order) == list(range(rows)) and {longest, largest} <= set(order[: 2 * batch])
        assert longest in order[batch : 2 * batch]


def test_the_order_is_a_function_of_the_seed_and_differs_by_epoch():
    lengths = list(range(40))
    assert orders(lengths) == orders(lengths) != orders(lengths, seed=4)
    assert orders(lengths)[0] != orders(lengths)[1]


def test_the_rows_of_a_step_are_sorted_by_length_and_are_those_of_the_random_order():
    lengths = random.Random(1).choices(range(100), k=43)
    for order in orders(lengths):
        steps = [order[start : start + BATCH] for start in range(0, 43, BATCH)]
        sorted_by_length = [sorted(step, key=lambda row: lengths[row]) for step in steps[1:]]
        assert [[lengths[row] for row in step] for step in steps[1:]] == [[lengths[row] for row in s] for s in sorted_by_length]
    unsorted = orders([1] * 43)[1]  # equal lengths: as drawn
    assert [set(unsorted[s : s + BATCH]) for s in range(0, 43, BATCH)] == [
        set(orders(lengths)[1][s : s + BATCH]) for s in range(0, 43, BATCH)
    ]
