"""What is between the value that a port uses and the one it should use."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Evidence, Recorded
from lydite.diff.findings.replay.relations import relation
from support.findings import evidence

torch.manual_seed(0)
X, Y, Z = (torch.randn(2, 12, 16) for _ in range(3))
RIGHT = torch.randn(2, 12, 16)


def around(before: dict[str, torch.Tensor], right: torch.Tensor = RIGHT) -> Evidence:
    """The evidence of net.end, after these values."""
    values = [Recorded(name, value.numpy()) for name, value in before.items()]
    e = evidence(right.numpy(), torch.randn(right.shape).numpy())
    return replace(e, name="net.end", before=lambda: values)


@pytest.mark.parametrize(
    ("right", "says"),
    [
        (F.layer_norm(X, (16,)) * 3, "layer norm lies between the two"),
        (F.silu(X), "silu lies between the two"),
        (X + Y, "net.y is not added"),
        (X - Y, "already added net.y"),
        (X * Y, "multiplies that by net.y"),
        (X * 5, "is 5 × that"),
        (X * (torch.arange(12) < 9)[:, None], "sets 25% of its numbers to zero"),
        (Z, ""),
    ],
)
def test_the_operation_between(right: torch.Tensor, says: str) -> None:
    words = relation(around({"net.x": X, "net.y": Y}, right), "net.x", "net.end")
    assert says in words if says else not words, words


def test_modules_that_are_not_run() -> None:
    names = {"a [in.0]": X, "a": Y, "b [in.0]": Y, "b": Z, "c": X}
    assert "before a to b: this layer is not run" in relation(around(names), "c", "b")
    assert "before b: this layer is not run" in relation(around(names), "a", "b")
    assert "after b: run too early" in relation(around(names), "b", "a")


def test_a_norm_without_a_weight_that_is_not_run() -> None:
    names = {"a [in.0]": X, "a": F.layer_norm(X, (16,)), "b [in.0]": F.layer_norm(X, (16,))}
    assert "before a: this norm is not run" in relation(around({"c": X, **names}), "c", "a")


def test_a_norm_between_values_in_another_order_of_axes() -> None:
    picture = torch.randn(2, 8, 5, 6)
    last = picture.movedim(1, -1)
    normed = F.layer_norm(last, (8,))
    names = {"n [in.0]": last, "n": normed, "act [in.0]": normed.movedim(-1, 1)}
    words = relation(around(names), "n [in.0] with channels first", "act [in.0]")
    assert "before n: this norm is not run" in words


def test_two_parts_of_one_table() -> None:
    table = torch.randn(1, 12, 16)
    names = {"net.table": table, "net.a [in.0]": table[:, :3], "net.b [in.0]": table[:, 10:]}
    words = relation(around(names), "net.a [in.0]", "net.b [in.0]")
    assert "the port's is rows 0 to 2 of net.table, the reference's rows 10 to 11" in words
    other = around(names | {"net.b [in.0]": torch.randn(1, 2, 16)})
    assert not relation(other, "net.a [in.0]", "net.b [in.0]")


def test_names_that_differ_in_one_number() -> None:
    e = around({})
    assert "another layer or block, number 2, not 3" in relation(e, "net.2.x", "net.3.x")
    assert "earlier or later step, 0, not 1" in relation(e, "net.2.x, step 0", "net.2.x, step 1")
    assert not relation(e, "net.2.x", "net.3.y") and not relation(e, "a.1.b.2", "a.2.b.3")


def test_the_value_of_the_step_before() -> None:
    old = torch.randn(2, 12, 16)
    e = replace(around({"net.end, step 0": old}), port=old.numpy(), step=1)
    assert "net.end, step 0" in find(e)[0].evidence


def test_two_values_that_begin_with_the_same_padding() -> None:
    first, other = torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    first[0, :2] = other[0, :2] = 0
    named = {"net.z": Z, "net.later": first, "net.earlier": other}
    e = replace(around(named, first + Z), port=(other + Z).numpy())
    found = find(e)
    assert found and "net.earlier" in found[0].evidence, found


def test_attention_from_what_its_function_takes() -> None:
    q, k, v = (torch.randn(1, 4, 12, 8) for _ in range(3))
    q[..., 4:] *= 2  # as after a rotation that is not recorded

    def some(mask: torch.Tensor | None) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)[:, 5:]

    mask = (torch.arange(12) < 10)[None, None, None]
    names = {"net.attn.f [in.attn_mask]": mask.float(), "net.attn.f [in.v]": v}
    names |= {"net.attn.f [in.k]": k, "net.attn.f [in.q]": q}
    e = replace(around(names, some(mask)), name="net.attn.to_out.0", slot="in.0")
    text = find(replace(e, port=some(None).numpy()))[0].evidence
    assert "without the recorded mask" in text
    assert not find(replace(e, port=np.random.default_rng(0).normal(size=e.port.shape)))


def test_a_layer_of_one_row_of_the_batch() -> None:
    x, weight, bias = torch.randn(2, 16), torch.randn(40, 16), torch.randn(40)
    e = around({"net.end [in.0]": x}, F.linear(x[1:], weight, bias))
    parameters = {"weight": weight.double().numpy(), "bias": bias.double().numpy()}
    e = replace(e, parameters=lambda: parameters, port=F.linear(x[1:], weight).numpy())
    assert find(e)[0].cause == "bias-missing"


def test_a_block_between_values_in_another_order_of_axes() -> None:
    picture, result = torch.randn(2, 8, 5, 6), torch.randn(2, 8, 5, 6)
    names = {"net.3 [in.0]": picture, "net.3": result}
    named = {"net.3.q [in.0]": picture.movedim(1, -1), **names}
    words = relation(around(named), "net.3.q [in.0] with channels first", "net.3")
    assert "before net.3: this block is not run" in words
