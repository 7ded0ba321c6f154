"""Run k-diffusion's samplers on analytic denoisers and keep the numbers.

    PYTHONPATH=src python tools/record_k_diffusion.py FOLDER_WITH_K_DIFFUSION

writes tests/sampling/golden/k_diffusion.{npz,json}. FOLDER holds the unpacked wheels of
k-diffusion, torchsde, torchdiffeq and trampoline; torch, scipy and tqdm are installed. Of
k-diffusion only `sampling.py` is loaded: its package asks for 17 more. Every run is handed the
same noise, call by call. Runs are in float32, as k-diffusion is used, and in float64, which shows
its own rounding.
"""

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lydite.sampling.analytic import Gaussian, Mixture

GOLDEN = Path(__file__).parents[1] / "tests" / "sampling" / "golden"
SHAPE = (2, 2, 3)
DRAWS = 100
STEPS = (1, 2, 3, 4, 7, 20, 50)
PATH_STEPS = 7
SIGMA_MIN, SIGMA_MAX = 0.0291672, 14.6146  # of Stable Diffusion
SCHEDULES = ("karras", "exponential")
DENOISERS = {"gaussian": Gaussian(), "mixture": Mixture(xp=torch)}
FREE = "euler heun dpm_2 lms dpmpp_2m"
NOISY = (
    "euler_ancestral dpm_2_ancestral dpmpp_2s_ancestral dpmpp_sde "
    "dpmpp_2m_sde dpmpp_2m_sde_heun dpmpp_3m_sde"
)
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # by name and label, over PATH_STEPS steps
    **{name: {"half": {"eta": 0.5, "s_noise": 0.9}} for name in NOISY.split()},
    **{
        name: {"churn": {"s_churn": 2.0, "s_tmin": 0.1, "s_tmax": 10.0, "s_noise": 1.01}}
        for name in ("euler", "heun", "dpm_2")
    },
    "lms": {"two": {"order": 2}},
    "dpm_fast": {"half": {"eta": 0.5, "s_noise": 0.9}},
    "dpm_adaptive": {
        "plain": {},
        "tight": {"rtol": 0.005, "atol": 0.0008},
        "second": {"order": 2},
        "pid": {"pcoeff": 0.2, "icoeff": 0.8, "dcoeff": 0.1, "h_init": 0.5},
        "half": {"eta": 0.5, "s_noise": 0.9},
    },
}
OPTIONS["dpmpp_sde"]["third"] = {"r": 1 / 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    theirs = load(folder)
    drawn = np.random.default_rng(3).standard_normal((DRAWS + 1, *SHAPE)).astype(np.float32)
    arrays: dict[str, Any] = {"start": drawn[0] * np.float32(SIGMA_MAX), "noise": drawn[1:]}
    fails: dict[str, str] = {}
    adaptive: dict[str, Any] = {}
    sigmas = {name: {n: schedule(theirs, name, n) for n in STEPS} for name in SCHEDULES}
    for name in SCHEDULES:
        arrays[f"sigmas/{name}"] = torch.cat([sigmas[name][n] for n in STEPS]).numpy()

    for name in f"{FREE} {NOISY} dpm_fast".split():
        single = np.full((len(DENOISERS), len(SCHEDULES), len(STEPS), *SHAPE), np.nan, np.float32)
        double = single.astype(np.float64)
        for index in np.ndindex(single.shape[:3]):
            kind, spacing, n = (list(DENOISERS)[index[0]], SCHEDULES[index[1]], STEPS[index[2]])
            try:
                levels = sigmas[spacing][n]
                single[index] = Run(theirs, name, kind, levels, arrays, torch.float32).x
                double[index] = Run(theirs, name, kind, levels, arrays, torch.float64).x
            except (UnboundLocalError, IndexError) as error:
                fails[f"{name}/{n}"] = f"{type(error).__name__}: {error}"
        arrays[f"single/{name}"], arrays[f"double/{name}"] = single, double
        arrays[f"path/{name}"] = np.stack(
            [
                Run(theirs, name, kind, sigmas["karras"][PATH_STEPS], arrays, torch.float64).path
                for kind in DENOISERS
            ]
        )
    for name, variants in OPTIONS.items():
        for label, options in variants.items():
            levels = sigmas["karras"][PATH_STEPS]
            run = Run(theirs, name, "mixture", levels, arrays, torch.float64, options)
            arrays[f"options/{name}/{label}"] = run.x
            if run.info:
                adaptive[label] = run.info

    GOLDEN.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(GOLDEN / "k_diffusion.npz", **arrays)
    facts = {
        "versions": {
            "k_diffusion": next(
                each.version
                for each in distributions(path=[str(folder)])
                if each.metadata["Name"].replace("-", "_") == "k_diffusion"
            ),
            **{name: version(name) for name in ("torch", "scipy", "numpy")},
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "steps": STEPS,
        "path_steps": PATH_STEPS,
        "schedules": SCHEDULES,
        "denoisers": list(DENOISERS),
        "options": OPTIONS,
        "dpm_adaptive": adaptive,
        "fails": fails,
    }
    (GOLDEN / "k_diffusion.json").write_text(json.dumps(facts, indent=1) + "\n")


class Run:
    """One run: `x` at the end, `path` before each step and at the end, `info` of dpm_adaptive."""

    def __init__(
        self,
        theirs: ModuleType,
        name: str,
        kind: str,
        sigmas: torch.Tensor,
        arrays: dict[str, np.ndarray],
        dtype: torch.dtype,
        options: dict[str, Any] | None = None,
    ):
        torch.set_default_dtype(dtype)  # dpm_fast makes tensors of its own
        options, states = dict(options or {}), []
        denoise, levels = DENOISERS[kind], sigmas.to(dtype)
        noise = torch.from_numpy(arrays["noise"]).to(dtype)
        handed = iter(noise)

        def model(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return denoise(x, float(sigma[0]))

        def seen(step: dict[str, Any]) -> None:
            states.append(step["x"].numpy().copy())

        x = torch.from_numpy(arrays["start"]).to(dtype)
        rest: dict[str, Any] = {"callback": seen, "disable": True}
        function = getattr(theirs, f"sample_{name.removesuffix('_heun')}")
        if name in NOISY.split() or name.startswith("dpm_fast") or name == "dpm_adaptive":
            rest["noise_sampler"] = lambda *_: next(handed)
        if name == "dpmpp_2m_sde_heun":
            rest["solver_type"] = "heun"
        self.info: dict[str, int] = {}
        with drawing(noise):
            if name == "dpm_fast":
                ends = float(levels[-2]), float(levels[0])
                end = function(model, x, *ends, len(levels) - 1, **rest, **options)
            elif name == "dpm_adaptive":
                ends = float(levels[-2]), float(levels[0])
                end, self.info = function(model, x, *ends, return_info=True, **rest, **options)
            else:
                end = function(model, x, levels, **rest, **options)
        self.x = end.numpy()
        self.path = np.stack([*states, self.x])


@contextmanager
def drawing(noise: torch.Tensor) -> Iterator[None]:
    """The noise of churn, which k-diffusion draws itself, once a step."""
    handed, original = iter(noise), torch.randn_like
    torch.randn_like = lambda x: next(handed)
    try:
        yield
    finally:
        torch.randn_like = original


def schedule(theirs: ModuleType, name: str, n: int) -> torch.Tensor:
    return getattr(theirs, f"get_sigmas_{name}")(n, SIGMA_MIN, SIGMA_MAX)


def load(folder: Path) -> ModuleType:
    """k_diffusion.sampling without the rest of its package."""
    sys.path.append(str(folder))
    package, helpers = ModuleType("k_diffusion"), ModuleType("k_diffusion.utils")
    package.__path__ = [str(folder / "k_diffusion")]
    vars(package)["utils"] = helpers
    vars(helpers)["append_dims"] = lambda x, count: x.reshape(x.shape + (1,) * (count - x.ndim))
    sys.modules |= {"k_diffusion": package, "k_diffusion.utils": helpers}
    return importlib.import_module("k_diffusion.sampling")


if __name__ == "__main__":
    main()
