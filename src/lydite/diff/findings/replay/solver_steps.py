"""Steps of samplers computed again from the recorded table of sigmas or timesteps.

As in diffusers 0.42.1: Euler, Euler ancestral, DDIM, DPM-Solver++ and its SDE form, LMS, and the
first step of second order of UniPC. Each is a sum of the sample x, the network's output, both of
the step before, and noise; the factors follow from the levels α and σ of the noise. So forms are
compared by five factors and the products of the recorded values, not by values.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, log, sqrt

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.sampler_steps import STEP
from lydite.diff.findings.replay.variants import Source, allowed, is_replayable, sources
from lydite.diff.findings.schedules import BETAS, STEPS
from lydite.diff.result import Finding

MAX_SAMPLES, MAX_OUTPUTS, MAX_NOISES = 4, 6, 2  # recorded values that are tried as these
LEAST = 1e-3  # of the value that a term contributes
ETAS = (1.0, 0.5, 0.3, 0.2, 0.1, 0.7, 0.8)
NOISE, V, PICTURE, FLOW = "noise", "v", "picture", "velocity of flow matching"
Level = tuple[float, float]  # α and σ of x = α · picture + σ · noise
Sum = Array  # the factors of x, output, earlier x, earlier output, noise


@dataclass(frozen=True)
class Levels:
    """The noise before each step and after the last, and what a network may predict there."""

    name: str
    table: tuple[Level, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A step: its solver, what the network predicts, and what is changed in it."""

    solver: str
    output: str
    kind: str = "midpoint"  # of the term of second order
    eta: float = 1.0
    start: int = 0  # by how many steps the level at its start is displaced
    end: int = 0
    change: str = ""  # one of the words of `CHANGES`


@dataclass(frozen=True)
class Parts:
    """What the factors of a step are computed from."""

    start: Level
    end: Level
    before: Level | None
    x: Sum
    picture: Sum  # that the output predicts
    earlier: Sum  # the picture that the earlier output predicts
    noise: Sum


def other_solver_step(e: Evidence) -> Finding | None:
    """A step of a known solver with another order, ratio of steps, level, output or noise."""
    if not is_replayable(e) or e.port.ndim < 2 or "." in e.name:
        return None  # steps are computed outside of networks
    levels = list(known_levels(e.tables()))
    for terms in _terms(e) if levels else ():
        right, wrong = (_products(terms, e.values[side], side) for side in (0, 1))
        for table, at in product(levels, (e.step, e.step - 1, e.step + 1)):
            if (found := _told(e, table, at, right, wrong)) is not None:
                return found if isinstance(found, Finding) else None
    return None


def _told(
    e: Evidence, levels: Levels, at: int, right: Array, wrong: Array
) -> Finding | bool | None:
    """What the port does; False where the reference is a known step and the port no form of it."""
    for usual in _usual(levels.outputs, history=right[3, 3] > 0, noise=right[4, 4] > 0):
        factors = factors_of(usual, levels, at)
        if factors is None or _left(right, factors) > allowed(e):
            continue
        used = np.abs(factors) * np.sqrt(np.diag(right)[:5]) > LEAST * e.norms[0]
        if not used[1] or used.sum() < 2:
            continue  # the output itself, or x
        tried = [
            (words, _left(wrong, other))
            for words, form in _changed(usual, levels)
            if (other := factors_of(form, levels, at)) is not None
        ]
        least = min((left for _, left in tried), default=inf)
        if least > min(allowed(e), _left(wrong, factors) / 4):
            e.ruled_out.append(f"{len(tried)} forms of {usual.solver}")
            return False
        # Of forms that leave about as little, the first: they are the same in this step.
        words, left = next(entry for entry in tried if entry[1] <= 3 * least)
        return Finding(
            "other-step",
            f"The reference is {_name(usual)} of a network that predicts the {usual.output}, from "
            f"{_level(levels, at)} to {_level(levels, at + 1)}; the port is that {words}; "
            f"{e.leaves(left)}.",
            "Compute the step as the reference.",
        )
    return None


def _name(step: Step) -> str:
    if step.solver in SECOND:
        return f"{step.solver} (solver type {step.kind})"
    return f"{step.solver} with eta {step.eta:g}" if step.solver == NOISY else step.solver


def _level(levels: Levels, at: int) -> str:
    alpha, sigma = levels.table[at]
    is_ratio = levels.name == "sigma" and levels.outputs[0] != FLOW
    return f"{levels.name} {sigma / (alpha or 1.0) if is_ratio else sigma:.4g}"


# Recorded values and tables.


def _terms(e: Evidence) -> Iterator[tuple[Source | None, ...]]:
    """x, the output, both of the step before, and noise, as far as they are recorded."""
    values = [s for s in sources(e) if s.x.size == e.port.size]
    now = [s for s in values if _step(s, e) == e.step]
    outputs = [s for s in now if not s.is_input][:MAX_OUTPUTS]
    begun = [s for s in values if s.is_input]
    last = [s for s in values if _step(s, e) == e.step - 1 and not s.is_input]
    samples = [*[s for s in last if _is_same(s.name, f"{e.name}")], *begun, *now]
    noises = (*[s for s in begun if _step(s, e) == e.step][:MAX_NOISES], None)
    for output, noise in product(outputs, noises):
        earlier = next((s for s in last if _is_same(s.name, output.name)), None)
        for x in [s for s in samples if s is not output and s is not noise][:MAX_SAMPLES]:
            before = (s for s in values if _step(s, e) == _step(x, e) - 1)
            then = next((s for s in before if _is_same(s.name, x.name)), None)
            then = then or next((s for s in begun if s is not x and s is not noise), None)
            yield x, output, then if then is not x else None, earlier, noise


def _step(source: Source, e: Evidence) -> int:
    match = STEP.search(source.name)
    return int(match[1]) if match else e.step


def _is_same(name: str, other: str) -> bool:
    return STEP.sub("", name) == STEP.sub("", other)


def _products(terms: tuple[Source | None, ...], value: Array, side: int) -> Array:
    """The products of all terms and the value with each other."""
    rows = [
        np.zeros(value.size) if t is None else (t.own if side else t.x).reshape(-1) for t in terms
    ]
    stacked = np.stack([*rows, value.reshape(-1)]).astype(np.float64)
    return stacked @ stacked.T


def _left(products: Array, factors: Sum) -> float:
    """‖sum − value‖."""
    weights = np.append(factors, -1.0)
    if not np.isfinite(weights).all():
        return inf
    used = np.abs(weights) > 0
    if (np.diag(products)[used] == 0).any():  # a term that is not recorded
        return inf
    return sqrt(max(float(weights @ products @ weights), 0.0))


def known_levels(tables: Iterable[tuple[str, Array]]) -> Iterator[Levels]:
    """Sigmas and timesteps as levels of noise, in each way that they may be meant."""
    for _, table in tables:
        values = np.asarray(table, np.float64).reshape(-1)
        if values.size < 2 or not np.isfinite(values).all() or values.min() < 0:
            continue
        if values.max() <= 1.0:
            yield _flow("sigma", values)
        elif (values == np.rint(values)).all() and values.max() <= STEPS:
            yield from _of_timesteps(values)
        else:
            roots = np.sqrt(1 + values**2)
            ends = () if values[-1] == 0 else ((1.0, 0.0),)
            scaled = tuple(zip(1 / roots, values / roots, strict=True))
            yield Levels("sigma", (*scaled, *ends), (NOISE, V, PICTURE))
            plain = tuple((1.0, float(s)) for s in values)
            yield Levels("sigma", (*plain, *ends), (NOISE, V, PICTURE))
            if values.max() <= STEPS:
                yield _flow("timestep / 1000", values / STEPS)


def _flow(name: str, sigmas: Array) -> Levels:
    table = tuple((1 - float(s), float(s)) for s in sigmas)
    return Levels(name, table if table[-1][1] == 0 else (*table, (1.0, 0.0)), (FLOW, PICTURE))


def _of_timesteps(times: Array) -> Iterator[Levels]:
    yield _flow("timestep / 1000", times / STEPS)
    for low, high, power in BETAS.values():
        kept = np.cumprod(1 - np.linspace(low, high, int(STEPS)) ** power)
        levels = [(sqrt(k), sqrt(1 - k)) for k in kept[np.minimum(times, STEPS - 1).astype(int)]]
        for end in ((1.0, 0.0), (sqrt(kept[0]), sqrt(1 - kept[0]))):
            yield Levels("the noise level", (*levels, end), (NOISE, V, PICTURE))


# The arithmetic.

FIRST = "a step of first order (Euler, DDIM without noise, DPM-Solver++ of order 1)"
NOISY = "a step with noise (DDIM, Euler ancestral, SDE-DPM-Solver++ of order 1)"
MULTI = "a DPM-Solver++ step of second order (2M)"
MULTI_NOISY = "an SDE-DPM-Solver++ step of second order"
LMS = "a linear multistep of second order (LMS, Adams-Bashforth)"
UNIPC = "a UniPC step (a corrector, then a predictor of second order)"
SECOND = (MULTI, MULTI_NOISY)


def _usual(outputs: tuple[str, ...], *, history: bool, noise: bool) -> Iterator[Step]:
    """Steps as they should be."""
    for output in outputs:
        if noise:
            yield from (Step(NOISY, output, eta=eta) for eta in ETAS)
            if history:
                yield from (Step(MULTI_NOISY, output, kind) for kind in ("midpoint", "heun"))
            continue
        yield Step(FIRST, output)
        if history:
            yield from (Step(MULTI, output, kind) for kind in ("midpoint", "heun"))
            yield from (Step(UNIPC, output, kind) for kind in ("bh2", "bh1"))
            yield from (Step(LMS, output, kind) for kind in ("of uneven steps", "of even steps"))


def _changed(usual: Step, levels: Levels) -> Iterator[tuple[str, Step]]:
    """What a port may do in place of a step, and how it is told; the likely first."""
    for words, (solvers, _) in CHANGES.items():
        if not solvers or usual.solver in solvers:
            yield words, replace(usual, change=words)
    others = {MULTI: ("midpoint", "heun"), MULTI_NOISY: ("midpoint", "heun"), UNIPC: ("bh1", "bh2")}
    for kind in others.get(usual.solver, ()):
        if kind != usual.kind:
            yield f"with the solver type {kind}", replace(usual, kind=kind)
    for output in (NOISE, V, PICTURE, FLOW):
        if output != usual.output:
            words = f"with the output taken for a prediction of the {output}"
            yield words, replace(usual, output=output)
    for by in (1, -1, 2):
        steps = f"{abs(by)} step{'s' if abs(by) > 1 else ''} {'later' if by > 0 else 'earlier'}"
        index = "a sigma of another index"
        yield f"to the level {steps} ({index})", replace(usual, end=by)
        yield f"from the level {steps} ({index})", replace(usual, start=by)
        words = f"from and to the levels {steps} (both sigmas of another index)"
        yield words, replace(usual, start=by, end=by)
    for eta in (*ETAS, 0.0) if usual.solver == NOISY else ():
        if eta != usual.eta:
            yield f"with eta {eta:g}", replace(usual, eta=eta)


def factors_of(step: Step, levels: Levels, at: int) -> Sum | None:
    """The factors of a step's terms; None where its levels are not in the table."""
    places = at + step.start, at + 1 + step.end
    if min(places) < 0 or max(places) >= len(levels.table):
        return None
    start, end = (levels.table[place] for place in places)
    if (start[0] <= 0 and step.output != FLOW) or start[1] <= 0:
        return None
    before = levels.table[at - 1 + step.start] if at - 1 + step.start >= 0 else None
    eye = np.eye(5)
    parts = Parts(
        start, end, before, eye[0], _picture(step.output, start, eye[0], eye[1]),
        _picture(step.output, before, eye[2], eye[3]) if before else np.zeros(5), eye[4],
    )  # fmt: skip
    change = CHANGES[step.change][1] if step.change else None
    try:
        return SOLVERS[step.solver](step, parts) if change is None else change(step, parts)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _picture(output: str, level: Level, x: Sum, y: Sum) -> Sum:
    """The picture that an output predicts from x."""
    alpha, sigma = level
    if output == NOISE:
        return (x - sigma * y) / alpha
    if output == V:
        size = sqrt(alpha**2 + sigma**2)
        return alpha / size**2 * x - sigma / size * y
    return y if output == PICTURE else x - sigma * y


def _shrink(start: Level, end: Level) -> float:
    """exp(−h), where h is the difference of the logarithms of α/σ."""
    return start[0] * end[1] / (start[1] * end[0]) if end[0] else inf


def _size(start: Level, end: Level) -> float:
    """h."""
    shrink = _shrink(start, end)
    return -log(shrink) if shrink > 0 else inf


def _first(p: Parts, picture: Sum | None = None) -> Sum:
    picture = p.picture if picture is None else picture
    ratio = p.end[1] / p.start[1]
    return ratio * p.x + (p.end[0] - p.start[0] * ratio) * picture


def _noisy(step: Step, p: Parts) -> Sum:
    spread = step.eta * p.end[1] * sqrt(max(1 - _shrink(p.start, p.end) ** 2, 0.0))
    return _with_spread(p, sqrt(max(p.end[1] ** 2 - spread**2, 0.0)), spread)


def _with_spread(p: Parts, direction: float, spread: float) -> Sum:
    noise = (p.x - p.start[0] * p.picture) / p.start[1]
    return p.end[0] * p.picture + direction * noise + spread * p.noise


def _ratio(p: Parts) -> float:
    """The step before over this one, both as h."""
    if p.before is None:
        raise ValueError
    return _size(p.before, p.start) / _size(p.start, p.end)


def _history(step: Step, p: Parts, ratio: float | None = None, earlier: Sum | None = None) -> Sum:
    """The term of second order of a multistep."""
    if not p.earlier.any():
        raise ValueError
    ratio = _ratio(p) if ratio is None else ratio
    slope = (p.picture - (p.earlier if earlier is None else earlier)) / ratio
    power = 2 if step.solver == MULTI_NOISY else 1
    shrink, size = _shrink(p.start, p.end) ** power, power * _size(p.start, p.end)
    if step.kind == "midpoint":
        return 0.5 * p.end[0] * (1 - shrink) * slope
    return p.end[0] * ((shrink - 1) / size + 1) * slope


def _multi(step: Step, p: Parts) -> Sum:
    return _base(step, p) + _history(step, p)


def _base(step: Step, p: Parts) -> Sum:
    """The part of a multistep without its term of second order."""
    return _noisy(step, p) if step.solver == MULTI_NOISY else _first(p)


def _lms(step: Step, p: Parts) -> Sum:
    now, then = _slopes(p)
    assert p.before is not None
    way, last = p.end[1] - p.start[1], p.start[1] - p.before[1]
    half = 0.5 * (way / last if step.kind == "of uneven steps" else 1.0)
    return p.x + way * ((1 + half) * now - half * then)


def _slopes(p: Parts) -> tuple[Sum, Sum]:
    """dx/dσ now and in the step before."""
    if p.before is None or not p.earlier.any():
        raise ValueError
    earlier = np.eye(5)[2]
    return (p.x - p.picture) / p.start[1], (earlier - p.earlier) / p.before[1]


def _unipc(step: Step, p: Parts) -> Sum:
    return _predicted(step, p, _corrected(step, p))


def _corrected(step: Step, p: Parts, slope: float = 0.5) -> Sum:
    if p.before is None or not p.earlier.any():
        raise ValueError
    back = replace(p, start=p.before, end=p.start, x=np.eye(5)[2])
    return _first(back, p.earlier) + slope * p.start[0] * _weight(step, back) * (
        p.picture - p.earlier
    )


def _predicted(step: Step, p: Parts, x: Sum, slope: float = 0.5) -> Sum:
    ahead = replace(p, x=x)
    growth = slope * p.end[0] * _weight(step, p) * (p.picture - p.earlier) / _ratio(p)
    return _first(ahead) + growth


def _weight(step: Step, p: Parts) -> float:
    return 1 - _shrink(p.start, p.end) if step.kind == "bh2" else _size(p.start, p.end)


SOLVERS: dict[str, Callable[[Step, Parts], Sum]] = {
    FIRST: lambda _, p: _first(p),
    NOISY: _noisy,
    MULTI: _multi,
    MULTI_NOISY: _multi,
    LMS: _lms,
    UNIPC: _unipc,
}


def _turned(level: Level) -> Level:
    return level[1], level[0]


def _spread(step: Step, p: Parts) -> float:
    return step.eta * p.end[1] * sqrt(max(1 - _shrink(p.start, p.end) ** 2, 0.0))


def _root(number: float) -> float:
    return sqrt(max(number, 0.0))


def _old(p: Parts) -> Sum:
    """The output of the step before in the place of the output, with the present x."""
    picture = p.picture.copy()
    picture[3], picture[1] = picture[1], 0.0
    return picture


def _whole(step: Step, p: Parts) -> Sum:
    return SOLVERS[step.solver](step, p)


# What ports do to a step: the solvers it may happen to (none: all), and the factors then.
CHANGES: dict[str, tuple[tuple[str, ...], Callable[[Step, Parts], Sum]]] = {
    "without the term of second order: a step of first order": (SECOND, _base),
    "with the term of second order of the other sign": (
        SECOND, lambda s, p: _base(s, p) - _history(s, p),
    ),
    "with the term of second order twice as large (a factor 0.5 is missing)": (
        SECOND, lambda s, p: _base(s, p) + 2 * _history(s, p),
    ),
    "with the ratio r of the two steps inverted": (
        SECOND, lambda s, p: _base(s, p) + _history(s, p, 1 / _ratio(p)),
    ),
    "without dividing by the ratio r of the two steps": (
        SECOND, lambda s, p: _base(s, p) + _history(s, p, 1.0),
    ),
    "with the network's earlier output as it is in the term of second order, not the picture that "
    "it predicts": (SECOND, lambda s, p: _base(s, p) + _history(s, p, earlier=np.eye(5)[3])),
    "with the earlier picture in the place of the present one": (
        (), lambda s, p: _whole(s, replace(p, picture=p.earlier)),
    ),
    "with the earlier picture in the part of first order": (
        SECOND, lambda s, p: _base(s, replace(p, picture=p.earlier)) + _history(s, p),
    ),
    "with the network's output of the step before": (
        (), lambda s, p: _whole(s, replace(p, picture=_old(p))),
    ),
    "without the corrector": ((UNIPC,), lambda s, p: _predicted(s, p, p.x)),
    "without the corrector, of first order": ((UNIPC,), lambda _, p: _first(p)),
    "with a predictor of first order": (
        (UNIPC,), lambda s, p: _first(replace(p, x=_corrected(s, p))),
    ),
    "with a corrector that does not use the new output": (
        (UNIPC,), lambda s, p: _predicted(s, p, _corrected(s, p, 0.0)),
    ),
    "with the correction twice as large (a factor 0.5 is missing)": (
        (UNIPC,), lambda s, p: _predicted(s, p, _corrected(s, p, 1.0)),
    ),
    "with the predictor's term of second order twice as large (a factor 0.5 is missing)": (
        (UNIPC,), lambda s, p: _predicted(s, p, _corrected(s, p), 1.0),
    ),
    "with the predictor's term of second order of the other sign": (
        (UNIPC,), lambda s, p: _predicted(s, p, _corrected(s, p), -0.5),
    ),
    "with the correction of the other sign": (
        (UNIPC,), lambda s, p: _predicted(s, p, _corrected(s, p, -0.5)),
    ),
    "without the earlier slope: an Euler step": ((LMS,), lambda _, p: _first(p)),
    "with the factors of even steps (1.5 and −0.5)": (
        (LMS,), lambda s, p: _lms(replace(s, kind="of even steps"), p),
    ),
    "without the noise": (
        (NOISY, MULTI_NOISY), lambda s, p: _whole(s, replace(p, noise=np.zeros(5))),
    ),
    "with the noise times its variance, without the square root": (
        (NOISY, MULTI_NOISY),
        lambda s, p: _whole(s, replace(p, noise=_spread(s, p) * p.noise)),
    ),
    "with the noise times the whole sigma of the next level": (
        (NOISY, MULTI_NOISY),
        lambda s, p: _whole(s, replace(p, noise=p.end[1] / _spread(s, p) * p.noise)),
    ),
    "with the noise as it is, not multiplied by sigma": (
        (NOISY, MULTI_NOISY), lambda s, p: _whole(s, replace(p, noise=p.noise / _spread(s, p))),
    ),
    "with the noise multiplied by the present sigma, not the next": (
        (NOISY, MULTI_NOISY),
        lambda s, p: _whole(s, replace(p, noise=p.start[1] / p.end[1] * p.noise)),
    ),
    "with exp(−h), not exp(−2h), under the root of the noise": (
        (NOISY, MULTI_NOISY),
        lambda s, p: _whole(
            s,
            replace(p, noise=_root(1 - _shrink(p.start, p.end)) * p.noise
                    / _root(1 - _shrink(p.start, p.end) ** 2)),
        ),
    ),
    "with noise, but the rest as without noise (sigma_down, or the direction, is not reduced by "
    "the variance)": (
        (NOISY,), lambda s, p: _with_spread(p, p.end[1], _spread(s, p)),
    ),
    "with sigma, not sigma², subtracted under the root of the direction": (
        (NOISY,),
        lambda s, p: _with_spread(p, _root(p.end[1] ** 2 - _spread(s, p)), _spread(s, p)),
    ),
    "with the variance without a root as sigma, in the direction too": (
        (NOISY,),
        lambda s, p: _with_spread(
            p, _root(p.end[1] ** 2 - (_spread(s, p) ** 2 / s.eta) ** 2), _spread(s, p) ** 2 / s.eta
        ),
    ),
    "with sigma_up and sigma_down exchanged": (
        (NOISY,),
        lambda s, p: _with_spread(p, _spread(s, p), _root(p.end[1] ** 2 - _spread(s, p) ** 2)),
    ),
    "with the deterministic step of first order, and the noise added": (
        (MULTI_NOISY,), lambda s, p: _first(p) + _spread(s, p) * p.noise,
    ),
    "with the deterministic part of DPM-Solver++, and the noise added": (
        (MULTI_NOISY,),
        lambda s, p: _multi(replace(s, solver=MULTI), p) + _spread(s, p) * p.noise,
    ),
    "in the other direction (sigmas subtracted in the other order)": (
        (), lambda s, p: 2 * p.x - _whole(s, p),
    ),
    "with exp(h) in the place of exp(−h)": (
        (FIRST, *SECOND),
        lambda _, p: p.end[1] / p.start[1] * p.x
        + p.end[0] * (1 - 1 / _shrink(p.start, p.end)) * p.picture,
    ),
    "without α in the factor of the picture": (
        (FIRST, *SECOND),
        lambda _, p: p.end[1] / p.start[1] * p.x
        + (1 - _shrink(p.start, p.end)) * p.picture,
    ),
    "with the sample not multiplied by the ratio of the sigmas": (
        (), lambda s, p: _whole(s, p) + (1 - p.end[1] / p.start[1]) * p.x,
    ),
    "with the picture that the output predicts in the place of the slope": (
        (FIRST,), lambda _, p: p.x + (p.end[1] - p.start[1]) * p.picture,
    ),
    "as x + (next sigma − sigma) · output": (
        (FIRST,), lambda _, p: p.x + (p.end[1] - p.start[1]) * np.eye(5)[1],
    ),
    "as x + (next σ/α − σ/α) · output": (
        (FIRST,),
        lambda _, p: p.x
        + (p.end[1] / p.end[0] - p.start[1] / p.start[0]) * np.eye(5)[1],
    ),
    "without dividing the picture by α": (
        (), lambda s, p: _whole(s, replace(p, picture=p.start[0] * p.picture)),
    ),
    "with the present α in the place of the next one": (
        (FIRST, NOISY), lambda s, p: _whole(s, p) + (p.start[0] - p.end[0]) * p.picture,
    ),
    "with σ² and α² (alphas_cumprod without the root) in the picture": (
        (),
        lambda s, p: _whole(
            s, replace(p, picture=_picture(s.output, (p.start[0] ** 2, p.start[1] ** 2),
                                           np.eye(5)[0], np.eye(5)[1])),
        ),
    ),
    "with σ², not its root, as the factor of the noise direction": (
        (FIRST, NOISY),
        lambda s, p: _whole(s, p)
        + (p.end[1] ** 2 - p.end[1]) * (p.x - p.start[0] * p.picture) / p.start[1],
    ),
    "with α and σ exchanged": (
        (),
        lambda s, p: _whole(
            s, replace(p, start=_turned(p.start), end=_turned(p.end),
                       picture=_picture(s.output, _turned(p.start), np.eye(5)[0], np.eye(5)[1])),
        ),
    ),
    "replaced by the predicted picture itself": ((), lambda _, p: p.picture),
    "replaced by x: no step": ((), lambda _, p: p.x),
}  # fmt: skip
