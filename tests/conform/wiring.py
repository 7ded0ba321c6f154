"""What a port has around its samplers, written by hand in float32 with a switch for every mistake.

Nothing here comes from lydite: the problem is read as plain JSON, and the schedule and the network
are written anew, as a stranger would.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

F = np.float32


@dataclass
class Wiring:
    """Sigmas, timesteps, network and denoised of one run; `bug` names what is wrong with it."""

    p: dict[str, Any]
    bug: str = ""
    xs: list[np.ndarray] = field(default_factory=list[Any])
    timesteps: list[float] = field(default_factory=list[float])
    drawn: int = 0

    def sigmas(self) -> list[float]:
        right, bug = np.array(self.p["sigmas"]), self.bug
        shift = self.p["settings"].get("shift")
        inner, n = right[:-1], len(right) - 1
        if bug == "shifted-twice":
            right = shift * right / (1 + (shift - 1) * right)
        elif bug == "not-shifted":
            right = np.append(np.linspace(1, 1 / 1000, n), 0)
        elif bug == "last-step-dropped":
            right = inner
        elif bug == "last-step-idle":
            right = np.append(inner, inner[-1])
        elif bug in ("shift-as-mu", "mu-as-shift"):
            s = np.exp(shift) if bug == "shift-as-mu" else np.log(shift)
            even = np.linspace(1, 1 / 1000, n)
            right = np.append(s * even / (1 + (s - 1) * even), 0)
        elif bug == "penultimate-dropped":
            right = np.append(inner[:-1], 0)
        elif bug == "first-step-dropped":
            right = right[1:]
        elif bug == "karras-to-zero":
            right = np.linspace(inner[0] ** (1 / 7), 0, n + 1) ** 7
        elif bug == "karras-without-rho":
            right = np.append(np.linspace(inner[0], inner[-1], n), 0)
        elif bug == "karras-one-more":
            a, b = inner[0] ** (1 / 7), inner[-1] ** (1 / 7)
            right = (a + np.arange(n + 1) / n * (b - a)) ** 7
            right[-1] = 0
        elif bug == "is-schedule-exponential":
            right = np.append(np.exp(np.linspace(np.log(inner[0]), np.log(inner[-1]), n)), 0)
        return right.tolist()

    def timestep(self, sigma: float, step: int) -> float:
        p, bug = self.p, self.bug
        if bug == "timestep-of-next-step":
            return ([*p["timesteps"], 0.0])[step + 1]
        if bug == "timestep-of-first-call":
            return p["timesteps"][step]
        table, n = p["table"], len(p["sigmas"]) - 1
        if bug == "sigma-for-timestep":
            return sigma
        if bug == "first-timestep-kept":
            return p["timesteps"][0]
        if bug == "stale-timesteps":  # of the trained spacing, under Karras' sigmas
            even = np.linspace(999, 0, n) if table else np.linspace(1000, 1, n)
            return float(np.interp(-sigma, -np.array(p["sigmas"][:-1]), even))
        if table:
            right = float(np.interp(np.log(sigma), np.log(table), np.arange(len(table))))
        elif p["prediction"] == "edm":
            right = math.log(sigma) / 4
        else:
            right = sigma / (sigma + 1) if p["prediction"] == "cosmos" else 1000 * sigma
        if bug == "timestep-truncated":
            return float(int(right))
        if bug == "timestep-nearest":
            return float(np.abs(np.log(table) - np.log(sigma)).argmin())
        if bug in ("timestep-one-more", "timestep-one-less"):
            return right + (1 if bug == "timestep-one-more" else -1)
        if bug == "timestep-not-scaled":
            return right / 1000
        if bug == "timestep-reversed":
            return 1000 - right
        if bug == "timestep-in-f16":
            return float(np.float16(right))
        if p["rule"] == "round" and bug != "timestep-interpolated":
            return float(round(right))
        if bug == "timestep-in-bf16":
            bits = np.array([right], F).view(np.uint32) + np.uint32(0x7FFF)
            return float((bits & np.uint32(0xFFFF0000)).view(F)[0])
        return right

    def scalings(self, sigma: float) -> tuple[float, float, float]:
        """c_in, c_skip and c_out: the denoised is c_skip·x + c_out·F(c_in·x)."""
        root, s = math.sqrt(sigma**2 + 1), self.p["sigma_data"]
        width = math.sqrt(sigma**2 + s**2)
        return {
            "eps": (1 / root, 1.0, -sigma),
            "v": (1 / root, 1 / root**2, -sigma / root),
            "x0": (1 / root, 0.0, 1.0),
            "edm": (1 / width, (s / width) ** 2, sigma * s / width),
            "cosmos": (1 / (sigma + 1), 1 / (sigma + 1), -sigma / (sigma + 1)),
            "flow": (1.0, 1.0, -sigma),
        }[self.p["prediction"]]

    def network(self, kind: dict[str, Any], u: np.ndarray, t: float) -> np.ndarray:
        p = self.p
        if p["table"]:
            sigma = float(np.exp(np.interp(t, np.arange(len(p["table"])), np.log(p["table"]))))
        elif p["prediction"] == "edm":
            sigma = math.exp(4 * min(max(t, -3.0), 3.0))
        elif p["prediction"] == "cosmos":
            t = min(max(t, 1e-4), 1 - 1e-4)
            sigma = t / (1 - t)
        else:
            sigma = max(t / 1000, 1e-4)
        c_in, c_skip, c_out = self.scalings(sigma)
        x = u / F(c_in)
        a = 1 - sigma if p["law"] == "flow" else 1.0
        return (self.image(kind, x, sigma, a) - x * F(c_skip)) / F(c_out)

    def image(self, kind: dict[str, Any], x: np.ndarray, sigma: float, a: float) -> np.ndarray:
        if kind["name"] in ("zero", "identity"):
            return x * F(kind["name"] == "identity")
        s2 = kind["spread"] ** 2
        width = s2 * a * a + sigma**2
        near = np.stack([-((x - F(a * m)) ** 2) / F(2 * width) for m in kind["means"]])
        odds = np.exp(near - near.max(0))
        parts = np.stack([(F(s2 * a) * x + F(sigma**2 * m)) / F(width) for m in kind["means"]])
        return (odds * parts).sum(0) / odds.sum(0)

    def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
        p, bug = self.p, self.bug
        c_in, c_skip, c_out = self.scalings(sigma)
        u = x if bug in ("no-c-in", "c-in-in-place") else x * F(c_in)
        if bug == "c-in-inverted":
            u = x / F(c_in)
        if bug == "c-in-on-flow":
            u = x / F(np.sqrt(sigma**2 + 1))
        t = self.timestep(sigma, step)
        self.timesteps.append(t)
        cond = self.network(p["denoiser"], u, t)
        if p["guidance"]:
            scale, uncond = p["guidance"]["scale"], self.network(p["guidance"]["uncond"], u, t)
            if bug == "cond-uncond-swapped":
                cond, uncond = uncond, cond
            scale += {"guidance-one-more": 1, "guidance-one-less": -1}.get(bug, 0)
            scale = {"guidance-ignored": 1.0, "uncond-alone": 0.0}.get(bug, scale)
            cond = uncond + F(scale) * (cond - uncond)
        if bug == "sign-flipped":
            cond = -cond
        if bug == "prediction-as-denoised":
            return cond
        if bug == "denoised-without-sigma":
            return x - cond
        if bug.endswith("taken-for-eps"):
            return x - cond * F(sigma)
        if bug.endswith("taken-for-v"):
            return x / F(sigma**2 + 1) - cond * F(sigma / np.sqrt(sigma**2 + 1))
        base = u if bug == "scaled-latent-in-denoised" else x
        return base * F(c_skip) + cond * F(c_out)
