"""What ports do to attention: another scale, mask, order of heads, rotation, or exchanged parts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from lydite.diff.findings.evidence import Array
from lydite.diff.findings.replay.attention_form import Cap, Form, Rotation, Stream, divisors, merged
from lydite.diff.findings.replay.rotation_angles import BASES
from lydite.diff.findings.replay.rotations import base_of
from lydite.diff.findings.replay.variants import Candidate

MOST_HEADS = 128
MAX_WINDOWS = 64  # widths of a window that are tried
MAX_SCORES = 2**22  # of an attention that is computed with many widths of a window
CAUSAL: dict[str, Callable[[int, int], Array]] = {
    "a causal mask": lambda n, m: np.tri(n, m, dtype=bool),
    "a causal mask that is inverted": lambda n, m: np.tri(m, n, dtype=bool).T,
    "a causal mask that hides each token from itself": lambda n, m: np.tri(n, m, -1, dtype=bool),
    "a causal mask that shows the next token too": lambda n, m: np.tri(n, m, 1, dtype=bool),
}
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
Changes = Iterator[tuple[str, dict[str, Any]]]  # words, and the fields of the form that change


def variants(usual: Form, rows: slice, lengths: Iterable[int] = ()) -> Iterator[Candidate]:
    """Every variant of a form, at the rows that the value is; `lengths` are those of streams."""
    for words, changed in (
        *_other_scales(usual),
        ("softmax: with the softmax over the queries", {"axis": -2}),
        *_other_masks(usual, lengths),
        *_other_biases(usual),
        *_other_caps(usual),
        *_other_precisions(usual.streams),
        *_other_rotations(usual.rotation),
        *_other_groups(usual.streams),
        *_other_parts(usual.streams),
    ):
        yield Candidate(words, replace(usual, **changed).result()[:, rows])
    yield from _other_heads(usual, rows)
    if len(usual.streams) > 1:
        yield from _other_cuts(usual, rows)
    for words, changed in _other_orders(usual.streams, lengths):
        yield Candidate(words, replace(usual, **changed).result()[:, rows])


def _other_scales(usual: Form) -> Changes:
    head, heads = usual.head, usual.streams[0].q.shape[1]
    scales = {
        "without a scale": head**0.5,
        "with a scale of 1/√(width of a head)": 1.0,
        "with a second scale": head**-0.5 * usual.scale,
        "with the root of the whole width": heads**-0.5,
        "with a scale of 1/√(number of heads)": (head / heads) ** 0.5,
        "with a scale of 1/⁴√(width of a head)": head**0.25,
    }
    seen = [usual.scale]
    for words, scale in scales.items():
        if not any(np.isclose(scale, other) for other in seen):
            seen.append(scale)
            yield f"scale: {words}", {"scale": scale}


def _other_masks(usual: Form, lengths: Iterable[int]) -> Changes:
    """Which keys are seen, in another way."""
    n, m = usual.tokens
    if usual.shown is None:
        for words, mask in CAUSAL.items():
            yield f"mask: with {words}", {"shown": mask(n, m)}
        return
    shown = usual.shown.reshape((1,) * (4 - usual.shown.ndim) + usual.shown.shape)
    hidden = ~shown
    recorded = f"the {usual.masked_by} mask"
    if not shown.any(-1).all():
        results = ["the mean of all values", "zero"]
        first, other = results if usual.zero_unseeing else results[::-1]
        words = f"mask: with {first}, not {other}, for queries that see no key"
        yield words, {"zero_unseeing": not usual.zero_unseeing}
    bias = 0.0 if usual.bias is None else usual.bias
    words = "softmax: with the softmax over the queries, and zero for hidden keys"
    yield words, {"axis": -2, "kept": shown}
    yield f"mask: without {recorded}", {"shown": None}
    yield f"mask: with {recorded} after the softmax", {"shown": None, "kept": shown}
    yield f"mask: with {recorded} inverted", {"shown": hidden}
    words = f"mask: with the scores that {recorded} hides set to 0, not −infinity"
    yield words, {"hidden": 0.0, "zero_unseeing": False}
    yield f"mask: with 1 subtracted for a hidden key, not infinity, by {recorded}", {
        "shown": None, "bias": bias - hidden,
    }  # fmt: skip
    yield f"mask: with 1 added for a shown key, in place of {recorded}", {
        "shown": None, "bias": bias + shown,
    }  # fmt: skip
    if shown.shape[-2:] == (n, m) and n == m:
        words = f"mask: with {recorded} transposed, so that tokens see those after them"
        yield words, {"shown": shown.swapaxes(-1, -2)}
        yield from _other_causal(usual, shown)
    if n == m:
        queries = np.swapaxes(shown.any(-2, keepdims=True), -1, -2)
        if not queries.all():
            words = "mask: with zero for queries that are hidden as keys (padding)"
            yield words, {"kept": queries}
        causal = shown & np.tri(n, dtype=bool)
        if not np.array_equal(causal, np.broadcast_to(shown, causal.shape)):
            yield f"mask: with a causal mask beside {recorded}: no later keys", {"shown": causal}
    if len(shown) > 1:
        yield f"mask: with {recorded} of the first row for the whole batch", {"shown": shown[:1]}
        yield f"mask: with {recorded} of the batch backwards", {"shown": shown[::-1]}
    for length in lengths:
        if 0 < length < m:
            rolled = np.roll(shown, length, -1)
            yield "mask: with the mask of its streams in the other order", {"shown": rolled}


def _other_causal(usual: Form, shown: Array) -> Changes:
    """A mask of positions and padding with another part, another diagonal or another window."""
    n = shown.shape[-1]
    back = np.subtract.outer(np.arange(n), np.arange(n))  # how far back a key lies
    # A row that sees nothing, or everything before the end, is one of padding.
    is_last = np.arange(n)[:, None] == n - 1
    partly = shown.any(-1, keepdims=True) & (is_last | ~shown.all(-1, keepdims=True))
    seen = back[(shown & partly).any((0, 1))]
    if not seen.size or seen.min() != 0:
        common = ~(~shown).all(0, keepdims=True)  # whatever the row of the batch
        if (common != shown).any():
            yield "mask: without the mask of padding", {"shown": common}
        return
    width = int(seen.max()) + 1
    inside = (back >= 0) & (back < width)
    padding = (~shown | ~inside | ~partly).all(-2, keepdims=True)
    yield "mask: without the mask of padding", {"shown": inside}
    yield "mask: without the causal mask", {"shown": (back < width) & ~padding}
    later = (back <= 0) & ~padding
    yield "mask: with a causal mask that is inverted", {"shown": later}
    yield "mask: with a causal mask that is inverted, without padding", {"shown": back <= 0}
    if width < n:
        yield "mask: without the causal mask and the window", {"shown": ~padding & (back < n)}
        around = (np.abs(back) < width) & ~padding
        yield "mask: with a window to both sides, without the causal mask", {"shown": around}
    strict = shown & (back != 0)
    alone = ~strict.any(-1, keepdims=True)  # tokens that would see nothing
    words = "mask: with a mask that hides each token from itself"
    yield words, {"shown": strict}
    yield f"{words} where it sees others", {"shown": np.where(alone, shown, strict)}
    later = shown | ((back == -1) & ~padding)
    yield "mask: with a mask that shows the next token too", {"shown": later}
    tried = range(1, min(n, MAX_WINDOWS) + 1)
    if len(usual.streams[0].q) * usual.streams[0].q.shape[1] * n * n > MAX_SCORES:
        tried = ()
    for other in dict.fromkeys((width - 1, width + 1, *tried, n)):
        if other == width or not 0 < other <= n:
            continue
        words = f"mask: with a window of {other} keys, not {width}"
        if other == n:
            words = f"mask: without the window of {width} keys"
        elif width == n:
            words = f"mask: with a window of {other} keys"
        window = (back >= 0) & (back < other) & ~padding
        yield words, {"shown": window if other > width else shown & window}


def _other_biases(usual: Form) -> Changes:
    if usual.bias is not None and np.isin(usual.bias, (0.0, 1.0)).all():
        ones = usual.bias > 0
        seen = "the mask of zeros and ones, which the reference adds to the scores"
        yield f"mask: without {seen}", {"bias": None}
        words = f"mask: with {seen}, taken as which keys are seen"
        yield words, {"bias": None, "shown": ones}
        if not ones.any(-1).all():
            zero = {"bias": None, "shown": ones, "zero_unseeing": True}
            yield f"{words}, and zero for queries that see none", zero
        yield f"{words}, for keys alone", {"bias": None, "shown": ones.any(-2, keepdims=True)}
        yield f"mask: with {seen}, inverted", {"bias": ~ones * 1.0}
        for axis, what in ((-2, "keys"), (-1, "queries")):
            either = ones.any(axis, keepdims=True) * 1.0
            yield f"mask: with {seen}, for {what} alone", {"bias": either}
    elif usual.bias is not None:
        yield "bias: without the recorded bias", {"bias": None}
        yield "bias: with the recorded bias subtracted", {"bias": -usual.bias}


def _other_caps(usual: Form) -> Changes:
    if usual.cap is None:
        return
    size = usual.cap.size
    yield f"cap: without the cap of {size:.4g} (softcap)", {"cap": None}
    for place, words in (
        ("after the mask", "capped after the mask, so that hidden keys are seen"),
        ("before the scale", "capped before the scale"),
        ("without dividing", f"with {size:.4g} · tanh(score), not divided by {size:.4g} before"),
    ):
        yield f"cap: {words} (softcap)", {"cap": Cap(size, place)}


def _other_precisions(streams: tuple[Stream, ...]) -> Changes:
    for name, dtype in NARROW.items():
        low = tuple(
            Stream(_narrow(s.q, dtype), _narrow(s.k, dtype), _narrow(s.v, dtype)) for s in streams
        )
        yield f"precision: with q, k and v in {name}", {"streams": low}
        both = {"streams": low, "rounded": ("probabilities", dtype)}
        yield f"precision: with q, k, v and the probabilities in {name}", both
    for (name, dtype), what in product(NARROW.items(), ("scores", "probabilities")):
        yield f"precision: with the {what} in {name}", {"rounded": (what, dtype)}


def _narrow(x: Array, dtype: Any) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype).astype(np.float64)


def _other_heads(usual: Form, rows: slice) -> Iterator[Candidate]:
    """Another number of heads, or heads that lie in another order in the width."""
    joined = usual.heads()
    batch, heads, tokens, head = joined.shape
    if heads > 1:
        untransposed = joined.reshape(batch, tokens, -1)[:, rows]
        yield Candidate("heads: joined without a transpose", untransposed)
        turned = joined.transpose(0, 2, 3, 1).reshape(batch, tokens, -1)[:, rows]
        yield Candidate("heads: joined with the heads as the inner axis", turned)
    if usual.rotation is not None or any(s.q.shape[1] != s.k.shape[1] for s in usual.streams):
        return
    if any(s.q.shape[-1] != s.v.shape[-1] for s in usual.streams):
        return
    flat = replace(usual, scale=1.0) if np.isclose(usual.scale, 1.0) else usual
    per_head = any(
        table is not None and table.ndim == 4 and table.shape[1] > 1
        for table in (usual.bias, usual.shown, usual.kept)
    )
    for other in () if per_head else divisors(heads * head):
        if other != heads and other <= MOST_HEADS:
            form = replace(flat, streams=_resplit(usual.streams, lambda x, n=other: _outer(x, n)))
            words = f"heads: split into {other} heads, not {heads}"
            yield Candidate(words, form.result()[:, rows])
    if heads == 1:
        return
    inner = replace(flat, streams=_resplit(usual.streams, lambda x: _inner(x, heads))).heads()
    if all(s.q.shape == s.k.shape == s.v.shape for s in usual.streams):
        fused = tuple(_of_fused(s) for s in usual.streams)
        words = "heads: with q, k and v read head by head from the fused projection, not as thirds"
        yield Candidate(words, replace(flat, streams=fused).result()[:, rows])
    words = "heads: split with the heads as the inner axis of the width"
    yield Candidate(words, merged(inner)[:, rows])
    back = inner.transpose(0, 2, 3, 1).reshape(batch, tokens, -1)[:, rows]
    yield Candidate(f"{words}, and joined so", back)
    raw = replace(flat, streams=_resplit(usual.streams, lambda x: _untransposed(x, heads))).heads()
    yield Candidate("heads: split without a transpose", merged(raw)[:, rows])
    joined = raw.reshape(batch, tokens, -1)[:, rows]
    yield Candidate("heads: split and joined without a transpose", joined)


def _resplit(streams: tuple[Stream, ...], split: Callable[[Array], Array]) -> tuple[Stream, ...]:
    return tuple(
        Stream(split(merged(s.q)), split(merged(s.k)), split(merged(s.v))) for s in streams
    )


def _of_fused(s: Stream) -> Stream:
    """q, k and v of (…, 3 · width) read as (heads, 3, width of a head)."""
    heads = s.q.shape[1]
    joined = np.concatenate([merged(x) for x in (s.q, s.k, s.v)], -1)
    split = joined.reshape(*joined.shape[:2], heads, 3, -1).transpose(3, 0, 2, 1, 4)
    return Stream(split[0], split[1], split[2])


def _outer(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _inner(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2)


def _untransposed(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, x.shape[1], -1)


def _other_groups(streams: tuple[Stream, ...]) -> Changes:
    """Heads of k and v that groups of queries share, in another order."""
    for groups in divisors(streams[0].k.shape[1]):
        if groups > 1 and _is_repeated(streams, groups):
            tiled = tuple(replace(s, k=_tiled(s.k, groups), v=_tiled(s.v, groups)) for s in streams)
            yield "groups: with the heads of k and v repeated in turn", {"streams": tiled}
            return


def _is_repeated(streams: tuple[Stream, ...], groups: int) -> bool:
    """Whether heads of k come in groups of equal ones."""
    return all(
        np.array_equal(s.k[:, ::groups].repeat(groups, 1), s.k) and s.k.shape[1] > groups
        for s in streams
    )


def _tiled(x: Array, groups: int) -> Array:
    return np.tile(x[:, ::groups], (1, groups, 1, 1))


def _other_parts(streams: tuple[Stream, ...]) -> Changes:
    """q, k and v without their norms, exchanged, or of other rows of the batch."""
    if all(stream.raw for stream in streams):
        raw = tuple(stream.raw or stream for stream in streams)
        yield "norm: without the norms of q and k", {"streams": raw}
        for part in "qk":
            normed = tuple(replace(s, v=_normed_like(s, part)) for s in streams)
            yield f"norm: with v normed like {part}", {"streams": normed}
            count = len(streams)
            for at in range(count if count > 1 else 0):
                some = (*streams[:at], normed[at], *streams[at + 1 :])
                words = f"norm: with v of the stream of {normed[at].v.shape[2]} tokens normed like"
                yield f"{words} {part}", {"streams": some}
            one = tuple(replace(s, **{part: getattr(s.raw, part)}) for s in streams)
            yield f"norm: without the norm of {part}", {"streams": one}
    crossed = any(s.q.shape != s.k.shape for s in streams)  # text as keys: other lengths
    for a, b in ("kv",) if crossed else ("kv", "qk", "qv"):
        if any(getattr(s, a).shape != getattr(s, b).shape for s in streams):
            continue
        swapped = tuple(
            replace(s, **{a: getattr(s, b), b: getattr(s, a)}, raw=None) for s in streams
        )
        yield f"parts: with {a} and {b} exchanged", {"streams": swapped}
    if len(streams[0].k) > 1:
        turned = tuple(replace(s, k=s.k[::-1], v=s.v[::-1], raw=None) for s in streams)
        yield "batch: with the rows of the batch of k and v in the other order", {"streams": turned}


def _normed_like(stream: Stream, part: str) -> Array:
    """v with the norm of q or k: over a head or the whole width, with or without the mean."""
    raw, normed = (getattr(s, part) for s in (stream.raw or stream, stream))
    heads, v = stream.v.shape[1], stream.v
    if v.shape[-1] != raw.shape[-1] or v.shape[1] != raw.shape[1]:
        return v
    found: list[tuple[float, Array]] = []
    for whole, centred in product((False, True), (False, True)):
        sides = [merged(x)[:, None] if whole else x for x in (raw, normed, v)]
        plain, mine = (_standard(x, centred=centred) for x in (sides[0], sides[2]))
        power = (plain * plain).sum((0, 1, 2))
        weight = (plain * sides[1]).sum((0, 1, 2)) / np.where(power, power, 1.0)
        value = mine * weight
        value = _outer(value[:, 0], heads) if whole else value
        found.append((float(np.linalg.norm(plain * weight - sides[1])), value))
    return min(found, key=lambda entry: entry[0])[1]


def _standard(x: Array, *, centred: bool) -> Array:
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _other_orders(streams: tuple[Stream, ...], lengths: Iterable[int]) -> Changes:
    """q, k or v alone with its streams joined in the other order."""
    q, k, v = (np.concatenate([getattr(s, part) for s in streams], 2) for part in "qkv")
    joined = Stream(q, k, v)
    if len(streams) > 1:
        lengths = [streams[0].q.shape[2]]
    for part, length in product("vkq", lengths):
        value = getattr(joined, part)
        if 0 < length < value.shape[2]:
            other = replace(joined, **{part: np.roll(value, -length, 2)})
            words = f"streams: with the streams of {part} joined in another order than the others'"
            words += f", the first {length} tokens at its end"
            yield words, {"streams": (other,)}


def _other_cuts(usual: Form, rows: slice) -> Iterator[Candidate]:
    """Streams joined or cut in another way."""
    streams, whole = usual.streams, usual.result()
    if usual.bias is None and usual.rotation is None and usual.shown is None:
        alone = streams[1:] if rows.start else streams[:1]
        yield Candidate("mask: in its own stream only", replace(usual, streams=alone).result())
    other = replace(usual, streams=streams[::-1]).result()[:, rows]
    yield Candidate("streams: joined in the other order", other)
    length = rows.stop - rows.start
    from_end = slice(0, length) if rows.start else slice(whole.shape[1] - length, None)
    yield Candidate("streams: cut from the other end", whole[:, from_end])


def _other_rotations(rotation: Rotation | None) -> Changes:
    if rotation is None:
        return
    pairs = "the two halves" if not rotation.halves else "neighbouring numbers"
    table = rotation.table
    others = {
        "without the rotation": None,
        f"with rotated pairs of {pairs}": replace(rotation, halves=not rotation.halves),
        "rotated by the negative angles": replace(rotation, table=table.conj()),
        "with q rotated and k not": replace(rotation, of="q"),
        "with k rotated and q not": replace(rotation, of="k"),
        "with v rotated too": replace(rotation, of="qkv"),
        "with k rotated as if each token were one later": replace(rotation, keys=_moved(table, 1)),
        "with q rotated as if each token were one later": replace(rotation, keys=_moved(table, -1)),
        "rotated twice": replace(rotation, table=table**2),
    }
    if table.shape[1] % 2 == 0:
        first, second = table[:, : table.shape[1] // 2], table[:, ::2]
        words = "with only the first half of each head rotated"
        others[words] = replace(rotation, table=first)
        others[f"{words}, by every second frequency"] = replace(rotation, table=second)
    others |= {
        f"rotated with the base {base:g}": replace(rotation, table=other)
        for base, other in _other_bases(table)
    }
    others |= {words: replace(rotation, table=other) for words, other in _other_positions(rotation)}
    for words, other in others.items():
        yield f"rotation: {words}", {"rotation": other}


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
            f"with the positions of {stream} backwards": part[::-1],
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
