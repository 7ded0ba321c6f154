"""The numbers of norms, which outputs hardly show: eps is far below the values of a test."""

from typing import Any

import mlx.nn as nn


def settings_of(norm: Any) -> tuple[float, int | None] | None:
    """eps and groups of a norm of ours or of torch; None of another module."""
    own = vars(norm)  # not by getattr: a model of diffusers answers with its config
    eps = own.get("eps", own.get("variance_epsilon"))
    return None if eps is None else (eps, own.get("num_groups"))


def assert_same_norms(
    ours: nn.Module, reference: Any, *, only_theirs: tuple[str, ...] = ()
) -> None:
    """Every norm of the reference is ours too, with the same eps and number of groups."""
    found = {path: settings_of(module) for path, module in ours.named_modules() if path}
    expected = {path: settings_of(module) for path, module in reference.named_modules() if path}
    wanted = {path: each for path, each in expected.items() if each and path not in only_theirs}
    assert wanted and {path: each for path, each in found.items() if each} == wanted
