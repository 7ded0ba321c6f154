"""Each rearrangement is undone by its inverse, and says beforehand what shape comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.weights.rules import (
    ADD_BATCH,
    CONV1X1_TO_LINEAR,
    CONV_OR_LINEAR,
    LINEAR_TO_CONV1X1,
    MLX_CONV1X1_TO_LINEAR,
    MLX_PRESENT_FRAME,
    OIHW_TO_OHWI,
    PER_CHANNEL_2D,
    PER_CHANNEL_3D,
    PRESENT_FRAME,
    SWAP_HALVES,
    TRANSPOSE,
    Layout,
    Shape,
)

SIDE, ONE = st.integers(1, 5), st.just(1)
FITTING: dict[str, tuple[Layout, st.SearchStrategy[Shape]]] = {
    "oihw_to_ohwi": (OIHW_TO_OHWI, st.tuples(SIDE, SIDE, SIDE, SIDE)),
    "transpose": (TRANSPOSE, st.tuples(SIDE, SIDE)),
    "conv_or_linear": (CONV_OR_LINEAR, st.tuples(SIDE, SIDE, SIDE, SIDE) | st.tuples(SIDE, SIDE)),
    "conv1x1_to_linear": (CONV1X1_TO_LINEAR, st.tuples(SIDE, SIDE, ONE, ONE)),
    "mlx_conv1x1_to_linear": (MLX_CONV1X1_TO_LINEAR, st.tuples(SIDE, ONE, ONE, SIDE)),
    "linear_to_conv1x1": (LINEAR_TO_CONV1X1, st.tuples(SIDE, SIDE)),
    "add_batch": (ADD_BATCH, st.tuples(SIDE, SIDE)),
    "per_channel_2": (PER_CHANNEL_2D, st.tuples(SIDE, ONE, ONE)),
    "per_channel_3": (PER_CHANNEL_3D, st.tuples(SIDE, ONE, ONE, ONE)),
    "swap_halves": (
        SWAP_HALVES,
        st.tuples(SIDE.map(lambda n: 2 * n), SIDE) | st.tuples(SIDE.map(lambda n: 2 * n)),
    ),
}


def counted(shape: Shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("name", FITTING)
@given(data=st.data())
def test_the_inverse_undoes_it_and_the_shape_is_foretold(name: str, data: st.DataObject) -> None:
    layout, shapes = FITTING[name]
    x = counted(data.draw(shapes))
    y = layout.forward(x)
    assert layout.name == name
    assert y.shape == layout.shape(x.shape)
    assert sorted(y.flat) == sorted(x.flat)
    np.testing.assert_array_equal(layout.inverse(y), x)
    np.testing.assert_array_equal(layout.forward(layout.inverse(y)), y)


@pytest.mark.parametrize("name", FITTING)
@given(shape=st.lists(st.integers(0, 4), max_size=5).map(tuple))
def test_shape_refuses_just_what_forward_cannot_do(name: str, shape: Shape) -> None:
    layout, x = FITTING[name][0], counted(shape)
    try:
        foretold = layout.shape(shape)
    except ValueError as error:
        assert str(shape) in str(error)
        return
    assert layout.forward(x).shape == foretold
    np.testing.assert_array_equal(layout.inverse(layout.forward(x)), x)


def test_what_they_do() -> None:
    x = counted((2, 3, 1, 4))
    assert OIHW_TO_OHWI.forward(x)[1, 0, 2, 0] == x[1, 0, 0, 2]
    np.testing.assert_array_equal(CONV1X1_TO_LINEAR.forward(counted((2, 3, 1, 1))), counted((2, 3)))
    np.testing.assert_array_equal(SWAP_HALVES.forward(np.arange(4)), [2, 3, 0, 1])


@pytest.mark.parametrize("kernel", [1, 3])
def test_of_a_video_kernel_the_slice_for_the_present_frame_is_taken(kernel: int) -> None:
    x = counted((2, 4, kernel, kernel, kernel))
    y = PRESENT_FRAME.forward(x)
    assert y.shape == PRESENT_FRAME.shape(x.shape) == (2, kernel, kernel, 4)
    assert y[1, 0, -1, 2] == x[1, 2, -1, 0, -1]
    last = x.transpose(0, 2, 3, 4, 1)
    assert MLX_PRESENT_FRAME.shape(last.shape) == y.shape
    np.testing.assert_array_equal(MLX_PRESENT_FRAME.forward(last), y)
    np.testing.assert_array_equal(MLX_PRESENT_FRAME.inverse(y)[:, -1], last[:, -1])
    back = PRESENT_FRAME.inverse(y)
    assert back.shape == x.shape and not back[:, :, :-1].any()
    np.testing.assert_array_equal(PRESENT_FRAME.forward(back), y)
    for layout, shapes in (
        (PRESENT_FRAME, ((2, 4, 3, 1, 1), (2, 4, 0, 0, 0), (2, 4, 3, 3))),
        (MLX_PRESENT_FRAME, ((2, 3, 1, 1, 4), (2, 0, 0, 0, 4), (2, 3, 3, 4))),
    ):
        for shape in shapes:
            with pytest.raises(ValueError, match="K, K, K"):
                layout.shape(shape)
