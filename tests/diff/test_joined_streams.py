"""Ports that join image and text tokens in the other order."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.measure.streams import in_other_order, joined_streams
from lydite.diff.name_map import Rename
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.pairing_methods import by_joined_shapes
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

TEXT, IMAGE, WIDTH = 4, 6, 16


def attention(x: Any, w: Any) -> Any:
    """Equal for tokens in any order."""
    scores = np.exp(x @ w @ x.swapaxes(-1, -2) / WIDTH)
    return scores / scores.sum(-1, keepdims=True) @ x


def run(
    folder: Path,
    *,
    names: bool,
    image_first: bool,
    wrong: int | None = None,
    dtype: Any = np.float32,
) -> Trace:
    """Three layers of joined tokens, and what the last one returns of the image.

    The port has names of its own; the result of its layer `wrong` is.
    """
    draw, noise = np.random.default_rng(0), np.random.default_rng(1)
    text, image = (draw.standard_normal((1, n, WIDTH)) for n in (TEXT, IMAGE))
    words = {"text": "c", "image": "i", "blocks": "s", "attn": "a", "mlp": "m", "final": "end"}
    with TraceWriter(folder, Header()) as writer:

        def tap(site: str, value: Any) -> Any:
            port_name = ".".join(words.get(word, word) for word in site.split("."))
            writer.add(f"net/{site}" if names else port_name, value := value.astype(dtype))
            return value.astype(np.float64)

        text, image = tap("text", text), tap("image", image)
        x = np.concatenate([image, text] if image_first else [text, image], 1)
        for layer in range(3):
            w = draw.standard_normal((WIDTH, WIDTH))
            x = attention(x, w)
            x = tap(f"blocks.{layer}.attn", x + noise.standard_normal(x.shape) * (layer == wrong))
            x = tap(f"blocks.{layer}.mlp", np.tanh(x @ w) * 3)
        tap("final", x[:, :IMAGE] if image_first else x[:, TEXT:])
    return Trace.open(folder)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_port_may_join_its_streams_in_either_order(dtype: Any, tmp_path: Path) -> None:
    reference = run(tmp_path / "ref", names=True, image_first=False)
    port = run(tmp_path / "port", names=False, image_first=True, dtype=dtype)
    verdict = compare(reference, port)
    assert verdict.verdict == "agree", verdict.sentence
    orders = [row.note for row in verdict.rows if "joined in the other order" in row.note]
    assert len(orders) == 6


def test_a_bug_is_found_behind_streams_in_the_other_order(tmp_path: Path) -> None:
    reference = run(tmp_path / "ref", names=True, image_first=False)
    verdict = compare(reference, run(tmp_path / "port", names=False, image_first=True, wrong=2))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "s.2.a"), verdict.sentence


def test_one_value_in_another_order_is_a_bug(tmp_path: Path) -> None:
    """A layer that exchanges its streams, and takes the wrong ones apart after it."""
    reference = run(tmp_path / "ref", names=True, image_first=False)
    port = run(tmp_path / "port", names=False, image_first=False)
    with TraceWriter(tmp_path / "bug", Header()) as writer:
        for event in port.events:
            value = port.read(event)
            is_last = event.name == "s.2.m"
            writer.add(event.name, np.roll(value, 6, 1) if is_last else value)
    verdict = compare(reference, Trace.open(tmp_path / "bug"))
    assert not any("joined" in row.note for row in verdict.rows)


def test_which_tokens_may_be_two_streams(tmp_path: Path) -> None:
    reference = run(tmp_path / "ref", names=True, image_first=False)
    assert joined_streams(reference) == {TEXT + IMAGE: (TEXT, IMAGE)}
    with TraceWriter(tmp_path / "heads", Header()) as writer:  # joined in attention alone
        for name, shape in (("text", (1, 3, 8)), ("image", (1, 7, 8)), ("q", (1, 2, 10, 4))):
            writer.add(name, np.zeros(shape))
    assert joined_streams(Trace.open(tmp_path / "heads")) == {10: (3, 7)}
    scores = np.arange(2 * 3 * 25).reshape(2, 3, 5, 5)
    both = np.roll(scores, (-2, -2), (2, 3))
    assert np.array_equal(in_other_order(scores, 5, 2), both)
    square = np.arange(25).reshape(1, 5, 5)  # tokens and width: only the tokens move
    assert np.array_equal(in_other_order(square, 5, 2), np.roll(square, -2, 1))


@pytest.mark.parametrize("is_after", [True, False])
def test_what_a_block_returns_comes_after_its_parts(is_after: bool, tmp_path: Path) -> None:
    """A value with the tokens of both streams, before or after the layer of the block."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal((3, 1, TEXT + IMAGE, WIDTH)).astype(np.float32)
    traces: list[Trace] = []
    for name in ("r", "p"):
        with TraceWriter(tmp_path / name, Header()) as writer:
            for n in range(2):
                if name == "r":
                    writer.add(f"net/blocks.{n}.attn.proj", values[0])
                    writer.add(f"net/blocks.{n}.attn", values[1, :, TEXT:])
                    writer.add(f"net/blocks.{n}.attn", values[1, :, :TEXT], slot="out.1")
                else:
                    both = {f"b.{n}.out": values[0], f"b.{n}.mix": values[2]}
                    for path in sorted(both, reverse=is_after):
                        writer.add(path, both[path])
        traces.append(Trace.open(tmp_path / name))
    names = NamePairs(traces[0], traces[1])
    for n in range(2):
        names.found[f"b.{n}.out"] = Rename((Site(f"net/blocks.{n}.attn.proj"),), how="weights")
    by_joined_shapes(names)
    assert ("b.0.mix" in names.found) == is_after
