"""Run ComfyUI's samplers on analytic denoisers and keep the numbers, and nothing else of it.

    python tools/record_comfyui.py PATH_OF_A_COMFYUI_CHECKOUT

writes tests/sampling/golden/comfyui.{npz,json}. ComfyUI is GPL-3 and no library: it is run here as
it lies, with stand-ins for modules that its samplers import and do not need. The checkout may be
sparse: comfy/k_diffusion, comfy/extra_samplers, comfy/model_sampling.py. Needs torch and scipy.

Its samplers run in float64, so that the numbers are those of the formulas; how far its float32 is
from them is written down as well.
"""

import argparse
import importlib
import inspect
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel

GOLDEN = Path(__file__).parents[1] / "tests" / "sampling" / "golden"
VALUES = 8  # in x
DRAWS = 64  # arrays of noise, handed out in the order in which they are asked for
STEPS = (1, 2, 3, 4, 7, 20)
LONG = 7  # of a longer run only the end is kept
CFG = 1.5
COND = {"means": [-0.8, 0.6], "spread": 0.35}
UNCOND = {"mean": -0.2, "spread": 0.6}
SIGMA_MIN, SIGMA_MAX, SHIFT = 0.03, 14.6, 3.0
PART = {"ve": (6.0, 3.1, 1.7, 0.8, 0.35), "flow": (0.9, 0.72, 0.5, 0.31, 0.12)}

UNIPC = ("uni_pc", "uni_pc_bh2")
TWINS = ("_gpu", "_RF")  # the same on another device; what flow models get under the plain name
OTHER_SHAPE = {"dpm_fast", "dpm_adaptive"}  # they choose their own sigmas
VE_ONLY = {"ddpm"}
SHIFTED = ("er_sde", "seeds_2", "seeds_3", "exp_heun_2_x0")  # again, on a model of shift 3
HALF = {"eta": 0.5, "s_noise": 0.9}
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # options away from their defaults
    ("res_multistep_ancestral", "half", HALF),
    ("res_multistep_ancestral_cfg_pp", "half", HALF),
    ("euler_ancestral_cfg_pp", "half", HALF),
    ("dpmpp_2s_ancestral_cfg_pp", "half", HALF),
    ("exp_heun_2_x0_sde", "half", HALF),
    ("exp_heun_2_x0", "phi_1", {"solver_type": "phi_1"}),
    ("seeds_2", "half", HALF | {"r": 0.7}),
    ("seeds_2", "phi_2", {"solver_type": "phi_2"}),
    ("seeds_3", "half", HALF | {"r_1": 0.25, "r_2": 0.8}),
    ("gradient_estimation", "gamma", {"ge_gamma": 1.4}),
    ("gradient_estimation_cfg_pp", "gamma", {"ge_gamma": 1.4}),
    ("er_sde", "one", {"max_stage": 1}),
    ("er_sde", "two", {"max_stage": 2, "s_noise": 0.9}),
    ("er_sde", "ode", {"noise_scaler": lambda ratio: ratio}),
    ("er_sde", "sde", {"noise_scaler": lambda ratio: ratio**2}),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    comfy = Comfy(parser.parse_args().checkout)
    normals = np.random.default_rng(5).standard_normal((DRAWS + 1, VALUES)).astype(np.float32)
    record = Record(comfy, normals)
    for noise_model in (VE, FLOW):
        for name in comfy.names():
            if noise_model == VE or name not in VE_ONLY:
                for schedule in record.sigmas[noise_model.name]:
                    record.add(name, noise_model, schedule)
        for name, label, options in VARIANTS:
            record.add(name, noise_model, "7", label, **options)
            record.add(name, noise_model, "part", f"{label} part", **options)
    for name in SHIFTED:
        record.add(name, FLOW, "7", "shift", shift=SHIFT)
    record.write()


class Comfy:
    """The samplers of a checkout."""

    def __init__(self, checkout: Path):
        self.checkout = checkout
        sys.path.insert(0, str(checkout))
        stand_in("comfy.model_patcher", set_model_options_post_cfg_function=ask_for_pair)
        stand_in("comfy.ldm.modules.diffusionmodules.util", make_beta_schedule=None)
        stand_in("torchsde")  # every sampler is handed its noise
        self.noise_models = importlib.import_module("comfy.model_sampling")
        self.samplers = importlib.import_module("comfy.k_diffusion.sampling")
        self.unipc = importlib.import_module("comfy.extra_samplers.uni_pc")

    def names(self) -> Iterator[str]:
        for function in vars(self.samplers):
            name = function.removeprefix("sample_")
            if name != function and not name.endswith(TWINS) and name not in OTHER_SHAPE:
                yield name
        yield from UNIPC

    def run(
        self,
        name: str,
        noise_model: NoiseModel,
        sigmas: Any,
        normals: Any,
        dtype: Any,
        shift: float,
        options: Any,
    ) -> tuple[np.ndarray, list[list[float]]]:
        """x after each step, or after the last alone where the sampler reports other states."""
        torch.set_default_dtype(dtype)  # its UniPC makes tensors of the default type
        sample, states = self._find(name), []
        draws = Draws(torch.from_numpy(normals[1:]).to(dtype))
        if "noise_sampler" in inspect.signature(sample).parameters:
            options = options | {"noise_sampler": draws}

        def seen(step: dict[str, Any]) -> None:
            states.append(step["x"].clone())

        x = torch.from_numpy(normals[:1]).to(dtype) * float(sigmas[0])
        levels = torch.tensor(sigmas, dtype=dtype)  # its own: UniPC there writes into them
        model = Model(noise_model, self._sampling(noise_model, shift))
        last = sample(model, x.clone(), levels, {}, callback=seen, disable=True, **options)
        whole = len(states) == len(sigmas) - 1 and torch.equal(states[0], x)
        return torch.cat([*states[1:], last] if whole else [last]).numpy(), draws.asked

    def tau_interval(self, noise_model: NoiseModel) -> list[float]:
        """The sigmas between which its SA-Solver adds noise: at 0.2 and at 0.8 of the way."""
        sampling = self._sampling(noise_model, 1.0)
        return [float(sampling.percent_to_sigma(part)) for part in (0.2, 0.8)]

    def versions(self) -> dict[str, str]:
        head = ("git", "-C", str(self.checkout), "rev-parse", "HEAD")
        commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
        return {
            "comfyui": commit,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }

    def _find(self, name: str) -> Callable[..., Any]:
        if name in UNIPC:
            return getattr(self.unipc, "sample_" + name.replace("uni_pc", "unipc"))
        return getattr(self.samplers, "sample_" + name)

    def _sampling(self, noise_model: NoiseModel, shift: float) -> Any:
        if noise_model == VE:
            kinds = (self.noise_models.ModelSamplingContinuousEDM, self.noise_models.EPS)
            sampling = type("Sampling", kinds, {})()
            sampling.set_parameters(SIGMA_MIN, SIGMA_MAX, 1.0)
        else:
            kinds = (self.noise_models.ModelSamplingDiscreteFlow, self.noise_models.CONST)
            sampling = type("Sampling", kinds, {})()
            sampling.set_parameters(shift=shift)
        return sampling


class Model:
    """What ComfyUI's samplers ask of a model: a call, and the way to its sigmas."""

    def __init__(self, noise_model: NoiseModel, sampling: Any):
        patcher = SimpleNamespace(get_model_object={"model_sampling": sampling}.__getitem__)
        inner = SimpleNamespace(model_sampling=sampling)
        self.inner_model = SimpleNamespace(inner_model=inner, model_patcher=patcher)
        self.cond = Mixture(**COND, noise_model=noise_model, xp=torch)
        self.uncond = Gaussian(**UNCOND, noise_model=noise_model)

    def __call__(self, x: Any, sigma: Any, model_options: Any = None, **_: Any) -> Any:
        level = float(sigma.flatten()[0])
        cond = self.cond(x, level)
        if not model_options:
            return cond
        uncond = self.uncond(x, level)
        guided = uncond + (cond - uncond) * CFG
        return model_options["after_cfg"]({"denoised": guided, "uncond_denoised": uncond})


@dataclass
class Draws:
    """The recorded noise in order, and between which sigmas it was asked for."""

    table: Any
    asked: list[list[float]] = field(default_factory=list)

    def __call__(self, sigma: Any, sigma_next: Any) -> Any:
        self.asked.append([round(float(level), 9) for level in (sigma, sigma_next)])
        return self.table[len(self.asked) - 1 : len(self.asked)].clone()


class Record:
    """What is kept: all runs of a name under a noise model in one array, rows by label."""

    def __init__(self, comfy: Comfy, normals: np.ndarray):
        self.comfy, self.normals = comfy, normals
        self.sigmas = {noise_model: schedules(noise_model) for noise_model in ("ve", "flow")}
        self.runs: dict[str, dict[str, np.ndarray]] = {}
        self.rounding: dict[str, float] = {}
        self.fails: dict[str, str] = {}
        self.asked: dict[str, list[list[float]]] = {}

    def add(
        self,
        name: str,
        noise_model: NoiseModel,
        schedule: str,
        label: str = "",
        shift: float = 1.0,
        **options: Any,
    ) -> None:
        both, label = f"{name}/{noise_model.name}", label or schedule
        args = name, noise_model, self.sigmas[noise_model.name][schedule], self.normals
        try:
            states, asked = self.comfy.run(*args, torch.float64, shift, options)
            rounded, _ = self.comfy.run(*args, torch.float32, shift, options)
        except (IndexError, RuntimeError, UnboundLocalError, ValueError) as error:
            self.fails[f"{both}/{label}"] = f"{type(error).__name__}: {error}"
            return
        if not np.isfinite(states).all():
            self.fails[f"{both}/{label}"] = "not finite"
            return
        self.runs.setdefault(both, {})[label] = states if len(states) <= LONG else states[-1:]
        error = float(np.abs(rounded[-1] - states[-1]).max())
        self.rounding[name] = max(self.rounding.get(name, 0.0), error)
        if label == "4" and asked:
            self.asked[both] = asked

    def write(self) -> None:
        arrays: dict[str, Any] = {"start": self.normals[0], "noise": self.normals[1:]}
        for noise_model, made in self.sigmas.items():
            arrays |= {f"sigmas/{noise_model}/{label}": sigmas for label, sigmas in made.items()}
        rows: dict[str, dict[str, list[int]]] = {}
        for both, runs in self.runs.items():
            arrays[both] = np.concatenate(list(runs.values()))
            ends = np.cumsum([len(states) for states in runs.values()]).tolist()
            starts = [0, *ends[:-1]]
            rows[both] = {label: [*at] for label, *at in zip(runs, starts, ends, strict=True)}
        facts = {
            "versions": self.comfy.versions(),
            "denoiser": {"cond": COND, "uncond": UNCOND, "cfg": CFG},
            "tau_interval": {
                noise_model.name: self.comfy.tau_interval(noise_model) for noise_model in (VE, FLOW)
            },
            "float32_rounding": self.rounding,
            "fails": self.fails,
            "noise_asked_for_in_4_steps": self.asked,
            "rows": rows,
        }
        GOLDEN.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(GOLDEN / "comfyui.npz", **arrays)
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
        (GOLDEN / "comfyui.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def schedules(noise_model: str) -> dict[str, np.ndarray]:
    """Sigmas down to 0 in each number of steps, and a stretch without either end."""
    made = {}
    for steps in STEPS:
        ramp = np.linspace(0, 1, steps)
        if noise_model == "ve":  # Karras
            first, last = SIGMA_MAX ** (1 / 7), SIGMA_MIN ** (1 / 7)
            sigmas = (first + ramp * (last - first)) ** 7
        else:
            even = 1 - np.arange(steps) / steps
            sigmas = SHIFT * even / (1 + (SHIFT - 1) * even)
        made[str(steps)] = np.append(sigmas, 0).astype(np.float32)
    return made | {"part": np.array(PART[noise_model], np.float32)}


def ask_for_pair(options: dict[str, Any], after: Callable[..., Any], **_: Any) -> dict[str, Any]:
    return options | {"after_cfg": after}


def stand_in(name: str, **contents: Any) -> None:
    """A module of that name, in packages that need not be there."""
    parents, _, last = name.rpartition(".")
    if parents == "comfy":
        importlib.import_module("comfy")
    elif parents and parents not in sys.modules:
        stand_in(parents)
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    if parents:
        setattr(sys.modules[parents], last, module)


if __name__ == "__main__":
    main()
