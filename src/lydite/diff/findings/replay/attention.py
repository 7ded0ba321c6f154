"""Attention computed again from the recorded q, k and v."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.rotations import BASES, base_of
from lydite.diff.findings.replay.variants import (
    MAX_VALUES,
    Candidate,
    allowed,
    apart_of,
    told_apart,
)
from lydite.diff.result import Finding

MAX_SCORES = 2**25  # numbers in the scores of one variant
MAX_LENGTHS = 4  # of streams that a mask is tried for
HIDDEN = -1e4  # a bias below this hides a key
HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 64)
PART = re.compile(
    r"(?:^|[._])(?P<norm>norm_|(?=[qk]_norm$))?(?P<added>added?_)?(?:to_)?"
    r"(?P<part>query|key|value|[qkv])(?:_proj|_norm|s)?$"
)
MASKS: dict[str, Callable[[int, int], Array]] = {  # which keys each query sees
    "no mask": lambda n, m: np.ones((n, m), bool),
    "a causal mask": lambda n, m: np.tri(n, m, dtype=bool),
    "a causal mask that is inverted": lambda n, m: np.tri(m, n, dtype=bool).T,
    "a causal mask that hides each token from itself": lambda n, m: np.tri(n, m, -1, dtype=bool),
    "a causal mask that shows the next token too": lambda n, m: np.tri(n, m, 1, dtype=bool),
}
CAUSES = {
    "scale": ("attention-scale", "Multiply the scores by the reference's factor, once."),
    "softmax": ("softmax-axis", "Take the softmax over the keys, the last axis of the scores."),
    "mask": ("attention-mask", "Check the mask: which keys a query may see."),
    "heads": ("heads-merged-wrongly", "Check the axis order where heads are split and joined."),
    "groups": ("heads-repeated-wrongly", "Repeat each head of k and v for its group of queries."),
    "norm": ("qk-norm-missing", "Apply the norms of q and k before the attention."),
    "parts": ("qkv-exchanged", "Check which of q, k and v is which."),
    "streams": ("streams-cut-wrongly", "Check the order in which the streams are joined and cut."),
    "bias": ("attention-bias", "Add the bias of the positions to the scores, as the reference."),
    "rotation": ("rotation-in-attention", "Rotate q and k as the reference does."),
}
Parts = dict[tuple[bool, bool, str], Array]  # (of a norm, of the added stream, q, k or v)


@dataclass(frozen=True)
class Stream:
    """q, k and v of one stream, each (batch, heads, tokens, width of a head)."""

    q: Array
    k: Array
    v: Array
    raw: "Stream | None" = None  # q and k before their norms


@dataclass(frozen=True, eq=False)
class Rotation:
    """Angles of tokens as complex numbers (tokens, pairs); which numbers are a pair."""

    table: Array
    halves: bool
    of: str = "qk"
    keys: Array | None = None  # other angles for k
    lengths: tuple[int, ...] = ()  # of the streams that the tokens are

    def apply(self, x: Array, part: str) -> Array:
        """q or k (batch, heads, tokens, width) rotated."""
        if part not in self.of:
            return x
        table = self.table if part == "q" or self.keys is None else self.keys
        half = x.shape[-1] // 2
        a, b = (x[..., :half], x[..., half:]) if self.halves else (x[..., 0::2], x[..., 1::2])
        turned = (a + 1j * b) * table
        if self.halves:
            return np.concatenate((turned.real, turned.imag), -1)
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape)


@dataclass(frozen=True, eq=False)
class Form:
    """How attention is computed from the streams."""

    streams: tuple[Stream, ...]
    scale: float = 1.0  # relative to 1/√(width of a head)
    mask: str = "no mask"
    axis: int = -1
    bias: Array | None = None
    rotation: Rotation | None = None
    kept: Array | None = None  # by which the probabilities are multiplied

    def heads(self) -> Array:
        """(batch, heads, tokens, width of a head) of the streams together."""
        q, k, v = (np.concatenate([getattr(s, part) for s in self.streams], 2) for part in "qkv")
        if self.rotation is not None:
            q, k = self.rotation.apply(q, "q"), self.rotation.apply(k, "k")
        scores = q @ k.swapaxes(-1, -2) * (self.scale * q.shape[-1] ** -0.5)
        scores = scores if self.bias is None else scores + self.bias
        scores = np.where(MASKS[self.mask](*scores.shape[-2:]), scores, -1e30)
        scores = np.exp(scores - scores.max(self.axis, keepdims=True))
        scores = scores / scores.sum(self.axis, keepdims=True)
        return (scores if self.kept is None else scores * self.kept) @ v

    def result(self) -> Array:
        """(batch, tokens, width)."""
        heads = self.heads()
        return heads.swapaxes(1, 2).reshape(heads.shape[0], heads.shape[2], -1)


def other_attention(e: Evidence) -> Finding | None:
    """Another scale, mask, bias, rotation, head order, or q and k without their norms."""
    if not e.same_shape or e.kind != "activation" or not 0 < e.port.size <= MAX_VALUES:
        return None
    if e.port.ndim == 4 and e.slot.startswith("out"):
        right, own = _given_parts(e)
        return _replayed(_with_joined_heads(e), right, own, e.port.shape[1:2]) if right else None
    return _replayed(e, *_recorded_parts(e), HEADS) if e.port.ndim == 3 else None


def _replayed(e: Evidence, right: Parts, own: Parts, counts: Iterable[int]) -> Finding | None:
    """The form in which these q, k and v give the reference's value, and the port's variant."""
    for heads in counts:
        for form, rows in _forms(e, right, heads):
            value = form.result()[:, rows]
            if apart_of(e.values[0], value) > allowed(e):
                continue
            mine = replace(form, streams=_like(form, own, heads, e.port.shape[-1]))
            lengths = _lengths(e) if form.bias is not None else ()
            told = told_apart(
                e,
                (Candidate("", value), *_variants(form, rows, lengths)),
                lambda mine=mine, rows=rows, lengths=lengths: (
                    Candidate("", mine.result()[:, rows]),
                    *_variants(mine, rows, lengths),
                ),
                reference_is="",
                what="forms of attention from the recorded q, k and v",
            )
            return _finding(told.wrong, told.leaves) if told else None
    return None


def _given_parts(e: Evidence) -> tuple[Parts, Parts]:
    """q, k and v as inputs of the function that returned (batch, heads, tokens, width)."""
    inputs = [r for r in e.before() if r.name.startswith(f"{e.name} [in")]
    inputs = [r for r in inputs if r.value.ndim == 4 and r.value.shape[-1] == e.port.shape[-1]]
    if len(inputs) < 3 or inputs[0].value.shape != inputs[1].value.shape:
        return {}, {}
    parts: Parts = {}
    own: Parts = {}
    for part, recorded in zip("vkq", inputs, strict=False):  # the last input first
        key, mine = (False, False, part), recorded.own()
        parts[key] = recorded.value.astype(np.float64)
        same = mine is not None and mine.shape == recorded.value.shape
        own[key] = mine.astype(np.float64) if mine is not None and same else parts[key]
    return parts, own


def _with_joined_heads(e: Evidence) -> Evidence:
    """The value as (batch, tokens, width), on both sides."""
    batch, heads, tokens, width = e.port.shape
    sides = (x.swapaxes(1, 2).reshape(batch, tokens, heads * width) for x in e.values)
    reference, port = sides
    return replace(e, reference=reference, port=port)


def _lengths(e: Evidence) -> tuple[int, ...]:
    """How many tokens recorded values have: streams that an attention may join."""
    values = (r.value for r in e.before())
    found = dict.fromkeys(v.shape[1] for v in values if v.ndim == 3 and v.shape[0] == len(e.port))
    return tuple(found)[:MAX_LENGTHS]


def _finding(variant: str, left: str) -> Finding:
    kind, _, words = variant.partition(": ")
    cause, fix = CAUSES[kind]
    text = f"The port's attention is that of the recorded q, k and v {words}; {left}."
    return Finding(cause, text, fix)


def _recorded_parts(e: Evidence) -> tuple[Parts, Parts]:
    """q, k and v of the attention that e belongs to: the reference's and the port's."""
    parts: Parts = {}
    own: Parts = {}
    module = e.name
    recorded = [(r.name.partition(" [")[0], r) for r in e.before()]
    while module and not parts:
        module = module[: max(module.rfind("."), module.rfind("/"), 0)]
        for path, r in recorded:
            inside = path.startswith((f"{module}.", f"{module}/"))
            match = PART.search(path[len(module) :]) if inside and path == r.name else None
            if match is None:
                continue
            added = bool(match["added"]) or "add_" in path[len(module) :]
            key = (match["norm"] is not None, added, match["part"][0])
            if key not in parts:
                parts[key] = r.value.astype(np.float64)
                mine = r.own()
                same = mine is not None and mine.shape == r.value.shape
                own[key] = mine.astype(np.float64) if mine is not None and same else parts[key]
    return parts, own


def _forms(e: Evidence, parts: Parts, heads: int) -> Iterator[tuple[Form, slice]]:
    """Every usual form of attention of this many heads, and the rows that the value is."""
    streams = _streams(parts, heads, e.port.shape[-1])
    if not streams:
        return
    tokens = sum(stream.q.shape[2] for stream in streams)
    keys = sum(stream.k.shape[2] for stream in streams)
    if len(e.port) * heads * tokens * keys > MAX_SCORES:
        return
    width = streams[0].q.shape[-1]
    tables = [None, *_biases(e, heads, tokens, keys)]
    tables_of = list(_tables(e, width)) if tokens == keys else []
    orders = (streams, streams[::-1]) if len(streams) > 1 and tables_of else (streams,)
    rotations = [(order, rotation) for order in orders for rotation in _rotations(order, tables_of)]
    length = e.port.shape[1]
    for bias, (order, rotation), scale, mask in product(
        tables, [(streams, None), *rotations], (1.0, width**0.5), ("no mask", "a causal mask")
    ):
        for start in sorted({0, order[0].q.shape[2]} if len(order) > 1 else {0}):
            if start + length <= tokens:
                form = Form(order, scale, mask, bias=bias, rotation=rotation)
                yield form, slice(start, start + length)


def _biases(e: Evidence, heads: int, queries: int, keys: int) -> Iterator[Array]:
    """Recorded values that may be added to the scores, as (1 or batch, heads, queries, keys)."""
    seen: list[Array] = []
    for recorded in e.before():
        value = recorded.value
        if value.shape == (queries, keys, heads):
            value = value.transpose(2, 0, 1)[None]
        if value.ndim != 4 or value.shape[1:] not in (
            (heads, queries, keys), (1, queries, keys), (1, 1, keys),
        ):  # fmt: skip
            continue
        if value.shape[0] not in (1, len(e.port)) or not np.ptp(value):
            continue
        value = value.astype(np.float64)
        if np.isin(value, (0.0, 1.0)).all():  # which keys are seen
            value = np.where(value, 0.0, -1e30)
        value = np.maximum(value, -1e30)
        if not any(np.array_equal(value, other) for other in seen):
            seen.append(value)
            yield value
        if len(seen) == 3:
            return


def _tables(e: Evidence, width: int) -> Iterator[tuple[Array, bool | None]]:
    """Recorded tables of rotations (tokens, pairs), and whether pairs are halves, if it shows."""
    parts: list[Array] = []
    for recorded in e.before():
        value = recorded.value
        rows = [n for n in value.shape[:-1] if n != 1]
        if len(rows) != 1 or value.shape[-1] not in (width, width // 2):
            continue
        value = value.reshape(-1, value.shape[-1]).astype(np.float64)
        complexes = value[:, 0::2] + 1j * value[:, 1::2]  # how a trace's complex numbers are read
        if value.shape[-1] == width and np.abs(np.abs(complexes) - 1).max() < 1e-3:
            yield complexes, False
        elif float(np.abs(value).max()) <= 1.0001:
            parts.append(value)
    for first, other in combinations(parts, 2):
        if first.shape != other.shape or np.abs(first**2 + other**2 - 1).max() > 1e-2:
            continue
        cos, sin = (first, other) if first[0].sum() > other[0].sum() else (other, first)
        full = cos.shape[-1] == width
        halved = full and np.allclose(cos[:, : width // 2], cos[:, width // 2 :])
        cut = slice(None) if not full else slice(width // 2) if halved else slice(0, None, 2)
        yield cos[:, cut] + 1j * sin[:, cut], halved if full else None


def _rotations(
    streams: tuple[Stream, ...], tables: list[tuple[Array, bool | None]]
) -> Iterator[Rotation]:
    """One table for all streams in this order, one for each of them, or for one of them alone."""
    lengths = tuple(stream.q.shape[2] for stream in streams)
    found = {len(table): (table, halves) for table, halves in reversed(tables)}
    whole = found.get(sum(lengths))
    if whole is None:
        known = [found.get(length) for length in lengths]
        halves = next((h for entry in known if entry for h in entry[1:]), None)
        pairs = next((entry[0].shape[1] for entry in known if entry), None)
        if pairs is None or any(entry and entry[0].shape[1] != pairs for entry in known):
            return
        each = [
            entry[0] if entry else np.ones((length, pairs))
            for entry, length in zip(known, lengths, strict=True)
        ]
        whole = np.concatenate(each), halves
    table, halves = whole
    for guess in (False, True) if halves is False else (True, False):
        yield Rotation(table, guess, lengths=lengths)


def _streams(parts: Parts, heads: int, width: int) -> tuple[Stream, ...]:
    """The streams of an attention with this many heads; empty where the shapes do not permit it."""
    streams: list[Stream] = []
    for added in (False, True):
        raw = [parts.get((False, added, part)) for part in "qkv"]
        if any(value is None for value in raw):
            continue
        split = [_split(value, heads, width) for value in raw if value is not None]
        q, k, v = split
        if q is None or k is None or v is None:
            return ()
        if k.shape != v.shape or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
            return ()
        stream = Stream(q, k, v)
        normed = [parts.get((True, added, part)) for part in "qk"]
        if normed[0] is not None and normed[1] is not None:
            nq, nk = (_split(value, heads, width) for value in normed if value is not None)
            if nq is None or nk is None or (nq.shape, nk.shape) != (q.shape, k.shape):
                return ()
            stream = Stream(nq, nk, v, stream)
        streams.append(stream)
    return tuple(streams)


def _like(form: Form, own: Parts, heads: int, width: int) -> tuple[Stream, ...]:
    """The port's streams in the order of a form; the reference's where the port has none."""
    streams = _streams(own, heads, width)
    if len(streams) != len(form.streams):
        return form.streams
    if [s.q.shape for s in streams] != [s.q.shape for s in form.streams]:
        streams = streams[::-1]
    same = [s.q.shape for s in streams] == [s.q.shape for s in form.streams]
    return streams if same else form.streams


def _split(value: Array, heads: int, width: int) -> Array | None:
    """A projection as (batch, heads, tokens, width of a head), heads of k and v repeated."""
    if width % heads:
        return None
    head = width // heads
    if value.ndim == 3 and value.shape[-1] % head == 0:
        value = value.reshape(*value.shape[:2], -1, head).swapaxes(1, 2)
    elif value.ndim == 4 and value.shape[-1] == head:
        value = value if value.shape[1] in (heads, 1) else value.swapaxes(1, 2)
    else:
        return None
    count, rest = divmod(heads, value.shape[1])
    return None if rest or not count else value.repeat(count, 1)


def _variants(usual: Form, rows: slice, lengths: Iterable[int] = ()) -> Iterator[Candidate]:
    streams, mask = usual.streams, usual.mask
    head = streams[0].q.shape[-1]
    width = head * streams[0].q.shape[1]

    def result(**changed: object) -> Array:
        return replace(usual, **changed).result()[:, rows]  # pyright: ignore[reportArgumentType]

    whole = usual.result()
    scales = {
        "without a scale": head**0.5,
        "with a scale of 1/√(width of a head)": 1.0,
        "with a second scale": head**-0.5,
        "with the root of the whole width": (head / width) ** 0.5,
    }
    for words, scale in scales.items():
        if not np.isclose(scale, usual.scale) and not (
            words.startswith("with the") and width == head
        ):
            yield Candidate(f"scale: {words}", result(scale=scale))
    yield Candidate("softmax: with the softmax over the queries", result(axis=-2))
    for other in MASKS.keys() - {mask}:
        yield Candidate(f"mask: with {other}", result(mask=other))
    joined = usual.heads()
    untransposed = joined.reshape(joined.shape[0], joined.shape[2], -1)[:, rows]
    yield Candidate("heads: joined without a transpose", untransposed)
    if usual.bias is not None:
        for words, changed in _other_biases(usual.bias, lengths):
            yield Candidate(words, result(**changed))
    if usual.rotation is not None:
        yield from _other_rotations(usual, rows)
    if all(stream.raw for stream in streams):
        yield Candidate("norm: without the norms of q and k", result(streams=_raw(streams)))
    for groups in {2, 4, 8} & {n for n in range(2, streams[0].k.shape[1])}:
        if _is_repeated(streams, groups):
            tiled = tuple(replace(s, k=_tiled(s.k, groups), v=_tiled(s.v, groups)) for s in streams)
            words = "with the heads of k and v repeated in turn"
            yield Candidate(f"groups: {words}", result(streams=tiled))
            break
    crossed = any(s.q.shape != s.k.shape for s in streams)  # text as keys: other lengths
    for a, b in ("kv",) if crossed else ("kv", "qk", "qv"):
        swapped = tuple(
            replace(s, **{a: getattr(s, b), b: getattr(s, a)}, raw=None) for s in streams
        )
        yield Candidate(f"parts: with {a} and {b} exchanged", result(streams=swapped))
    if len(streams) > 1:
        if usual.bias is None and usual.rotation is None:
            alone = streams[1:] if rows.start else streams[:1]
            yield Candidate("mask: in its own stream only", replace(usual, streams=alone).result())
        yield Candidate("streams: joined in the other order", result(streams=streams[::-1]))
        length = rows.stop - rows.start
        from_end = slice(0, length) if rows.start else slice(whole.shape[1] - length, None)
        yield Candidate("streams: cut from the other end", whole[:, from_end])


def _other_biases(
    bias: Array, lengths: Iterable[int]
) -> Iterator[tuple[str, dict[str, Array | None]]]:
    """Without the recorded bias, or without the keys that it hides; the fields to change."""
    hidden = bias < HIDDEN
    if not hidden.any():
        yield "bias: without the recorded bias", {"bias": None}
        yield "bias: with the recorded bias subtracted", {"bias": -bias}
        return
    # A bias of positions is one for the whole batch: where one entry hides a key, another shows it.
    shown = np.where(hidden, -np.inf, bias).max(0, keepdims=True)
    rest = np.where(np.isfinite(shown), shown, 0.0)
    yield "mask: without the recorded mask", {"bias": rest}
    after: dict[str, Array | None] = {"bias": rest, "kept": ~hidden}
    yield "mask: with the recorded mask after the softmax", after
    if rest.any():
        yield "bias: without the recorded bias", {"bias": np.where(hidden, -1e30, 0.0)}
    for length in lengths:
        if 0 < length < bias.shape[-1]:
            rolled = np.roll(bias, length, -1)
            yield "mask: with the mask of its streams in the other order", {"bias": rolled}


def _other_rotations(usual: Form, rows: slice) -> Iterator[Candidate]:
    rotation = usual.rotation
    assert rotation is not None
    pairs = "the two halves" if not rotation.halves else "neighbouring numbers"
    others = {
        "without the rotation": None,
        f"with rotated pairs of {pairs}": replace(rotation, halves=not rotation.halves),
        "rotated by the negative angles": replace(rotation, table=rotation.table.conj()),
        "with q rotated and k not": replace(rotation, of="q"),
        "with k rotated and q not": replace(rotation, of="k"),
        "with k rotated as if each token were one later": replace(
            rotation, keys=_moved(rotation.table, 1)
        ),
        "with q rotated as if each token were one later": replace(
            rotation, keys=_moved(rotation.table, -1)
        ),
        "rotated twice": replace(rotation, table=rotation.table**2),
    }
    others |= {
        f"rotated with the base {base:g}": replace(rotation, table=table)
        for base, table in _other_bases(rotation.table)
    }
    others |= {words: replace(rotation, table=table) for words, table in _other_positions(rotation)}
    for words, other in others.items():
        form = replace(usual, rotation=other)
        yield Candidate(f"rotation: {words}", form.result()[:, rows])


def _other_positions(rotation: Rotation) -> Iterator[tuple[str, Array]]:
    """The table with the positions of one stream displaced, or of a grid read column by column."""
    ends = np.cumsum(rotation.lengths)
    for end, length in zip(ends, rotation.lengths, strict=True):
        part, where = rotation.table[end - length : end], slice(end - length, end)
        stream = f"tokens {end - length} to {end - 1}" if len(ends) > 1 else "all tokens"
        moved = {
            f"with the positions of {stream} counted from 0": part * part[:1].conj(),
            f"with the positions of {stream} one later": _moved(part, 1),
            f"with the positions of {stream} one earlier": _moved(part, -1),
            f"without the rotation of {stream}": np.ones_like(part),
        }
        moved |= {
            f"with the positions of {stream} read column by column, in a grid of {rows} rows": part[
                np.arange(length).reshape(rows, -1).T.reshape(-1)
            ]
            for rows in range(2, length // 2 + 1)
            if length % rows == 0
        }
        for words, other in moved.items():
            if not np.allclose(other, part):
                table = rotation.table.copy()
                table[where] = other
                yield words, table


def _other_bases(table: Array) -> Iterator[tuple[float, Array]]:
    """The table with other frequencies, where positions count up and frequencies have a base."""
    base = base_of(table)
    first = float(np.angle(table[0, -1]) / np.angle(table[1, -1] / table[0, -1])) if base else 0.0
    for other in BASES if base and abs(first - round(first)) < 1e-2 else ():
        if abs(other / (base or 1.0) - 1) > 0.05:
            positions = np.arange(len(table)) + round(first)
            rates = other ** (-np.arange(table.shape[1]) / table.shape[1])
            yield other, np.exp(1j * np.outer(positions, rates))


def _moved(table: Array, by: int) -> Array:
    step = table[1] / table[0] if len(table) > 1 else table[0]
    return table * step**by


def _is_repeated(streams: tuple[Stream, ...], groups: int) -> bool:
    """Whether heads of k come in groups of equal ones."""
    return all(
        s.k.shape[1] % groups == 0
        and np.array_equal(s.k[:, ::groups].repeat(groups, 1), s.k)
        and s.k.shape[1] > groups
        for s in streams
    )


def _tiled(x: Array, groups: int) -> Array:
    return np.tile(x[:, ::groups], (1, groups, 1, 1))


def _raw(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    return tuple(stream.raw or stream for stream in streams)
