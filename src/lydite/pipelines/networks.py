"""The networks of one pipeline: all in memory, or one after the other."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from lydite.pipelines.components import Component


class Networks:
    """Loads each network once, or, with `low_memory`, for as long as it is needed.

    Every checkpoint is audited, values included, before this returns: no run starts on weights that
    would only be found wrong at its end.
    """

    def __init__(
        self, components: Mapping[str, Component], *, dtype: mx.Dtype, low_memory: bool
    ) -> None:
        self.low_memory = low_memory
        self._components = components
        self._dtype = dtype
        self._loaded: dict[str, nn.Module] = {}
        for name, component in components.items():
            if low_memory:
                component.check()
            else:
                self._loaded[name] = component.load(self.dtype_of(name))

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
        """Say that a network is not needed for now; frees it in low-memory mode."""
        if self.low_memory and self._loaded.pop(name, None):
            mx.clear_cache()

    def dtype_of(self, name: str) -> mx.Dtype:
        """float16 overflows in the VAE's convolutions, so it decodes in float32 instead."""
        return mx.float32 if name == "vae" and self._dtype == mx.float16 else self._dtype
