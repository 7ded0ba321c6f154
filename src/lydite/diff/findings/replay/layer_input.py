"""What a linear layer or convolution takes, where the port recorded only what it gives.

The input is computed again in every known variant, and the layer from it: where that is the port's
output, the layer is right and the operation before it is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence, Hypothesis, Layer
from lydite.diff.findings.replay.attention import other_attention
from lydite.diff.findings.replay.between import exchanged_layers
from lydite.diff.findings.replay.convolutions import convolution
from lydite.diff.findings.replay.gated_feed_forward import other_gate
from lydite.diff.findings.replay.linear import linear_layer
from lydite.diff.findings.replay.linear_attention import other_linear_attention
from lydite.diff.findings.replay.modulation import other_modulated_input
from lydite.diff.findings.replay.norm_forms import NONE, VARIANTS, norms
from lydite.diff.findings.replay.norms_and_activations import norm_layer, other_activation
from lydite.diff.findings.replay.relations import with_relation
from lydite.diff.findings.replay.residuals import sum_gate
from lydite.diff.findings.replay.selections import Tile, other_resize, tiles
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    apart_of_port,
    fit_tolerance,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_OFFSETS = 3  # positions by which an input may be displaced
MAX_SEARCH = 20  # steps in the search for a factor
MAX_REPLACED = 16  # values that are tried in the place of a joined one
MAX_PIECES = 64  # of fused projections
MAX_TERMS = 12  # recorded values that a sum may consist of
UNEQUAL = (5, 6, 7)  # parts of a width of which the first few are one joined value
MAX_PROJECTIONS = 6  # values before a layer of which two or three may be one projection
NEAR = 40  # values before a layer among which these are
AS_IT_IS = "in their order"
UNKNOWN = "what the reference does between the two is missing in the port, or comes later"


def wrong_input(e: Evidence) -> Finding | None:
    """The layer gives the port's output from another input than the reference's."""
    layer = linear_layer(e) or convolution(e) or norm_layer(e)
    if layer is None or (e.inputs and _is_right(layer.source, fit_tolerance(e))):
        return None
    x = layer.source.x
    if apart_of(layer.output.values[0], layer.apply(x)) > allowed(layer.output):
        return None
    inner = replace(
        e, reference=x, port=x, slot="in", dims=None, layer=Layer(layer.apply, layer.output)
    )
    if not is_replayable(inner, least=16):
        return None
    is_norm = layer.what == "a norm"
    last = (_scaled_norm_input,) if is_norm else (_scaled, _normed_input)
    last += (_added_too_early, _other_split)
    tried = [(hypothesis, inner) for hypothesis in (*OF_INPUT, *last)]
    if x.ndim == 4:
        tried += [(hypothesis, _as_tokens(inner)) for hypothesis in OF_TOKENS]
    for hypothesis, seen in tried:
        found = hypothesis(seen)
        if found is not None:
            what = "norm" if is_norm else "layer"
            text = f"This {what} gives the port's value from another input. {found.evidence}"
            return Finding(found.cause, text, found.fix)
    return None


def _is_right(source: Source, limit: float) -> bool:
    """Whether the port has the reference's value."""
    return apart_of(source.x, source.own) <= limit * float(np.linalg.norm(source.x))


def _as_tokens(e: Evidence) -> Evidence:
    """A picture that a convolution takes as the tokens (batch, height × width, channels) it was."""
    assert e.layer is not None
    shape, apply = e.port.shape, e.layer.apply
    tokens = e.values[0].reshape(*shape[:2], -1).swapaxes(1, 2)
    layer = Layer(lambda x: apply(x.swapaxes(1, 2).reshape(shape)), e.layer.output)
    return replace(e, reference=tokens, port=tokens, layer=layer)


def _another_value(e: Evidence) -> Finding | None:
    """The layer takes another recorded value, or an activation of another one."""
    assert e.layer is not None
    limit = allowed(e.layer.output)
    values = [source for source in sources(e) if source.x.shape == e.port.shape]
    for label, f in {NONE: VARIANTS[NONE], **VARIANTS}.items():
        right = [s.name for s in values if apart_of(e.values[0], f(s.x)) <= e.noise()]
        for source in values if right else ():
            tried = (apart_of_port(e, f(value)) for value in (source.own, source.x))
            if source.name not in right and min(tried) <= limit:
                named = [name for name in right if "[in" not in name] or right
                used, wanted = (
                    name if label == NONE else f"{label}({name})"
                    for name in (source.name, named[-1])
                )
                found = Finding(
                    "another-input",
                    f"The port computes it from {used}, the reference from {wanted}.",
                    f"Compute it from {wanted}.",
                )
                otherwise = exchanged_layers(e, source) or UNKNOWN
                return with_relation(e, found, source.name, named[-1], otherwise)
    return None


def _other_sum(e: Evidence) -> Finding | None:
    """The layer takes a sum x + gate · y with another gate, another x or y, or one term too few."""
    if e.port.ndim < 3:
        return None
    values = [source for source in sources(e) if source.x.shape == e.port.shape]
    own = [s for s in values if apart_of(e.values[0], s.x) > e.noise()][:MAX_TERMS]
    for first, second in permutations(own, 2):
        x, y = first, second
        gate = sum_gate(e, x, y)
        if gate is None:
            continue
        right, factor, gates = gate
        if not right and own.index(x) < own.index(y):
            x, y = y, x  # the stream is older than the branch that is computed from it
        tried = [Candidate(f"{x.name} + {right}{y.name}", x.x + factor * y.x)]
        for words, other in gates.items():
            if words != right:
                tried.append(Candidate(f"{x.name} + {words}{y.name}", x.x + other * y.x))
        tried += [Candidate(x.name, x.x), Candidate(f"{right}{y.name}", factor * y.x)]
        tried.append(Candidate(f"{x.name} − {right}{y.name}", x.x - factor * y.x))
        tried.append(Candidate(f"{right}{y.name} − {x.name}", factor * y.x - x.x))
        for other in own:
            if other is not x:
                text = f"{other.name} + {right}{y.name}"
                tried.append(Candidate(text, other.x + factor * y.x))
            if other is not y:
                text = f"{x.name} + {right}{other.name}"
                tried.append(Candidate(text, x.x + factor * other.x))
            text = f"{x.name} + {right}{y.name} + {other.name}"
            tried.append(Candidate(text, x.x + factor * y.x + other.x))
        told = told_apart(e, tried, reference_is=tried[0].name)
        if told is not None:
            cause, fix = "other-sum", f"Compute it from {told.right}."
            if told.wrong == f"{right}{y.name}":
                cause, fix = "residual-missing", f"Add the residual, {x.name}."
            elif told.wrong == x.name:
                cause = "branch-missing"
                fix = (
                    f"Add {right}{y.name}: the port takes the residual stream before it is added, "
                )
                fix += "or never adds it."
            elif right and told.wrong == f"{x.name} + {y.name}":
                cause = "gate-missing"
            elif told.wrong.startswith(f"{x.name} +") and told.wrong.endswith(f" · {y.name}"):
                cause, fix = "other-gate", f"Use the reference's gate: {fix[0].lower()}{fix[1:]}"
            elif told.wrong.endswith(f" + {right}{y.name}"):
                fix = f"Use the reference's residual, {x.name}."
            return Finding(
                cause,
                f"The port computes it from {told.wrong}, the reference from {told.right}.",
                fix,
            )
        return _other_share(e, x, y, factor * y.x, right)
    return None


def _other_share(e: Evidence, x: Source, y: Source, branch: Array, gate: str) -> Finding | None:
    """That the branch of a sum has another factor, which is searched."""
    assert e.layer is not None
    limit = allowed(e.layer.output)
    share, step = 1.0, 1e-4

    def left(c: float) -> Array:
        assert e.layer is not None
        return (e.layer.apply(x.x + c * branch) - e.layer.output.values[1]).reshape(-1)

    for _ in range(MAX_SEARCH):
        now = left(share)
        slope = (left(share + step) - left(share - step)) / (2 * step)
        power = float(slope @ slope)
        if not power:
            return None
        move = float(np.clip(-float(slope @ now) / power, -0.5, 0.5))
        share += move
        if abs(move) < 1e-6:
            break
    rest = float(np.linalg.norm(left(share)))
    if rest > limit or abs(share - 1) < 1e-3:
        return None
    return Finding(
        "other-factors",
        f"The port computes it from {x.name} + {share:.4g} · {gate}{y.name}, the reference from "
        f"{x.name} + {gate}{y.name}; {e.layer.output.leaves(rest)}.",
        f"Add {gate}{y.name} without the factor {share:.4g} (layer scale, a residual scale).",
    )


def _added_too_early(e: Evidence) -> Finding | None:
    """The layer takes the right value with another recorded one added: a sum made before it."""
    values = [s for s in sources(e) if s.x.shape == e.port.shape]
    others = [s for s in values if apart_of(e.values[0], s.x) > e.noise()][:MAX_TERMS]
    tried = [Candidate(AS_IT_IS, e.values[0])]
    tried += [Candidate(other.name, e.values[0] + other.x) for other in others]
    told = told_apart(e, tried, reference_is=AS_IT_IS)
    if told is None:
        return None
    return Finding(
        "sum-too-early",
        f"The port has already added {told.wrong} to what it takes, the reference adds it after "
        f"this (a residual), or not at all; {told.leaves}.",
        f"Add {told.wrong} after it, where the reference does.",
    )


def _normed_input(e: Evidence) -> Finding | None:
    """The layer takes a norm, without weights, of the right value."""
    tried = [Candidate(AS_IT_IS, e.values[0]), *norms(e.values[0], -1)]
    told = told_apart(e, tried, reference_is=AS_IT_IS)
    if told is None:
        return None
    return Finding(
        "norm-extra",
        f"The port takes a {told.wrong} of the reference's input, the reference the input itself, "
        f"without a norm; {told.leaves}.",
        "Remove the norm before it.",
    )


def _other_split(e: Evidence) -> Finding | None:
    """The layer takes a projection that is split by heads from q, k and v side by side.

    Or the reference splits by heads, and the port in two or three parts.
    """
    width = e.port.shape[-1] * (e.port.shape[-2] if e.port.ndim == 4 else 1)
    flat = e.values[0].reshape(*e.port.shape[:2], -1)
    if flat.shape[-1] != width or e.port.ndim not in (3, 4):
        return None
    values = [s.x for s in islice(sources(e), NEAR) if s.x.shape == flat.shape]
    for count, parts in ((n, p) for n in (2, 3) for p in permutations(values[:MAX_PROJECTIONS], n)):
        at = next((n for n, x in enumerate(parts) if apart_of(x, flat) <= e.noise()), None)
        if at is None:
            continue
        joined = np.concatenate(parts, -1)
        tried = [Candidate(AS_IT_IS, e.values[0])]
        for heads in (n for n in range(2, width // 2 + 1) if width % n == 0):
            split = joined.reshape(*flat.shape[:2], heads, count, -1)
            words = f"split into {heads} heads, and each head into its {count} parts"
            tried += [Candidate(words, split[..., at, :].reshape(e.port.shape))]
        told = told_apart(e, tried, reference_is=AS_IT_IS)
        if told is not None:
            return Finding(
                "other-split",
                f"The port takes its part of the fused projection (q, k and v, or k and v) "
                f"{told.wrong}, the reference splits it into {count} parts first; {told.leaves}.",
                "Split (reshape) the fused projection as the reference: the parts first, then the "
                "heads.",
            )
    return None


def _other_positions(e: Evidence) -> Finding | None:
    """The layer takes a sum with a table of positions: displaced, transposed, or without it."""
    if e.port.ndim != 3:
        return None
    tokens, width = e.port.shape[1:]
    computed = _modules_of_tokens(e, tokens)
    for source in sources(e):
        if source.x.size != tokens * width or source.x.shape[-2:] != (tokens, width):
            continue
        if source.name in computed:
            continue
        table = source.x.reshape(tokens, width)
        rest = e.values[0] - table
        if not any(apart_of(rest, s.x) <= 4 * e.noise() for s in sources(e)):
            continue
        name = source.name.partition(" [")[0]
        tables = [table, *(w for w in _tables_like(e, name, table))]
        tried = [Candidate(AS_IT_IS, e.values[0]), Candidate("without it", rest)]
        tried += [Candidate(words, rest + other) for words, other in _moved_tables(table, tables)]
        told = told_apart(e, tried, reference_is=AS_IT_IS)
        if told is None:
            return None
        missing = told.wrong == "without it"
        return Finding(
            "positions-missing" if missing else "other-positions",
            f"The reference adds the table of positions {source.name}; the port computes it "
            f"{told.wrong if missing else 'with this table ' + told.wrong}; {told.leaves}.",
            "Add the table of positions as the reference: from its first row, row by row.",
        )
    return None


def _modules_of_tokens(e: Evidence, tokens: int) -> set[str]:
    """The modules that take tokens: what they return is no table of positions."""
    inputs = (r for r in e.before() if r.value.ndim == 3 and r.value.shape[1] == tokens)
    return {r.name.partition(" [in")[0] for r in inputs if " [in" in r.name}


def _tables_like(e: Evidence, name: str, table: Array) -> Iterator[Array]:
    """The parameter that a table of positions is the beginning of."""
    for count in dict.fromkeys((len(table), len(table) + 1, len(table) + 2, 77, 512, 514)):
        for path, value in e.parameters_like((count, table.shape[1])):
            if path.startswith(name) and count >= len(table):
                yield value


def _moved_tables(table: Array, known: list[Array]) -> Iterator[tuple[str, Array]]:
    """A table of positions in other orders, and from other rows of the parameter it is cut from."""
    tokens = len(table)
    for by in (1, -1, 2, -2, 3, -3):
        words = f"displaced by {by:+d} position{'s' if abs(by) > 1 else ''}"
        yield f"{words} (rolled)", np.roll(table, -by, 0)
        at = np.arange(tokens) + by
        yield f"{words} (the last one repeated)", table[np.clip(at, 0, tokens - 1)]
        for other in known[1:]:
            yield words, other[np.clip(at, 0, len(other) - 1)]
    yield "backwards", table[::-1]
    yield "added twice", 2 * table
    yield "subtracted", -table
    for first in (0, 1):
        rows = table[first:]
        for height in (n for n in range(2, len(rows) // 2 + 1) if len(rows) % n == 0):
            at = np.arange(len(rows)).reshape(height, -1).T.reshape(-1)
            turned = np.concatenate((table[:first], rows[at]))
            yield f"read column by column, transposed as a grid of {height} rows", turned


def _scaled_norm_input(e: Evidence) -> Finding | None:
    """The norm takes the input times the root of its width: what eps shows."""
    width = e.port.shape[-1]
    tried = [Candidate(AS_IT_IS, e.values[0])]
    for words, factor in ((f"√{width}", width**0.5), (f"1/√{width}", width**-0.5)):
        tried.append(Candidate(words, factor * e.values[0]))
    assert e.layer is not None
    told = told_apart(e, tried, reference_is=AS_IT_IS)
    left = min(apart_of_port(e, c.value) for c in tried)
    if told is None or left > 2 * e.layer.output.noise():
        return None
    return Finding(
        "input-scaled",
        f"The port takes the reference's input times {told.wrong}: only eps shows it; "
        f"{told.leaves}.",
        f"Give it the input itself: embeddings are multiplied by (scaled with) {told.wrong}.",
    )


def _rearranged(e: Evidence) -> Finding | None:
    """The layer takes the right numbers in other positions."""
    told = told_apart(e, _rearrangements(e.values[0]), reference_is=AS_IT_IS)
    if told is None:
        return None
    return Finding(
        "input-rearranged",
        f"The port takes the reference's numbers {told.wrong}; {told.leaves}.",
        "Check the order of axes and channels in what this layer takes, and that of its weight.",
    )


def _rearrangements(x: Array) -> Iterator[Candidate]:
    yield Candidate(AS_IT_IS, x)
    for axis in range(x.ndim):
        size = x.shape[axis]
        if size < 2:
            continue
        yield Candidate(f"backwards along axis {axis}", np.flip(x, axis))
        for by in (n for n in range(1, MAX_OFFSETS + 1) if n < size):
            yield Candidate(f"moved by {by} along axis {axis}", np.roll(x, by, axis))
            yield Candidate(f"moved by −{by} along axis {axis}", np.roll(x, -by, axis))
        for parts in (n for n in (2, 3, 4) if size % n == 0 and size > n):
            chunks = np.split(x, parts, axis)
            for order in permutations(range(parts)):
                if order != tuple(range(parts)):
                    moved = np.concatenate([chunks[n] for n in order], axis)
                    yield Candidate(f"with the parts {list(order)} of axis {axis}", moved)
        for parts in (n for n in UNEQUAL if size % n == 0 and axis == x.ndim - 1):
            for first in range(1, parts):
                words = f"with the first {first} of {parts} parts of axis {axis} behind the others"
                moved = np.roll(x, -first * (size // parts), axis)
                yield Candidate(f"{words}: joined in another order", moved)
        for rows in (n for n in range(2, size // 2 + 1) if size % n == 0):
            split = x.reshape(*x.shape[:axis], rows, size // rows, *x.shape[axis + 1 :])
            turned = split.swapaxes(axis, axis + 1).reshape(x.shape)
            yield Candidate(
                f"with axis {axis} read as {rows} × {size // rows} and transposed", turned
            )
    if x.ndim == 4 and min(x.shape[2:]) > 1:
        a, b = x.shape[2:]
        words = f"with the width read as {b} × {a} and transposed: heads as its inner axis"
        yield Candidate(words, x.reshape(*x.shape[:2], b, a).swapaxes(2, 3))
        words = "with heads and tokens split without moving their axis (reshape, no transpose)"
        yield Candidate(words, x.swapaxes(1, 2).reshape(x.shape))
    for axis in range(1, x.ndim - 1):
        if x.shape[axis] == x.shape[axis + 1]:
            words = f"with axes {axis} and {axis + 1} exchanged"
            yield Candidate(words, x.swapaxes(axis, axis + 1))


def _other_order(e: Evidence) -> Finding | None:
    """The layer takes several recorded values put together in another order."""
    values = [s for s in sources(e) if s.x.ndim == e.port.ndim and s.x.size < e.port.size]
    parts = tiles(e.values[0], [(s.name, s.x) for s in values], fit_tolerance(e))
    if parts is None or not 2 <= len(parts) <= 4:
        return None
    axis = _joined_axis(parts)
    if axis is None:
        return None
    chunks = [(part.name, e.values[0][part.box]) for part in parts]
    tried = (
        Candidate(", ".join(name for name, _ in order), np.concatenate([v for _, v in order], axis))
        for order in permutations(chunks)
    )
    told = told_apart(e, tried, reference_is=", ".join(name for name, _ in chunks))
    cause = "parts-reordered"
    if told is None:
        tried = _with_another(chunks, values, axis)
        told = told_apart(e, tried, reference_is=", ".join(name for name, _ in chunks))
        cause = "another-value"
    if told is None:
        return _other_part(e, chunks, values, axis)
    return Finding(
        cause,
        f"The port joins {told.wrong} in this order, the reference {told.right}.",
        f"Join {told.right}, in this order (concatenation of a skip connection, or of streams).",
    )


def _with_another(
    chunks: list[tuple[str, Array]], values: list[Source], axis: int
) -> Iterator[Candidate]:
    """Values joined with one of them replaced by another recorded one of its shape."""
    joined = [x for _, x in chunks]
    yield Candidate(", ".join(name for name, _ in chunks), np.concatenate(joined, axis))
    for at, (name, chunk) in enumerate(chunks):
        alike = (s for s in values if s.x.shape == chunk.shape and s.name != name)
        for other in islice(alike, MAX_REPLACED):
            names = [other.name if n == at else words for n, (words, _) in enumerate(chunks)]
            parts = [*joined[:at], other.x, *joined[at + 1 :]]
            yield Candidate(", ".join(names), np.concatenate(parts, axis))


def _other_part(
    e: Evidence, chunks: list[tuple[str, Array]], values: list[Source], axis: int
) -> Finding | None:
    """One of the joined values is another activation of a recorded value."""
    for at, (name, chunk) in enumerate(chunks):
        for source in (s for s in values if s.x.shape == chunk.shape):
            labels = [n for n, f in VARIANTS.items() if apart_of(chunk, f(source.x)) <= e.noise()]
            if not labels or labels[0] == NONE:
                continue
            joined = [x for _, x in chunks]
            tried = (
                Candidate(
                    label, np.concatenate([*joined[:at], f(source.x), *joined[at + 1 :]], axis)
                )
                for label, f in VARIANTS.items()
            )
            told = told_apart(e, tried, reference_is=labels[0])
            if told is not None:
                return Finding(
                    "other-activation",
                    f"The port joins {told.wrong} of {source.name} with the other part, the "
                    f"reference {told.right} of it ({name}); {told.leaves}.",
                    f"Use {told.right} here.",
                )
    return None


def _joined_axis(parts: tuple[Tile, ...]) -> int | None:
    """The only axis along which parts lie one behind the other."""
    axes = {
        a
        for part in parts
        for a, (s, t) in enumerate(zip(part.box, parts[0].box, strict=True))
        if s != t
    }
    return axes.pop() if len(axes) == 1 else None


def _another_part(e: Evidence) -> Finding | None:
    """The layer takes other numbers of a fused projection, of which the reference takes some."""
    if e.port.ndim not in (3, 4):
        return None
    batch, tokens = e.port.shape[:2]
    width = e.values[0].size // (batch * tokens)
    parts: list[tuple[str, Array]] = []
    for source in sources(e):
        count, rest = divmod(source.x.shape[-1], width) if source.x.ndim == 3 else (0, 1)
        if not rest and source.x.shape[:2] == (batch, tokens):
            for n, part in enumerate(np.split(source.x, count, -1)):
                where = f"part {n} of {count} of " if count > 1 else ""
                parts.append((where + source.name, part))
    tried = [Candidate(AS_IT_IS, e.values[0])]
    tried += [Candidate(name, part.reshape(e.port.shape)) for name, part in parts[:MAX_PIECES]]
    told = told_apart(e, tried, reference_is=AS_IT_IS)
    if told is None:
        return None
    right = next(
        (n for n, x in parts if apart_of(e.values[0].reshape(x.shape), x) <= e.noise()), ""
    )
    return Finding(
        "another-value",
        f"The port takes {told.wrong}{', the reference ' * bool(right)}{right}: a fused projection "
        f"is split in another order; {told.leaves}.",
        "Split the fused projection (q, k, v, MLP) in the order in which its weights are joined.",
    )


def _scaled(e: Evidence) -> Finding | None:
    """The layer takes a · x + b instead of the reference's x, or of a recorded value."""
    assert e.layer is not None
    x = e.values[0]
    base, *columns = (e.layer.apply(value) for value in (np.zeros_like(x), x, np.ones_like(x)))
    port = e.layer.output.values[1]
    design = np.stack([(column - base).reshape(-1) for column in columns], -1).astype(np.float64)
    (a, b), *_ = np.linalg.lstsq(design, (port - base).reshape(-1), rcond=None)
    left = float(np.linalg.norm(design @ (a, b) - (port - base).reshape(-1)))
    if left > allowed(e.layer.output):
        return None
    if abs(a) < 1e-6 and abs(b) < 1e-6:
        return Finding(
            "all-zero",
            "The port is what this layer makes of zeros, its bias alone; "
            f"{e.layer.output.leaves(left)}.",
            "Check that the weight of this layer is loaded, and not zero, and that its input is.",
        )
    size = float(np.sqrt(np.mean(e.values[0] ** 2)))
    b = 0.0 if abs(b) < 1e-3 * size else b
    used, right = _line(a, b, "the reference's input"), "the input itself"
    for source in sources(e):
        if source.x.size != e.port.size or apart_of(e.values[0], source.x) <= e.noise():
            continue
        fit = _affine(source, e.values[0], fit_tolerance(e))
        if fit is not None:
            shift = a * fit[1] + b
            shift = 0.0 if abs(shift) < 1e-3 * size else shift
            used = _line(a * fit[0], shift, source.name)
            right = _line(*fit, source.name)
            break
    return Finding(
        "input-scaled",
        f"The port takes {used}, the reference {right}; {e.layer.output.leaves(left)}.",
        f"Give it {right}: a scale or a shift is missing, doubled or in another order.",
    )


def _affine(source: Source, value: Array, limit: float) -> tuple[float, float] | None:
    """Two numbers with value = a · source + b."""
    if source.x.shape != value.shape:
        return None
    x = source.x.reshape(-1)
    design = np.stack((x, np.ones_like(x)), -1)
    (a, b), *_ = np.linalg.lstsq(design, value.reshape(-1), rcond=None)
    left = float(np.linalg.norm(design @ (a, b) - value.reshape(-1)))
    near = limit * float(np.linalg.norm(value))
    return (float(a), float(b) if abs(b) * x.size**0.5 > near else 0.0) if left <= near else None


def _line(a: float, b: float, name: str) -> str:
    text = f"{a:.4g} · {name}" if abs(a - 1) > 1e-4 else name
    return text if b == 0 else f"{text} {'+' if b > 0 else '−'} {abs(b):.4g}"


OF_TOKENS: tuple[Hypothesis, ...] = (_other_sum, other_modulated_input, _another_value)
OF_INPUT: tuple[Hypothesis, ...] = (
    _other_positions,
    other_attention,
    other_linear_attention,
    other_activation,
    other_gate,
    other_resize,
    _other_order,
    _rearranged,
    *OF_TOKENS,
    _another_part,
)
