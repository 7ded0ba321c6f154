"""Axis orders: given by names, found by search, and undone for injection."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.diff.measure.axes import best_fit, fit_dims, fits_of, is_packed, part_of, possible_fits


@settings(deadline=None)  # a busy machine is slow
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_axis_order_is_found_and_undone(shape: list[int], random: object) -> None:
    reference = np.random.default_rng(1).standard_normal(shape)
    for order in list(permutations(range(len(shape))))[:8]:
        port = reference.transpose(order)
        fit, error = best_fit(possible_fits(port.shape, reference.shape), port, reference)
        assert fit is not None and error == 0.0
        assert np.array_equal(fit.apply(port), reference)
        assert np.array_equal(fit.undo(reference, port.shape), port)


@pytest.mark.parametrize(
    ("port", "reference"),
    [
        ((2, 7, 3, 5), (2, 7, 15)),  # heads split
        ((2, 7, 15), (2, 3, 7, 5)),  # heads merged here, split and moved there
        ((2, 24, 8), (2, 8, 4, 6)),  # tokens against channels first
        ((1, 2, 24, 8), (2, 24, 8)),  # a batch of one in front
        ((7, 3), (7, 1, 3)),
    ],
)
def test_merged_and_moved_axes_are_found(port: tuple[int, ...], reference: tuple[int, ...]) -> None:
    theirs = np.random.default_rng(0).standard_normal(reference)
    fits = possible_fits(port, reference)
    assert fits
    for fit in fits:
        ours = fit.undo(theirs, port)
        assert ours.shape == port
        found, error = best_fit(fits, ours, theirs)
        assert found is not None and error == 0.0 and np.array_equal(found.apply(ours), theirs)


def test_sizes_that_differ_do_not_fit() -> None:
    assert possible_fits((2, 3), (2, 4)) == ()


def test_equal_shapes_are_taken_as_they_are_first() -> None:
    fits = possible_fits((4, 4), (4, 4))
    assert fits[0].order == (0, 1) and not fits[0].note and len(fits) == 2


def test_channels_last_is_the_first_guess_for_channels_first() -> None:
    first = possible_fits((1, 6, 6, 3), (1, 3, 6, 6))[0]
    value = np.arange(108).reshape(1, 6, 6, 3)
    assert np.array_equal(first.apply(value), value.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("port", "dims", "reference", "ref_dims", "order"),
    [
        ((2, 4, 6, 3), "b h w c", (2, 3, 4, 6), "b c h w", (0, 3, 1, 2)),
        ((2, 5, 12), "b s (h d)", (2, 3, 5, 4), "b h s d", None),
        ((2, 5, 4), "b s d", (10, 4), "(b s) d", None),
    ],
)
def test_axis_names_settle_the_order(
    port: tuple[int, ...],
    dims: str,
    reference: tuple[int, ...],
    ref_dims: str,
    order: tuple[int, ...] | None,
) -> None:
    fit = fit_dims(port, dims, reference, ref_dims)
    assert fit is not None
    value = np.arange(np.prod(port)).reshape(port)
    seen = fit.apply(value)
    assert seen.shape == reference and np.array_equal(fit.undo(seen, port), value)
    if order:
        assert np.array_equal(seen, value.transpose(order))
    else:
        assert np.array_equal(np.sort(seen, axis=None), np.arange(value.size))


@pytest.mark.parametrize(
    ("dims", "ref_dims"),
    [("b h w c", "n c h w"), ("b h c", "b c h w"), ("b ... c", "b c ..."), ("b h w c", None)],
)
def test_axis_names_that_settle_nothing_are_left_to_the_search(
    dims: str, ref_dims: str | None
) -> None:
    assert fit_dims((2, 4, 6, 3), dims, (2, 3, 4, 6), ref_dims) is None


def test_a_large_value_is_searched_by_a_sample() -> None:
    reference = np.random.default_rng(2).standard_normal((3, 32, 40, 17)).astype(np.float32)
    port = np.ascontiguousarray(reference.transpose(0, 2, 3, 1))
    fit, error = best_fit(possible_fits(port.shape, reference.shape), port, reference)
    assert fit is not None and error == 0.0
    assert np.array_equal(fit.apply(port), reference)


@pytest.mark.parametrize(
    ("port", "reference", "axis", "part"),
    [
        ((1, 5, 7), (2, 5, 7), 0, (1, 5, 7)), ((5, 7), (8, 5, 7), 0, (1, 5, 7)),
        ((5, 7), (9, 5, 7), 0, None),  # too many parts
        ((2, 5, 7), (2, 5, 7), 0, None), ((2, 5, 7), (1, 5, 7), 0, None),
        ((7, 5), (2, 5, 7), 0, (1, 5, 7)), ((35,), (2, 5, 7), 0, None),
        ((2, 5, 4), (2, 5, 8), -1, (2, 5, 4)), ((2, 5, 4), (2, 5, 12), -1, (2, 5, 4)),
        ((2, 5, 3), (2, 5, 8), -1, None), ((4,), (8,), -1, None), ((4,), (8,), 0, (4,)),
        ((0,), (8,), 0, None), ((4,), (), 0, None),
    ],
)  # fmt: skip
def test_an_equal_part_of_the_references_value(
    port: tuple[int, ...], reference: tuple[int, ...], axis: int, part: tuple[int, ...] | None
) -> None:
    assert part_of(port, reference, axis) == part
    fits, (count, along) = fits_of(port, reference)
    if part is not None and (axis == 0 or part_of(port, reference, 0) is None):
        assert (count, along) == (reference[axis] // part[axis], axis) and fits
    elif part is None and part_of(port, reference, -1 - axis) is None:
        assert (count, along) == (1, 0)


def test_tokens_of_a_batch_as_pictures() -> None:
    tokens = np.random.default_rng(0).standard_normal((3, 20, 16))
    picture = tokens.reshape(3, 4, 5, 4, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(3, 4, 1, 8, 10)
    for port, reference in ((picture, tokens), (tokens, picture)):
        assert best_fit(possible_fits(port.shape, reference.shape), port, reference)[1] < 1e-6
        assert is_packed(port.shape, reference.shape)
    assert not is_packed((3, 20, 16), (3, 4, 5, 16))
