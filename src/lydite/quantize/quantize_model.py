"""One quantization of a model, from its sources to a model folder with its record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lydite.calibrate.model_session import model_hash
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.files import write_atomic
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.export import export
from lydite.quantize.provenance import NAME, Provenance, UnitError
from lydite.quantize.quantize_blocks import BlockResult, Settings
from lydite.quantize.quantize_network import (
    StepCount,
    count_steps,
    provenance,
    quantize_network,
    tune_network,
)
from lydite.quantize.work import MODEL, Work


@dataclass(eq=False)
class Quantization:
    """The network of a loaded model, quantized in a folder of work.

    `round`, `tune` and `export` in this order. What the folder has of an interrupted run is not
    done again; one that was begun for another model, set or setting is refused.
    """

    model: str  # its name, for the record
    pipeline: Pipeline
    opened: CalibrationSet | None  # None for a method without data
    samples: Sequence[Row]
    settings: Settings
    work: Work
    call_bytes: int
    results: list[BlockResult] = field(init=False, default_factory=list[BlockResult])

    def __post_init__(self) -> None:
        self._sources = {
            "source_model": Path(self.model).name,
            "source_hash": model_hash(self.pipeline),
            "set_hash": self.opened.content_hash if self.opened else None,
        }
        job: dict[str, Any] = {"settings": self.settings, "samples": len(self.samples)}
        self.work.describe({**self._sources, **job})

    def steps_left(self) -> StepCount:
        """Of `round`."""
        return count_steps(self.pipeline, self.settings, self.work.results())

    def round(
        self,
        on_step: Callable[[str, int, float], None],
        on_block: Callable[[BlockResult], None],
    ) -> None:
        """Every planned layer, block by block."""
        self.results = quantize_network(
            self.pipeline,
            self.opened,
            self.samples,
            self.settings,
            self.work,
            call_bytes=self.call_bytes,
            on_step=on_step,
            on_block=on_block,
        )

    def tune(self, on_step: Callable[[int, float], None]) -> tuple[UnitError, bool]:
        """Scales, offsets and biases by DWQ: the error of the network, and whether it gained."""
        assert self.opened is not None, "`needs_set` asks for one"
        result = tune_network(
            self.pipeline, self.opened, self.results, self.settings, self.work, on_step
        )
        self.results.append(result)
        (error,) = result.errors
        return error, bool(result.weights)

    def export(self) -> Provenance:
        """Write the model folder with quantization.json; the network in memory is not needed
        afterwards."""
        folder = self.work.folder / MODEL
        weights = {path: each for result in self.results for path, each in result.weights.items()}
        export(self.pipeline, weights, folder)
        record = provenance(self.pipeline, self.results, self.settings, self._sources)
        write_atomic(folder / NAME, record.to_json())
        self.pipeline.model.unload()
        return record
