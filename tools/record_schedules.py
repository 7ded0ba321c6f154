"""Record what k-diffusion, ComfyUI and A1111 compute, as numbers for the tests to be held to.

Each program runs in a process of its own from a folder outside this repository; none of its code
comes near ours. Only numbers are kept, with the versions they are from:

    python tools/record_schedules.py --k-diffusion SITE --comfyui COMFYUI \
        --a1111 A1111

`--k-diffusion` holds the unpacked wheels of k-diffusion 0.1.1.post1, torchsde, torchdiffeq and
trampoline; the others are source trees of ComfyUI and of AUTOMATIC1111/stable-diffusion-webui at
the commits of VERSIONS.
"""

import argparse
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "tests/sampling/golden/schedules.npz"
VERSIONS = {
    "k-diffusion": "0.1.1.post1",
    "comfyui": "acbf08cd60fade74b2e9e5009fa0dcad9538356b",
    "a1111": "82a973c04367123ae98bd9abdf80d9eda9b910e2",
}
STEPS = (1, 2, 3, 4, 7, 20, 50, 1000)
PROBES = (1e-4, 0.03, 0.05, 0.3, 1.0, 2.5, 9.9, 14.5, 200.0)
SHIFT = 3.0
IMAGE, NOISE, OUTPUT = np.random.default_rng(5).standard_normal((3, 2, 6)).astype(np.float32)
Numbers = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the numbers of other programs.")
    for name in ORACLES:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", choices=ORACLES, help="in this process, into --into")
    parser.add_argument("--into", type=Path, default=GOLDEN)
    args = parser.parse_args()
    folders = {name: getattr(args, name.replace("-", "_")) for name in ORACLES}
    sys.path.insert(0, str(folders["k-diffusion"]))  # torchsde, for all three
    if args.only:
        torch.set_default_dtype(torch.float64)  # where a program leaves it to the default
        np.savez(args.into, **ORACLES[args.only](folders[args.only]))
        return
    recorded: Numbers = {f"{name}/version": version for name, version in VERSIONS.items()}
    recorded["torch/version"] = importlib.metadata.version("torch")
    recorded["inputs"] = np.stack([IMAGE, NOISE, OUTPUT])
    with tempfile.TemporaryDirectory() as folder:
        for name in ORACLES:
            into = Path(folder, f"{name}.npz")
            again = [sys.executable, *sys.argv, "--only", name, "--into", str(into)]
            subprocess.run(again, check=True)
            with np.load(into) as found:
                recorded |= {f"{name}/{key}": found[key] for key in found}
    args.into.parent.mkdir(exist_ok=True)
    np.savez_compressed(args.into, **recorded)


def series(name: str, make: Callable[[int], Any], steps: tuple[int, ...] = STEPS) -> Numbers:
    """For each number of steps: it, the length of the schedule, and the sigmas kept of it."""
    found: list[float] = []
    for count in steps:
        sigmas = np.asarray(make(count), np.float64)
        found += [count, len(sigmas), *thinned(sigmas)]
    return {name: np.array(found)}


def thinned(sigmas: np.ndarray) -> np.ndarray:
    """Of a long schedule 24 sigmas, both ends among them, so that the file stays small."""
    if len(sigmas) < 30:
        return sigmas
    return sigmas[np.linspace(0, len(sigmas) - 1, 24).round().astype(int)]


def stable_diffusion_alphas() -> torch.Tensor:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0)


def load_k_diffusion(folder: Path, name: str) -> Any:
    """One file of k-diffusion without its package, whose imports pull in 17 others."""
    if "k_diffusion" not in sys.modules:
        package, utils = types.ModuleType("k_diffusion"), types.ModuleType("k_diffusion.utils")
        package.__path__ = [str(folder / "k_diffusion")]
        vars(utils)["append_dims"] = lambda x, count: x[(...,) + (None,) * (count - x.ndim)]
        sys.modules |= {"k_diffusion": package, "k_diffusion.utils": utils}
    return importlib.import_module(f"k_diffusion.{name}")


def k_diffusion(folder: Path) -> Numbers:
    sampling, external = (load_k_diffusion(folder, name) for name in ("sampling", "external"))
    model = external.DiscreteEpsDDPMDenoiser(None, stable_diffusion_alphas(), quantize=False)
    found = series("normal/eps", model.get_sigmas) | series("vp/eps", sampling.get_sigmas_vp)
    ends = {"eps": (float(model.sigma_min), float(model.sigma_max)), "flow": (0.003, 1.0)}
    curves = {
        "karras": sampling.get_sigmas_karras,
        "karras_rho3": lambda n, *ends: sampling.get_sigmas_karras(n, *ends, 3.0),
        "exponential": sampling.get_sigmas_exponential,
        "polyexponential": lambda n, *ends: sampling.get_sigmas_polyexponential(n, *ends, 1.7),
    }
    for noise_model, between in ends.items():
        for name, curve in curves.items():
            found |= series(f"{name}/{noise_model}", lambda n, c=curve, b=between: c(n, *b))
    probes = torch.tensor(PROBES, dtype=torch.float64)
    for name, quantize in (("interpolate", False), ("nearest", True)):
        found[f"timesteps/{name}"] = model.sigma_to_t(probes, quantize=quantize)
    wrappers = {"eps": external.DiscreteEpsDDPMDenoiser, "v": external.DiscreteVDDPMDenoiser}
    for name, wrapper in wrappers.items():
        for sigma in (0.05, 1.0, 9.0):
            found |= seen_by(wrapper, name, sigma)
    return found


def seen_by(wrapper: Any, name: str, sigma: float) -> Numbers:
    """What a wrapper tells its network, and what it makes of the answer."""
    told: list[Any] = []

    def network(*arguments: Any) -> Any:
        told.extend(arguments)
        return torch.tensor(OUTPUT)

    wrapped = wrapper(network, stable_diffusion_alphas(), quantize=False)
    noised = torch.tensor(IMAGE + NOISE * np.float32(sigma))
    denoised = wrapped(noised, torch.full((2,), sigma))
    return {
        f"prediction/{name}/{sigma}/{what}": value
        for what, value in zip(("input", "timestep", "denoised"), (*told, denoised), strict=True)
    }


def comfyui(folder: Path) -> Numbers:
    sys.path.insert(0, str(folder))
    stubs = ("model_management", "sampler_helpers", "model_patcher", "patcher_extension", "hooks")
    maker = "ldm.modules.diffusionmodules.util"
    for name in (*stubs, "context_windows", "utils", "ldm", "ldm.modules", maker[:-5], maker):
        sys.modules[f"comfy.{name}"] = MagicMock()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    vars(sys.modules[f"comfy.{maker}"])["make_beta_schedule"] = lambda *_, **__: betas
    sampling, samplers = (
        importlib.import_module(f"comfy.{name}") for name in ("model_sampling", "samplers")
    )
    models = {
        "eps": sampling.ModelSamplingDiscrete(),
        "sd3": sampling.ModelSamplingDiscreteFlow(),
        "flux": sampling.ModelSamplingFlux(),
    }
    models["sd3"].set_parameters(shift=SHIFT)
    found: Numbers = {f"levels/{name}": model.sigmas[49::50] for name, model in models.items()}
    found["levels/ztsnr"] = sampling.ModelSamplingDiscrete(zsnr=True).sigmas[49::50]
    make = samplers.calculate_sigmas
    for noise_model, model in models.items():
        for name in samplers.SCHEDULER_NAMES:
            steps = STEPS[1:] if name == "kl_optimal" else STEPS  # NaN there at one step
            found |= series(
                f"{name}/{noise_model}", lambda n, m=model, c=name: make(m, c, n), steps
            )
    ends = [float(end) for end in (models["eps"].sigma_min, models["eps"].sigma_max)]
    laplace = samplers.k_diffusion_sampling.get_sigmas_laplace
    found |= series("laplace/eps", lambda n: laplace(n, *ends))
    found["timesteps/nearest"] = models["eps"].timestep(torch.tensor(PROBES))
    found |= align_your_steps(folder)
    kinds = {"eps": "EPS", "v": "V_PREDICTION", "edm": "EDM", "x0": "X0"}
    for name, kind in (kinds | {"flow": "CONST", "cosmos": "COSMOS_RFLOW"}).items():
        found |= predicted(getattr(sampling, kind)(), name)
    return found


def align_your_steps(folder: Path) -> Numbers:
    for name in ("comfy_api", "comfy_api.latest"):
        sys.modules[name] = MagicMock(ComfyExtension=object)
    api = sys.modules["comfy_api.latest"].io
    api.ComfyNode, api.NodeOutput = object, lambda sigmas: sigmas
    sys.path.insert(0, str(folder))
    node = importlib.import_module("comfy_extras.nodes_align_your_steps").AlignYourStepsScheduler
    found: Numbers = {}
    for family, name in (("sd15", "SD1"), ("sdxl", "SDXL"), ("svd", "SVD")):
        found |= series(f"ays/{family}", lambda n, name=name: node.execute(name, n, 1.0))
    return found


def predicted(kind: Any, name: str) -> Numbers:
    """A prediction type of ComfyUI at a few sigmas; EDM with sigma_data 0.5."""
    kind.sigma_data = 0.5 if name == "edm" else 1.0
    image, noise, output = (torch.tensor(each) for each in (IMAGE, NOISE, OUTPUT))
    found: Numbers = {}
    for value in (0.05, 0.4, 0.9) if name == "flow" else (0.05, 1.0, 9.0):
        sigma, where = torch.tensor(value), f"prediction/{name}/{value}"
        noised = kind.noise_scaling(sigma, noise, image)
        found |= {
            f"{where}/noised": noised,
            f"{where}/full": kind.noise_scaling(sigma, noise, image * 0, max_denoise=True),
            f"{where}/input": kind.calculate_input(sigma, noised),
            f"{where}/denoised": kind.calculate_denoised(sigma, output, noised),
        }
    return found


def a1111(folder: Path) -> Numbers:
    modules = types.ModuleType("modules")
    modules.__path__ = [str(folder / "modules")]
    shared = MagicMock()
    shared.opts.beta_dist_alpha = shared.opts.beta_dist_beta = 0.6
    vars(modules)["shared"] = shared
    sys.modules |= {"modules": modules, "modules.shared": shared}
    site = Path(importlib.import_module("torchsde").__file__ or "").parents[1]
    sampling, external = (load_k_diffusion(site, name) for name in ("sampling", "external"))
    vars(sys.modules["k_diffusion"])["sampling"] = sampling
    schedulers = importlib.import_module("modules.sd_schedulers")
    model = external.DiscreteEpsDDPMDenoiser(None, stable_diffusion_alphas(), False)
    low, high = model.sigma_min.item(), model.sigma_max.item()
    found: Numbers = {}
    for scheduler in schedulers.schedulers:
        name, more = scheduler.name, {"inner_model": model} if scheduler.need_inner_model else {}
        for family, sdxl in (("eps", False), ("sdxl", True)):
            if not scheduler.function or (sdxl and name != "align_your_steps"):
                continue
            shared.sd_model.is_sdxl = sdxl

            def make(n: int, f: Any = scheduler.function, more: Any = more) -> Any:
                return f(n=n, sigma_min=low, sigma_max=high, device="cpu", **more)

            found |= series(f"{name}/{family}", make)
    return found


ORACLES = {"k-diffusion": k_diffusion, "comfyui": comfyui, "a1111": a1111}

if __name__ == "__main__":
    main()
