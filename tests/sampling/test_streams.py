"""Noise streams: what each program draws, image by image and step by step."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.noise import STREAMS, NoiseStreams, TorchGenerator

SHAPE = (4, 3, 5)


def drawn(rule: str, seeds: list[int], steps: int = 3) -> list[np.ndarray]:
    streams = NoiseStreams(seeds, SHAPE, lambda normals: normals, STREAMS[rule])
    return [streams.first(), *(streams(2.0, 1.0) for _ in range(steps))]


@pytest.mark.parametrize("rule", ("lydite", "diffusers", "a1111"))
def test_an_image_does_not_depend_on_its_batch(rule: str):
    together, alone = drawn(rule, [7, 8, 9]), drawn(rule, [8])
    for batch, single in zip(together, alone, strict=True):
        np.testing.assert_array_equal(batch[1:2], single)


@pytest.mark.parametrize("rule", ("k-diffusion", "comfyui"))
def test_a_whole_batch_from_one_stream_does(rule: str):
    together, alone = drawn(rule, [7, 7]), drawn(rule, [7])
    assert together[0].shape == (2, *SHAPE)
    assert not np.array_equal(together[2][:1], alone[2])
    assert not np.array_equal(together[0][0], together[0][1])  # one seed, two images


@pytest.mark.parity
def test_every_rule_draws_as_torch_would():
    torch = pytest.importorskip("torch")

    def generator(seed: int) -> Any:
        return torch.Generator().manual_seed(seed)

    def randn(shape: tuple[int, ...], source: Any) -> np.ndarray:
        return torch.randn(shape, generator=source).numpy()

    def each(sources: list[Any], count: int) -> list[np.ndarray]:
        return [np.stack([randn(SHAPE, source) for source in sources]) for _ in range(count)]

    own = [generator(7), generator(8)]
    whole, first, later = generator(7), generator(7), generator(8)
    theirs = {
        "lydite": each(own, 4),
        "k-diffusion": [randn((2, *SHAPE), whole) for _ in range(4)],
        "comfyui": [randn((2, *SHAPE), source) for source in (first, later, later, later)],
    }
    for rule, wanted in theirs.items():
        for ours, values in zip(drawn(rule, [7, 8]), wanted, strict=True):
            np.testing.assert_allclose(ours, values, rtol=0, atol=4e-6, err_msg=rule)


def test_comfyui_would_repeat_the_first_noise_without_its_plus_one():
    streams = NoiseStreams([7], SHAPE, lambda normals: normals, STREAMS["comfyui"])
    first, second = streams.first(), streams(2.0, 1.0)
    np.testing.assert_array_equal(first[0], TorchGenerator(7).randn((1, *SHAPE))[0])
    np.testing.assert_array_equal(second[0], TorchGenerator(8).randn((1, *SHAPE))[0])


def test_the_sampler_can_draw_before_the_first_noise_where_the_two_are_apart():
    late = NoiseStreams([7], SHAPE, lambda normals: normals, STREAMS["comfyui"])
    np.testing.assert_array_equal(late(2.0, 1.0), drawn("comfyui", [7])[1])


def test_the_largest_seed_goes_round():
    _, after, *_ = drawn("comfyui", [2**64 - 1])
    np.testing.assert_array_equal(after[0], TorchGenerator(0).randn(SHAPE))


def test_noise_arrives_in_the_callers_library_and_layout():
    streams = NoiseStreams([1, 2], SHAPE, lambda normals: mx.array(normals.transpose(0, 2, 3, 1)))
    first = streams.first()
    assert isinstance(first, mx.array)
    assert first.dtype == mx.float32
    assert first.shape == (2, 3, 5, 4)
    np.testing.assert_array_equal(np.array(first)[1].transpose(2, 0, 1), drawn("lydite", [2])[0][0])


def test_no_seed_is_refused():
    with pytest.raises(InputError, match="at least one seed"):
        NoiseStreams([], SHAPE, lambda normals: normals)
