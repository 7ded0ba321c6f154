"""Attention computed again from the recorded q, k and v."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence, Recorded
from lydite.diff.findings.replay.attention_form import (
    FAR,
    Form,
    Rotation,
    Stream,
    divisors,
    fitted,
    glance,
    merged,
)
from lydite.diff.findings.replay.attention_variants import MOST_HEADS, variants
from lydite.diff.findings.replay.variants import (
    MAX_VALUES,
    Candidate,
    Told,
    allowed,
    apart_of,
    apart_of_port,
    told_apart,
)
from lydite.diff.result import Finding

MAX_SCORES = 2**25  # numbers in the scores of one variant
MAX_LENGTHS = 4  # of streams that a mask is tried for
MAX_BIASES = 3  # recorded values that are tried as bias or mask
MAX_FITS = 4  # forms that are tried with a scale that is not known
GLANCE_LEFT = 0.02  # of the reference that a form may leave at a few queries
MAX_KEYS = 160  # of an attention in which padding is searched
HIDDEN = -1e3  # a bias below this hides a key
COMMON_HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 64)
GIVEN = re.compile(r"\[in\.(query|key|value|[qkv])(?:_states|s)?\]")
PART = re.compile(
    r"(?:^|[._])(?P<norm>norm_|(?=[qk]_norm$))?(?P<added>added?_)?(?:to_)?"
    r"(?P<part>query|key|value|[qkv])(?:_proj|_norm|s)?$"
)
CAUSES = {
    "scale": ("attention-scale", "Multiply the scores by the reference's factor, once."),
    "softmax": ("softmax-axis", "Take the softmax over the keys, the last axis of the scores."),
    "mask": ("attention-mask", "Check the mask: which keys a query may see."),
    "heads": (
        "heads-merged-wrongly",
        "Check the number of heads, and the axes where they are split and "
        "joined: heads first in the width, tokens before heads.",
    ),
    "groups": ("heads-repeated-wrongly", "Repeat each head of k and v for its group of queries."),
    "norm": ("qk-norm-missing", "Apply the norms of q and k before the attention."),
    "parts": ("qkv-exchanged", "Check which of q, k and v is which."),
    "batch": ("batch-order", "Check the order of the batch: with and without the prompt."),
    "streams": ("streams-cut-wrongly", "Check the order in which the streams are joined and cut."),
    "bias": ("attention-bias", "Add the bias of the positions to the scores, as the reference."),
    "cap": (
        "score-cap",
        "Cap the scores by c · tanh(score / c), after the scale, before the mask.",
    ),
    "precision": ("lower-precision", "Compute the attention in the reference's precision."),
    "rotation": ("rotation-in-attention", "Rotate q and k as the reference does."),
}
Parts = dict[tuple[bool, bool, str], Array]  # (of a norm, of the added stream, q, k or v)


def other_attention(e: Evidence) -> Finding | None:
    """Another scale, mask, bias, rotation, head order, or q and k without their norms."""
    if not e.same_shape or e.kind != "activation" or not 0 < e.port.size <= MAX_VALUES:
        return None
    if e.port.ndim not in (3, 4):
        return None
    if e.slot.startswith("out") and (given := _given(e, e.name)):
        for case in _layouts(e, given):
            found = _replayed(case.e, case.parts, case.own, (case.heads,))
            if found is True:  # q and k before their norms may tell more
                found = _replayed(case.e, *recorded_parts(e), (case.heads,))
            if found is not None:
                return found if isinstance(found, Finding) else None
        return None
    if e.port.ndim == 3 and (found := _of_function_inside(e)) is not None:
        return found
    right, own = recorded_parts(e) if e.port.ndim == 3 else ({}, {})
    if not right:
        return None
    counts = dict.fromkeys((*COMMON_HEADS, *divisors(e.port.shape[-1])))
    usable = [n for n in counts if e.port.shape[-1] % n == 0 and n <= MOST_HEADS]
    found = _replayed(e, right, own, usable)
    return found if isinstance(found, Finding) else None


def _of_function_inside(e: Evidence) -> Finding | None:
    """The same of a function whose inputs are recorded in the module around a value.

    The value is what the function gives, or some of its tokens.
    """
    names = (r.name for r in e.before() if r.value.ndim == 4 and " [in" in r.name)
    functions = dict.fromkeys(name.partition(" [")[0] for name in names if ", step " not in name)
    module = re.split(r"[./](?=[^./]*$)", re.sub(r"[./]\d+$", "", e.name))[0]
    for name in functions:
        given = _given(e, name) if name.startswith((f"{module}.", f"{module}/")) else {}
        for case in _layouts(e, given, whole=False) if given else ():
            found = _replayed(case.e, case.parts, case.own, (case.heads,))
            if found is not None:
                return found if isinstance(found, Finding) else None
    return None


def _replayed(
    e: Evidence, right: Parts, own: Parts, counts: Sequence[int]
) -> Finding | bool | None:
    """What the port does; whether these q, k and v give the reference's value in any form."""
    lefts: list[tuple[float, Form, slice]] = []
    for heads in counts:
        for form, rows in _forms(e, right, heads):
            left = _left_of_reference(e, form, rows)
            if left <= GLANCE_LEFT and _left(e, form, rows) <= allowed(e):
                return _told(e, form, rows, own)
            if form.scale == 1.0:
                lefts.append((left, form, rows))
    lefts.sort(key=lambda entry: entry[0])
    for (left, form, rows), capped in product(lefts[:MAX_FITS], (False, True)):
        near = fitted(form, rows, e.values[0], capped=capped) if left < 1.0 else None
        if near is not None and _left(e, near, rows) <= _fit_limit(e):
            return _told(e, near, rows, own)
    return None


def _left_of_reference(e: Evidence, form: Form, rows: slice) -> float:
    """How far a form is from the reference at a few queries, relative to it."""
    at, queries = glance(rows)
    expected = e.values[0][:, at]
    return apart_of(expected, form.result(queries)) / float(np.linalg.norm(expected))


def _left(e: Evidence, form: Form, rows: slice) -> float:
    return apart_of(e.values[0], form.result()[:, rows])


def _fit_limit(e: Evidence) -> float:
    """The norm that a form with a fitted number may leave: only rounding."""
    return min(allowed(e), 2 * e.noise())


def _told(e: Evidence, form: Form, rows: slice, own: Parts) -> Finding | bool:
    """The variant of the reference's form that the port is; True where it is none of them."""
    mine = replace(form, streams=_like(form, own, e.port.shape[-1]))
    form, mine = _with_rotation(e, form, mine)
    lengths = _lengths(e)

    def forms_like(usual: Form) -> Iterator[Candidate]:
        yield Candidate("", usual.result()[:, rows])
        yield from variants(usual, rows, lengths)
        yield from _rotated(e, usual, rows)

    tried = list(forms_like(form))
    told = told_apart(e, tried, lambda: forms_like(mine), reference_is="")
    if told is None and len(form.streams) > 1 and len(form.result()[0]) == e.port.shape[1]:
        told = _in_other_order(e, mine, rows, lengths)
    if told is not None:
        return _finding(told.wrong, told.leaves)
    if (found := _other_number(e, form, mine, rows)) is not None:
        return found
    if (found := _other_padding(e, mine, rows)) is not None:
        return found
    if all(apart_of_port(e, c.value) > allowed(e) for c in tried):
        e.ruled_out.append(f"{len(tried)} forms of attention from the recorded q, k and v")
    return True


def _rotated(e: Evidence, form: Form, rows: slice) -> Iterator[Candidate]:
    """The form with rotated q or k, where the reference rotates neither."""
    if form.rotation is not None or len(form.streams) > 1:
        return
    tokens, keys = form.tokens
    parts = {"q": {tokens}, "k": {keys}, "qk": {tokens, keys}}
    for table, _ in _tables(e, form.head):
        for (part, counts), halves in product(parts.items(), (False, True)):
            if counts == {len(table)}:
                turned = replace(form, rotation=Rotation(table, halves, part))
                words = f"rotation: with {' and '.join(part)} rotated, unlike the reference"
                pairs = "the two halves" if halves else "neighbouring numbers"
                yield Candidate(f"{words}, with pairs of {pairs}", turned.result()[:, rows])


def _in_other_order(e: Evidence, mine: Form, rows: slice, lengths: tuple[int, ...]) -> Told | None:
    """As the port's value tells it with its streams in the other order, which is no mistake.

    Where a value is far off, the order in which a port joins two streams does not show.
    """
    turned = replace(e, port=np.roll(e.port, mine.streams[0].q.shape[2], 1), ruled_out=[])
    tried = [Candidate("", mine.result()[:, rows]), *variants(mine, rows, lengths)]
    told = told_apart(turned, tried, lambda: tried, reference_is="")
    return told if told is not None and not told.wrong.startswith("streams") else None


def _with_rotation(e: Evidence, form: Form, mine: Form) -> tuple[Form, Form]:
    """The form from q and k before they were rotated, where these are recorded too."""
    tokens, keys = form.tokens
    stream, *others = form.streams
    if form.rotation is not None or others or tokens != keys:
        return form, mine
    tables = list(_tables(e, form.head))
    values = [r.value for r in e.before() if r.value.size == stream.q.size] if tables else []
    for rotation in _rotations(form.streams, tables):
        back = replace(rotation, table=rotation.table.conj())
        raw = merged(back.apply(stream.q, "q"))
        near = 1e-3 * float(np.linalg.norm(raw))
        if not any(
            apart_of(joined, raw) <= near < apart_of(raw, merged(stream.q))
            for value in values
            for joined in _joined_heads(value, stream.q.shape)
        ):
            continue
        forms = (
            replace(
                f,
                streams=tuple(
                    replace(s, q=back.apply(s.q, "q"), k=back.apply(s.k, "k")) for s in f.streams
                ),
                rotation=rotation,
            )
            for f in (form, mine)
        )
        return next(forms), next(forms)
    return form, mine


def _joined_heads(value: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """A recorded q as (batch, tokens, width), whatever its layout."""
    batch, heads, tokens, head = shape
    if value.shape == shape:
        yield merged(value)
    if value.shape in ((batch, tokens, heads, head), (batch, tokens, heads * head)):
        yield value.reshape(batch, tokens, -1)


def _other_number(e: Evidence, form: Form, mine: Form, rows: slice) -> Finding | None:
    """That the port's scale or cap is another number, found by fitting it."""
    if e.layer is not None or apart_of(e.values[1], mine.result()[:, rows]) <= _fit_limit(e):
        return None  # right, from what the port gives it
    for capped in dict.fromkeys((form.cap is not None, True)):
        near = fitted(mine, rows, e.values[1], capped=capped)
        if near is None:
            return None
        left = apart_of(e.values[1], near.result()[:, rows])
        if left > _fit_limit(e):
            continue
        root = form.head**-0.5
        parts: list[str] = []
        if abs(near.scale / form.scale - 1) > 1e-3:
            scales = (_inverse_root(f.scale * root) for f in (near, form))
            parts.append("scale: with a scale of {}, not {}".format(*scales))
        sizes = [f.cap.size if f.cap is not None else 0.0 for f in (near, form)]
        if abs(sizes[0] - sizes[1]) > 1e-3 * max(sizes) and sizes[0] < 1e3:
            other = f"not {sizes[1]:.4g}" if sizes[1] else "which the reference does not have"
            parts.append(f"cap: with a cap of {sizes[0]:.4g} (softcap), {other}")
        if len(parts) == 1:
            return _finding(parts[0], e.leaves(left))
    return None


def _other_padding(e: Evidence, mine: Form, rows: slice) -> Finding | None:
    """That the port hides keys as padding that the reference shows, or shows more of them.

    Each row of the batch may have another length.
    """
    keys = mine.tokens[1]
    if e.layer is not None or keys > MAX_KEYS:
        return None
    at = np.arange(keys)
    padding = {f"keys from {n} on": at < n for n in range(1, keys)}
    padding |= {f"the first {n} keys": at >= n for n in range(1, keys)}
    left = np.full(len(e.port), np.inf)
    used = [""] * len(e.port)
    for words, shown in {"no keys": at >= 0, **padding}.items():
        both = shown if mine.shown is None else mine.shown & shown
        value = replace(mine, shown=both).result()[:, rows]
        for row, (port, own) in enumerate(zip(e.values[1], value, strict=True)):
            if (apart := apart_of(port, own)) < 0.5 * left[row]:
                left[row], used[row] = apart, words
    if float(np.linalg.norm(left)) > allowed(e) or set(used) == {"no keys"}:
        return None
    listed = ", ".join(f"{words} in row {row} of the batch" for row, words in enumerate(used))
    text = f"mask: with keys hidden as padding that the reference shows: {listed}"
    return _finding(text, e.leaves(float(np.linalg.norm(left))))


def _inverse_root(scale: float) -> str:
    """A factor of the scores for people: 1/√64 where that is a whole number."""
    number = scale**-2
    if number >= 2 and abs(number / round(number) - 1) < 1e-3:
        return f"1/√{round(number)}"
    return f"{scale:.4g}"


def _given(e: Evidence, name: str) -> dict[str, Recorded]:
    """q, k and v as inputs of a function of this name."""
    inputs = [r for r in e.before() if r.name.startswith(f"{name} [in") and r.value.ndim == 4]
    matches = [(GIVEN.search(r.name), r) for r in reversed(inputs)]
    named = {match[1][0]: r for match, r in matches if match}  # of several calls the last
    if set(named) == set("qkv"):
        return named
    alike = [r for r in inputs if "mask" not in r.name and "bias" not in r.name]
    alike = [r for r in alike if e.port.shape[-1] % r.value.shape[-1] == 0][:3]
    if len(alike) < 3 or alike[0].value.shape != alike[1].value.shape:
        return {}
    return dict(zip("vkq", alike, strict=True))  # the last input first


@dataclass(frozen=True)
class _Given:
    """The result of a function and its parts as (batch, tokens, width), on both sides."""

    e: Evidence
    parts: Parts
    own: Parts
    heads: int


def _layouts(e: Evidence, given: dict[str, Recorded], *, whole: bool = True) -> Iterator[_Given]:
    """Heads before tokens, or tokens before heads, as the shapes permit.

    Unless it is `whole`, the value may be some of the tokens.
    """
    for swap in (False, True):
        parts: Parts = {}
        own: Parts = {}
        for part, recorded in given.items():
            value, mine = recorded.value, recorded.own()
            mine = mine if mine is not None and mine.shape == value.shape else value
            sides = (x.swapaxes(1, 2) if swap else x for x in (value, mine))
            key = (False, False, part)
            parts[key], own[key] = (merged(x.astype(np.float64)) for x in sides)
        shapes = [given[part].value.shape for part in "qkv"]
        q, k, v = [(a, c, b, d) if swap else (a, b, c, d) for a, b, c, d in shapes]
        if k != v or q[::3] != k[::3] or q[1] % k[1]:
            continue
        if not whole:
            if e.port.shape[::2] == (q[0], q[1] * v[3]) and e.port.shape[1] <= q[2]:
                yield _Given(e, parts, own, q[1])
            continue
        joined = {
            (q[0], q[1], q[2], v[3]): merged,
            (q[0], q[2], q[1], v[3]): lambda x: x.reshape(*x.shape[:2], -1),
            (q[0], q[2], q[1] * v[3]): lambda x: x,
        }.get(e.port.shape)
        if joined is not None:
            yield _Given(
                replace(e, reference=joined(e.values[0]), port=joined(e.values[1])),
                parts,
                own,
                q[1],
            )


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


def recorded_parts(e: Evidence) -> tuple[Parts, Parts]:
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
    streams = streams_of(parts, heads, e.port.shape[-1])
    if not streams:
        return
    usual = Form(streams)
    tokens, keys = usual.tokens
    length = e.port.shape[1]
    if length > tokens or len(e.port) * heads * tokens * keys > MAX_SCORES:
        return
    tables_of = list(_tables(e, usual.head)) if tokens == keys else []
    is_whole = len(streams) > 1 and length == tokens
    orders = (
        (streams, streams[::-1]) if is_whole or (tables_of and len(streams) > 1) else (streams,)
    )
    rotations = [(order, rotation) for order in orders for rotation in _rotations(order, tables_of)]
    causal = {"shown": np.tri(tokens, keys, dtype=bool), "masked_by": "causal"}
    for (bias, shown), (order, rotation), scale, mask in product(
        [(None, None), *_biases(e, heads, tokens, keys)],
        [*((order, None) for order in (orders if is_whole else orders[:1])), *rotations],
        (1.0, usual.head**0.5),
        ({}, causal),
    ):
        if shown is not None and mask:
            continue
        for start in sorted({0, tokens - length, order[0].q.shape[2] if len(order) > 1 else 0}):
            if start + length <= tokens:
                form = Form(order, scale, shown, bias=bias, rotation=rotation)
                form, rows = replace(form, **mask), slice(start, start + length)
                yield form, rows
                if shown is not None and not shown.any(-1).all():
                    yield replace(form, zero_unseeing=True), rows


def _biases(
    e: Evidence, heads: int, queries: int, keys: int
) -> Iterator[tuple[Array | None, Array | None]]:
    """Recorded values that may be added to the scores, and which keys they show, each 4-d."""
    seen: list[Array] = []
    for recorded in e.before():
        value = _four_axes(recorded.value, len(e.port), heads, queries, keys)
        if value is None or any(np.array_equal(value, other) for other in seen):
            continue
        seen.append(value)
        yield _split_bias(value)
        if np.isin(value, (0.0, FAR)).all():  # zeros and ones may also be added as they are
            yield np.where(value, 0.0, 1.0), None
        if len(seen) == MAX_BIASES:
            return


def _four_axes(value: Array, batch: int, heads: int, queries: int, keys: int) -> Array | None:
    """A bias or mask as (1 or batch, 1 or heads, 1 or queries, keys); hidden keys far below 0."""
    if value.shape == (queries, keys, heads):
        value = value.transpose(2, 0, 1)[None]
    elif value.ndim < 4 and value.shape[-1:] != (keys,):
        return None
    elif value.ndim in (2, 3) and len(value) == batch * heads and heads > 1:
        value = value.reshape(batch, heads, -1, keys)
    elif value.ndim == 2:
        value = value[:, None, None] if len(value) in (1, batch) else value[None, None]
    elif value.ndim == 3:
        value = value[:, None]
    if value.ndim != 4 or value.shape[1:] not in (
        (heads, queries, keys), (1, queries, keys), (1, 1, keys), (heads, 1, keys),
    ):  # fmt: skip
        return None
    if value.shape[0] not in (1, batch) or not np.ptp(value):
        return None
    value = value.astype(np.float64)
    value = value[:, :1] if (value == value[:, :1]).all() else value
    if np.isin(value, (0.0, 1.0)).all():  # which keys are seen
        return np.where(value, 0.0, FAR)
    # One row for all queries hides keys; anything else of that shape is no bias of scores.
    is_bias = value.shape[2] > 1 or bool(((value == 0) | (value < HIDDEN)).all())
    return np.maximum(value, FAR) if is_bias else None


def _split_bias(value: Array) -> tuple[Array | None, Array | None]:
    """What is added to the scores of keys that are shown, and which these are."""
    hidden = value < HIDDEN
    if not hidden.any():
        return value, None
    # A bias of positions is one for the whole batch: where one entry hides a key, another shows it.
    shown = np.where(hidden, -np.inf, value).max(0, keepdims=True)
    rest = np.where(np.isfinite(shown), shown, 0.0)
    return rest if rest.any() else None, ~hidden


def _tables(e: Evidence, width: int) -> Iterator[tuple[Array, bool | None]]:
    """Recorded tables of rotations (tokens, pairs), and whether pairs are halves, if it shows."""
    parts: list[Array] = []
    for recorded in e.before():
        value = recorded.value
        rows = [n for n in value.shape[:-1] if n != 1]
        if len(rows) != 1 or width % 2 or value.shape[-1] not in (width, width // 2):
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


def streams_of(parts: Parts, heads: int, width: int) -> tuple[Stream, ...]:
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


def _like(form: Form, own: Parts, width: int) -> tuple[Stream, ...]:
    """The port's streams in the order of a form; the reference's where the port has none."""
    streams = streams_of(own, form.streams[0].q.shape[1], width)
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
