"""Batch norms: the statistics of training, of the batch itself, or none that were loaded."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    inputs_of,
    is_replayable,
    told_apart,
)
from lydite.diff.result import Finding

EPS = (1e-5, 1e-3, 1e-6, 1e-4, 1e-2)
RUNNING = "with the running mean and variance"


def other_batch_norm(e: Evidence) -> Finding | None:
    """A batch norm with other statistics, or divided by something else than the deviation."""
    parameters = e.parameters()
    if not is_replayable(e) or not {"running_mean", "running_var"} <= parameters.keys():
        return None
    for source in inputs_of(e):
        for axis in (1, -1) if source.x.shape == e.port.shape else ():
            if parameters["running_var"].shape != (e.port.shape[axis],):
                continue
            if (told := _told(e, source, axis)) is not None:
                return told
    return None


def _told(e: Evidence, source: Source, axis: int) -> Finding | None:
    for eps in EPS:
        variants = partial(_variants, e, axis=axis, eps=eps)
        right = next(variants(source.x))
        if apart_of(e.values[0], right.value) > allowed(e):
            continue
        told = told_apart(
            e,
            variants(source.x),
            lambda variants=variants: variants(source.own),
            reference_is=RUNNING,
            what="batch norms of its input",
        )
        if told is None:
            return None
        return Finding(
            "other-batch-norm",
            f"The port is this batch norm {told.wrong}, the reference {RUNNING}; {told.leaves}.",
            "Load running_mean and running_var, use them (evaluation, not training), and divide by "
            "the root of the variance.",
        )
    return None


def _variants(e: Evidence, x: Array, axis: int, eps: float) -> Iterator[Candidate]:
    shape = [1] * x.ndim
    shape[axis] = -1
    known = {name: value.reshape(shape) for name, value in e.parameters().items() if value.ndim}
    mean, variance = known["running_mean"], known["running_var"]
    scale, shift = known.get("weight", np.ones(1)), known.get("bias", np.zeros(1))
    others = tuple(n for n in range(x.ndim) if n != axis % x.ndim)
    own, spread = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    count = x.size / x.shape[axis]
    zero, one = np.zeros_like(mean), np.ones_like(mean)

    def normed(mean: Array, divisor: Array) -> Array:
        return (x - mean) / divisor * scale + shift

    root = np.sqrt(variance + eps)
    yield Candidate(RUNNING, normed(mean, root))
    batch = "with the mean and variance of the batch itself, as in training"
    yield Candidate(batch, normed(own, np.sqrt(spread + eps)))
    unbiased = spread * count / max(count - 1, 1)
    yield Candidate(f"{batch}, unbiased (n − 1)", normed(own, np.sqrt(unbiased + eps)))
    lost = "of which the running statistics were not loaded"
    yield Candidate(f"{lost}: mean 0, variance 1", normed(zero, np.sqrt(one + eps)))
    yield Candidate(f"{lost}: mean 0", normed(zero, root))
    yield Candidate(f"{lost}: variance 1", normed(mean, np.sqrt(one + eps)))
    yield Candidate("divided by the variance, not by its root", normed(mean, variance))
    yield Candidate("divided by the variance and eps, not the root", normed(mean, variance + eps))
    yield Candidate("multiplied by the root of the variance", normed(mean, 1 / root))
    yield Candidate("without its weight", (x - mean) / root + shift)
    yield Candidate("without its bias", (x - mean) / root * scale)
    for other in EPS:
        if other != eps:
            yield Candidate(
                f"with eps {other:g}, not {eps:g}", normed(mean, np.sqrt(variance + other))
            )
