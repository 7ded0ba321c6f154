"""The networks of one pipeline: all in memory, or one after the other."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from lydite.pipelines.components import Component


class Networks:
    """Loads each network once, or, with `low_memory`, for as long as it is needed."""

    def __init__(
        self, components: Mapping[str, Component], *, dtype: mx.Dtype, low_memory: bool
    ) -> None:
        self.low_memory = low_memory
        self._components = components
        self._dtype = dtype
        self._loaded: dict[str, nn.Module] = {}

    def prepare(self) -> None:
        """Load every network, or audit it, values included, where it will be loaded later.

        No run starts on weights that would only be found wrong at its end.
        """
        for name, component in self._components.items():
            if self.low_memory:
                component.check()
            else:
                self.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._components

    @property
    def in_memory(self) -> tuple[str, ...]:
        """Names of the networks that are loaded right now."""
        return tuple(self._loaded)

    def get(self, name: str) -> nn.Module:
        """The network, loaded now if it is not in memory."""
        if name not in self._loaded:
            self._loaded[name] = self._components[name].load(self.dtype_of(name))
        return self._loaded[name]

    def done(self, name: str) -> None:
        """Say that a network is not needed for now: in low-memory mode nobody may hold it still."""
        if self.low_memory and self._loaded.pop(name, None):
            mx.clear_cache()

    def dtype_of(self, name: str) -> mx.Dtype:
        """float16 overflows in the VAE's convolutions, so it decodes in float32 instead."""
        return mx.float32 if name == "vae" and self._dtype == mx.float16 else self._dtype
