"""Tables of cosines and sines keep their counterpart when they are wrong, in any layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

TOKENS, PAIRS = 12, 8
X = np.random.default_rng(5).standard_normal((2, 3, TOKENS, 2 * PAIRS))


def write(folder: Path, events: list[tuple[Any, ...]]) -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name, value, *more in events:
            writer.add(name, np.asarray(value, np.float32), **(more[0] if more else {}))
    return Trace.open(folder)


def angles(base: float = 1e4, scale: float = 1.0, first: float = 0.0) -> Any:
    return np.outer((np.arange(TOKENS) + first) * scale, base ** (-np.arange(PAIRS) / PAIRS))


def rotated(x: Any, table: Any) -> Any:
    a, b = x[..., :PAIRS], x[..., PAIRS:]
    cos, sin = np.cos(table), np.sin(table)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), -1)


def reference(folder: Path) -> Trace:
    both = np.concatenate((angles(), angles()), -1)
    turned = rotated(X, angles())
    return write(
        folder,
        [
            ("net/start", X),
            ("net/rope", np.cos(both)),
            ("net/rope", np.sin(both), {"slot": "out.1"}),
            ("net/turn", turned),
            ("net/last", np.tanh(turned).sum(-1)),
        ],
    )


def port(folder: Path, table: Any, how: str = "half") -> Trace:
    cos, sin = np.cos(table), np.sin(table)
    if how == "neighbours":
        kept = [np.repeat(value, 2, -1) for value in (cos, sin)]
    else:
        kept = [cos, sin] if how == "half" else [-cos, sin]
    turned = rotated(X, table)
    events = [("x", X), ("tables/cos", kept[0]), ("tables/sin", kept[1]), ("q", turned)]
    return write(folder, [*events, ("y", np.tanh(turned).sum(-1))])


@pytest.mark.parametrize("how", ["half", "neighbours", "negated"])
def test_right_tables_in_another_layout_are_no_bug(tmp_path: Path, how: str) -> None:
    verdict = compare(reference(tmp_path / "r"), port(tmp_path / "p", angles(), how))
    assert verdict.verdict == "agree"


@pytest.mark.parametrize(
    ("table", "cause", "says"),
    [
        (angles(base=500.0), "rotation-base", "500"),
        (angles(scale=0.125), "rotation-positions", "times 0.125"),
        (angles(first=1), "rotation-offset", "n + 1"),
    ],
)
def test_a_wrong_table_is_the_first_wrong_value(
    tmp_path: Path, table: Any, cause: str, says: str
) -> None:
    verdict = compare(reference(tmp_path / "r"), port(tmp_path / "p", table))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "tables/cos")
    assert verdict.findings[0].cause == cause and says in verdict.findings[0].evidence


def test_a_wrong_table_that_the_reference_has_twice_and_with_axes_of_one(tmp_path: Path) -> None:
    both = np.repeat(angles(), 2, -1)[None, :, None]
    events = [("net/rope", np.cos(both)), ("net/rope", np.sin(both), {"slot": "out.1"})]
    turned = rotated(X, angles())
    last = ("net/turn", turned), ("net/last", np.tanh(turned).sum(-1))
    right = write(tmp_path / "r", [("net/start", X), *events, *last])
    verdict = compare(right, port(tmp_path / "p", angles(base=500.0)))
    assert verdict.port_site == "tables/cos" and verdict.findings[0].cause == "rotation-base"


@pytest.mark.parametrize("how", ["half", "neighbours"])
def test_a_table_in_another_order_is_wrong_where_its_use_is(tmp_path: Path, how: str) -> None:
    """Rows in another order may also be those of a port with its tokens in that order."""
    verdict = compare(reference(tmp_path / "r"), port(tmp_path / "p", angles()[::-1], how))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "tables/cos")
    assert verdict.findings[0].cause == "rotation-positions"


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_right_table_of_pairs_under_the_references_name(
    axis: int, wrong: bool, tmp_path: Path
) -> None:
    """Each cosine beside its sine: the shapes fit only by chance, and nothing is compared."""
    table = np.stack((np.cos(angles()), np.sin(angles())), axis)
    turned = rotated(X, angles())
    last = np.tanh(turned).sum(-1) + wrong
    events = [("x", X), ("net/rope", table), ("net/turn", turned), ("net/last", last)]
    verdict = compare(reference(tmp_path / "ref"), write(tmp_path / "port", events))
    assert (verdict.verdict, verdict.port_site) == (
        ("diverge", "net/last") if wrong else ("agree", None)
    )


def test_exchanged_sines_and_cosines(tmp_path: Path) -> None:
    cos, sin = np.cos(angles()), np.sin(angles())
    turned = rotated(X, np.pi / 2 - angles())
    events = [("x", X), ("tables/cos", sin), ("tables/sin", cos), ("q", turned)]
    wrong = write(tmp_path / "p", [*events, ("y", np.tanh(turned).sum(-1))])
    verdict = compare(reference(tmp_path / "r"), wrong)
    assert verdict.port_site == "tables/cos"
    assert verdict.findings[0].cause == "sines-cosines-exchanged"


IDS = np.array([64.0, 96, 3, 5, 80, 112])


def sinusoids(ids: Any) -> Any:
    table = np.outer(ids, 1e4 ** (-np.arange(4) / 4))
    return np.concatenate((np.cos(table), np.sin(table)), -1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3]])
def test_sinusoids_of_several_numbers_in_one_row(tmp_path: Path, order: list[int]) -> None:
    weight = np.random.default_rng(6).standard_normal((48, 20))
    ids = np.tile(IDS, 2)
    rows = sinusoids(ids)
    start = [("net/ids", ids)]
    right = write(
        tmp_path / "r", [*start, ("net/sin", rows), ("net/out", rows.reshape(2, 48) @ weight)]
    )
    own = sinusoids(np.tile(IDS[order], 2)).reshape(2, 48)
    wrong = write(tmp_path / "p", [("sizes", ids), ("size_sin", own), ("y", own @ weight)])
    verdict = compare(right, wrong)
    if order[2] == 2:
        assert verdict.verdict == "agree" and any("2×48 → 12×8" in r for r in verdict.remarks)
    else:
        assert (verdict.verdict, verdict.port_site) == ("diverge", "size_sin")
        assert "reordered" in verdict.findings[0].cause


@pytest.mark.parametrize(
    ("base", "order", "site"),
    [(1e4, (0, 1), None), (1e2, (0, 1), "net/block"), (1e4, (1, 0), None)],
)
def test_tables_of_complex_rotations(
    tmp_path: Path, base: float, order: tuple[int, int], site: str | None
) -> None:
    """A reference that is given complex numbers; the port has each cosine beside its sine."""

    def turned(table: Any) -> Any:
        a, b = np.moveaxis(X.reshape(*X.shape[:-1], PAIRS, 2), -1, 0)
        cos, sin = np.cos(table), np.sin(table)
        return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(X.shape)

    with TraceWriter(tmp_path / "ref", Header(dtype="float32")) as writer:
        writer.add("net/start", X.astype(np.float32))
        writer.add("net/block", np.exp(1j * angles()).astype(np.complex64), slot="in.1")
        writer.add("net/turn", turned(angles()).astype(np.float32))
        writer.add("net/last", np.tanh(turned(angles())).sum(-1).astype(np.float32))
    table = np.stack([np.cos(angles(base)), np.sin(angles(base))], -1)[..., order]
    own = [("x", X), ("rope", table), ("q", turned(angles(base)))]
    found = compare(
        Trace.open(tmp_path / "ref"),
        write(tmp_path / "port", [*own, ("y", np.tanh(turned(angles(base))).sum(-1))]),
    )
    assert (found.verdict, found.site) == ("diverge" if site else "agree", site)
    assert found.port_site == ("rope" if site else None)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_wrong_probabilities_are_named_before_what_is_computed_from_them(
    tmp_path: Path, scale: float
) -> None:
    """The reference returns them after the layer that comes last."""
    draw = np.random.default_rng(8)
    scores = draw.standard_normal((3, 2, 3, TOKENS, TOKENS))
    weight = draw.standard_normal((2 * PAIRS, 2 * PAIRS))

    def run(scale: float, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
        events: list[tuple[Any, ...]] = []
        x = X
        for n, block in enumerate(scores):
            p = np.exp(scale * block)
            p /= p.sum(-1, keepdims=True)
            taken = np.tanh(p @ x)
            result = taken @ weight
            values = {"p": p, "in": x, "taken": taken, "out": result, "sum": x + result}
            values |= {"square": np.square(x + result), "end": np.sin(3 * x + result)}
            for name in names:
                key, _, slot = name.partition("|")
                path, _, what = key.partition("=")
                more = {"slot": slot} if slot else {}
                events.append((path.format(n), values[what], more))
            x = x + result
        return events

    theirs = run(1.0, ("net/b.{}.att=in|in.0", "net/b.{}.att.o=taken|in.0", "net/b.{}.att.o=out",
                       "net/b.{}.att=out", "net/b.{}.att=p|out.1", "net/b.{}.sum=sum",
                       "net/b.{}.square=square", "net/b.{}=end"))  # fmt: skip
    ours = run(scale, ("s{}.x=in", "s{}.weights=p", "s{}.mixed=taken", "s{}.y=out",
                       "s{}.sum=sum", "s{}.square=square", "s{}.end=end"))  # fmt: skip
    found = compare(write(tmp_path / "ref", theirs), write(tmp_path / "port", ours))
    assert found.verdict == ("diverge" if scale != 1 else "agree")
    assert found.port_site == ("s0.weights" if scale != 1 else None)
