import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.slot_classes import (
    PoolTooSmallError,
    pool_layout,
    smallest_pool_bytes,
    wasted_share,
    whole_pool_bytes,
)
from io_worker.slabs import ExpertTensor, LayerSlabs, SlabTable
from shm.pool import window_bytes

MiB = 1 << 20
N_COLS = 256
# OLMoE Q4_K_M: 1024 x 2048 weights per matrix; Q4_K 144, Q6_K 210 bytes per 256 weights
Q4_K, Q6_K = 1024 * 2048 // 256 * 144, 1024 * 2048 // 256 * 210


def table_of(n_experts: int, *layers: tuple[int, int, int]) -> SlabTable:
    """A table whose layers have these gate, up and down bytes per expert."""
    return SlabTable(
        n_experts,
        tuple(
            LayerSlabs(
                index,
                *[ExpertTensor(0, 0, n_bytes, 0, n_bytes // N_COLS, N_COLS) for n_bytes in ranges],
            )
            for index, ranges in enumerate(layers)
        ),
    )


OLMOE = table_of(64, *[(Q4_K, Q4_K, Q6_K if layer % 2 else Q4_K) for layer in range(16)])


def test_equal_slabs_share_one_class() -> None:
    table = table_of(16, *[(4096, 4096, 8192)] * 4)
    layout, class_of_layer = pool_layout(table, 2, whole_pool_bytes(table))
    assert class_of_layer == (0, 0, 0, 0)
    assert [cls.n_slots for cls in layout.classes] == [64]
    assert layout.classes[0].windows == tuple(window_bytes(n) for n in (4096, 4096, 8192))


def test_sizes_far_apart_stay_apart_and_hold_the_same_share() -> None:
    layout, class_of_layer = pool_layout(OLMOE, 8, whole_pool_bytes(OLMOE) // 2)
    assert class_of_layer == (0, 1) * 8
    small, large = [cls.n_slots for cls in layout.classes]
    assert abs(small - large) <= 1
    assert 250 <= small <= 256


def test_sizes_closer_than_five_percent_share_slots() -> None:
    table = table_of(64, (MiB, MiB, MiB), (MiB, MiB, MiB + MiB // 10))
    layout, class_of_layer = pool_layout(table, 2, whole_pool_bytes(table) // 2)
    assert class_of_layer == (0, 0)
    assert layout.classes[0].windows[2] == window_bytes(MiB + MiB // 10)


def test_a_chain_of_small_steps_does_not_add_up() -> None:
    sizes = [MiB * (100 + 3 * step) // 100 for step in range(5)]
    table = table_of(64, *[(size, size, size) for size in sizes])
    layout, class_of_layer = pool_layout(table, 2, whole_pool_bytes(table))
    assert class_of_layer == (0, 0, 1, 1, 2)
    assert wasted_share(table, layout, class_of_layer) < 0.03


def test_a_class_with_too_few_slots_moves_into_the_next_larger() -> None:
    table = table_of(64, (MiB, MiB, MiB), *[(2 * MiB, 2 * MiB, 2 * MiB)] * 15)
    # 64 of 1,024 experts: the small class would get about 4 slots, 16 are wanted
    layout, class_of_layer = pool_layout(table, 8, 64 * 6 * MiB)
    assert len(layout.classes) == 1
    assert set(class_of_layer) == {0}


def test_a_short_largest_class_takes_in_the_next_smaller() -> None:
    table = table_of(64, *[(MiB, MiB, MiB)] * 15, (2 * MiB, 2 * MiB, 2 * MiB))
    layout, _ = pool_layout(table, 8, 64 * 6 * MiB)
    assert len(layout.classes) == 1
    assert layout.classes[0].windows == (window_bytes(2 * MiB),) * 3


def test_a_class_that_holds_all_its_experts_is_never_short() -> None:
    table = table_of(4, (MiB, MiB, MiB), (2 * MiB, 2 * MiB, 2 * MiB))
    layout, class_of_layer = pool_layout(table, 4, whole_pool_bytes(table))
    assert class_of_layer == (0, 1)
    assert [cls.n_slots for cls in layout.classes] == [4, 4]


def test_unlike_shapes_of_equal_slabs_are_not_merged_at_a_loss() -> None:
    table = table_of(8, (MiB, MiB, 3 * MiB), (3 * MiB, MiB, MiB))
    _, class_of_layer = pool_layout(table, 2, whole_pool_bytes(table))
    assert sorted(class_of_layer) == [0, 1]


def test_the_smallest_pool_has_two_slots_that_fit_every_layer() -> None:
    n_bytes = smallest_pool_bytes(OLMOE)
    layout, class_of_layer = pool_layout(OLMOE, 8, n_bytes)
    assert layout.total_bytes == n_bytes
    assert [cls.n_slots for cls in layout.classes] == [2]
    assert set(class_of_layer) == {0}
    with pytest.raises(PoolTooSmallError) as caught:
        pool_layout(OLMOE, 8, n_bytes - 1)
    assert caught.value.needed_bytes == n_bytes
    assert str(n_bytes) in str(caught.value)


def test_waste_of_slabs_above_a_mebibyte_is_at_most_three_percent() -> None:
    for share in (0.1, 0.4, 1.0):
        layout, class_of_layer = pool_layout(OLMOE, 8, int(whole_pool_bytes(OLMOE) * share))
        assert 0 < wasted_share(OLMOE, layout, class_of_layer) <= 0.03


tables = st.builds(
    table_of,
    st.integers(1, 12),
    st.tuples(*[st.sampled_from([100, 4096, 4097, 5000, 60_000, 62_000, 90_000])] * 3),
    st.tuples(*[st.sampled_from([100, 4096, 4097, 5000, 60_000, 62_000, 90_000])] * 3),
    st.tuples(*[st.integers(32, 200_000)] * 3),
    st.tuples(*[st.integers(32, 200_000)] * 3),
)


@settings(max_examples=300, deadline=None)
@given(table=tables, n_active=st.integers(1, 4), share=st.floats(0, 1.2))
def test_every_layout_keeps_the_rules(table: SlabTable, n_active: int, share: float) -> None:
    smallest, whole = smallest_pool_bytes(table), whole_pool_bytes(table)
    pool_bytes = int(smallest + share * max(0, whole - smallest))
    layout, class_of_layer = pool_layout(table, n_active, pool_bytes)
    assert layout.total_bytes <= pool_bytes
    assert set(class_of_layer) == set(range(len(layout.classes)))
    for index, cls in enumerate(layout.classes):
        layers = [
            layer for layer, at in zip(table.layers, class_of_layer, strict=True) if at == index
        ]
        n_experts = table.n_experts * len(layers)
        assert cls.n_slots <= n_experts
        if len(layout.classes) > 1:
            assert cls.n_slots >= min(2 * n_active, n_experts)
        assert cls.n_slots >= min(2, n_experts)
        for layer in layers:
            for window, n_bytes in zip(cls.windows, layer.range_bytes, strict=True):
                assert window >= window_bytes(n_bytes)
        # what is left over would not hold one more slot of a class that still wants one
        if cls.n_slots < n_experts:
            assert pool_bytes - layout.total_bytes < cls.slot_bytes + 4096
    if pool_bytes >= whole:
        assert layout.n_slots == table.n_experts * len(table.layers)
    assert 0 <= wasted_share(table, layout, class_of_layer) < 1


@settings(max_examples=100, deadline=None)
@given(table=tables, n_active=st.integers(1, 4), share=st.floats(0.001, 0.999))
def test_more_bytes_never_leave_the_worst_class_with_less(
    table: SlabTable, n_active: int, share: float
) -> None:
    smallest, whole = smallest_pool_bytes(table), whole_pool_bytes(table)
    less = int(smallest + share * max(0, whole - smallest))
    layout, classes = pool_layout(table, n_active, less)
    more, more_classes = pool_layout(table, n_active, less + 200_000)
    if classes == more_classes:  # within one set of classes
        n_layers = [classes.count(index) for index in range(len(layout.classes))]
        shares = [
            min(cls.n_slots / n for cls, n in zip(either.classes, n_layers, strict=True))
            for either in (layout, more)
        ]
        assert shares[0] <= shares[1]
