"""The errors of a quantized model, per layer and step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lydite.diff.result import Row


@dataclass(frozen=True)
class LayerError:
    """The error of one module's output after quantization."""

    site: str
    local: float | None  # from exact inputs, the largest over the steps; None without injection
    accumulated: float  # with all modules before it quantized too, the largest over the steps
    by_step: tuple[float, ...]  # accumulated


def layer_errors(free: Sequence[Row], isolated: Sequence[Row] = ()) -> tuple[LayerError, ...]:
    """Errors per module, the largest local error first; `isolated` are rows of an injected run."""
    by_site = _outputs(free)
    local = {site: max(errors.values()) for site, errors in _outputs(isolated).items()}
    layers = [
        LayerError(
            site,
            local.get(site),
            max(errors.values()),
            tuple(errors[step] for step in sorted(errors)),
        )
        for site, errors in by_site.items()
    ]
    return tuple(sorted(layers, key=lambda x: -(x.local if x.local is not None else x.accumulated)))


def _outputs(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """site -> step -> largest error among its outputs."""
    result: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.slot.startswith("out") and row.error is not None:
            result[row.site][row.step] = max(row.error, result[row.site].get(row.step, 0.0))
    return result
