"""A port of four samplers written by hand, in float32, with a switch for every mistake.

Nothing in `Port` comes from lydite: the problem is read as plain JSON, the network and the loops
are written anew, as a stranger would.
"""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lydite.conform.candidate import Candidate
from lydite.conform.judge import judge
from lydite.conform.pose import Asked, pose
from lydite.conform.problem import Problem, write_problem
from lydite.conform.result import Verdict

F = np.float32


@dataclass
class Port:
    """One run of the port; `bug` names what is wrong with it."""

    p: dict[str, Any]
    bug: str = ""
    xs: list[np.ndarray] = field(default_factory=list[Any])
    timesteps: list[float] = field(default_factory=list[float])
    drawn: int = 0

    def run(self) -> "Port":
        p, bug = self.p, self.bug
        sigmas = self.sigmas()
        x = np.array(p["x"], F).reshape(p["shape"])
        if bug == "start-not-scaled":
            x = np.array(p["noise"], F).reshape(p["shape"])
        if bug == "start-scaled-otherwise":
            x = np.array(p["noise"], F).reshape(p["shape"]) * F(np.sqrt(1 + sigmas[0] ** 2))
        getattr(self, p["sampler"])(x, sigmas)
        return self

    # --- schedule

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
            return float(even[p["sigmas"].index(sigma)])
        right = (
            float(np.interp(np.log(sigma), np.log(table), np.arange(len(table))))
            if table
            else 1000 * sigma
        )
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

    # --- network

    def network(self, kind: dict[str, Any], u: np.ndarray, t: float) -> np.ndarray:
        p = self.p
        if p["prediction"] == "flow":
            sigma = max(t / 1000, 1e-4)
            x, a = u, 1 - sigma
        else:
            sigma = float(np.exp(np.interp(t, np.arange(len(p["table"])), np.log(p["table"]))))
            x, a = u * F(np.sqrt(sigma**2 + 1)), 1.0
        s2 = kind["spread"] ** 2
        width = s2 * a * a + sigma**2
        near = np.stack([-((x - F(a * m)) ** 2) / F(2 * width) for m in kind["means"]])
        odds = np.exp(near - near.max(0))
        parts = np.stack([(F(s2 * a) * x + F(sigma**2 * m)) / F(width) for m in kind["means"]])
        denoised = (odds * parts).sum(0) / odds.sum(0)
        if p["prediction"] == "v":
            return (x / F(sigma**2 + 1) - denoised) * F(np.sqrt(sigma**2 + 1) / sigma)
        return (x - denoised) / F(sigma)

    def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
        p, bug = self.p, self.bug
        flow = p["prediction"] == "flow"
        scale = F(np.sqrt(sigma**2 + 1))
        u = x if flow or bug in ("no-c-in", "c-in-in-place") else x / scale
        if bug == "c-in-inverted":
            u = x * scale
        if bug == "c-in-on-flow":
            u = x / scale
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
        base = u if bug == "scaled-latent-in-denoised" else x
        if (p["prediction"] == "v" and bug != "v-taken-for-eps") or bug == "eps-taken-for-v":
            return base / F(sigma**2 + 1) - cond * F(sigma / np.sqrt(sigma**2 + 1))
        return base - cond * F(sigma)

    # --- samplers

    def euler(self, x: np.ndarray, sigmas: list[float]) -> None:
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            if self.bug == "c-in-in-place":
                x = x / F(np.sqrt(sigma**2 + 1))
            denoised = self.denoise(x, sigma, i)
            slope = (x - denoised) / F(sigma)
            if self.bug == "denoised-as-derivative":
                slope = denoised
            if self.bug == "broadcast":  # one sigma for each image, on a new first axis
                slope = (x - denoised) / np.full((2, 1, 1, 1), sigma, F)
                x = x[None] if x.ndim == 3 else x
            x = x + slope * F(after - sigma)
            self.xs.append(x)
            if self.bug == "broadcast":
                x = x[0]

    def heun(self, x: np.ndarray, sigmas: list[float]) -> None:
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            first = (x - self.denoise(x, sigma, i)) / F(sigma)
            ahead = x + first * F(after - sigma)
            if after > 0 and self.bug != "is-euler":
                second = (ahead - self.denoise(ahead, after, i)) / F(after)
                share = F(1.0 if self.bug == "slopes-not-averaged" else 0.5)
                slope = second if self.bug == "second-slope-alone" else (first + second) * share
                ahead = x + slope * F(after - sigma)
            x = ahead
            self.xs.append(x)

    def dpmpp_2m(self, x: np.ndarray, sigmas: list[float]) -> None:
        bug, old = self.bug, None
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            denoised = self.denoise(x, sigma, i)
            directed = denoised
            if old is not None and after > 0 and bug != "history-dropped":
                h, last = np.log(sigma / after), np.log(sigmas[i - 1] / sigma)
                r = h / last if bug == "step-ratio-inverted" else last / h
                if bug == "step-ratio-not-halved":
                    r = r / 2
                if bug == "step-ratio-left-out":
                    r = 1.0
                if bug == "step-ratio-in-sigma":
                    r = (sigmas[i - 1] - sigma) / (sigma - after)
                new, before = (old, denoised) if bug == "history-swapped" else (denoised, old)
                directed = F(1 + 1 / (2 * r)) * new - F(1 / (2 * r)) * before
                if bug == "history-sign":
                    directed = F(1 - 1 / (2 * r)) * new + F(1 / (2 * r)) * before
            ratio = after / sigma
            x = F(ratio) * x + F(1 - ratio) * directed
            if old is None or bug != "history-not-updated":
                old = denoised
            self.xs.append(x)

    def euler_ancestral(self, x: np.ndarray, sigmas: list[float]) -> None:
        bug = self.bug
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            up = after * np.sqrt(sigma**2 - after**2) / sigma
            down = after**2 / sigma
            if bug == "up-and-down-swapped":
                up, down = down, up
            slope = (x - self.denoise(x, sigma, i)) / F(sigma)
            x = x + slope * F(down - sigma)
            if after > 0 and bug != "noise-left-out":
                at = 0 if bug == "noise-repeated" else i
                deviation = {
                    "variance-for-deviation": up**2,
                    "noise-not-scaled": 1.0,
                    "noise-of-sigma-next": after,
                    "noise-of-sigma": sigma,
                    "noise-negated": -up,
                }.get(bug, up)
                noise = np.array(self.p["normals"][at], F).reshape(x.shape)
                if bug == "starting-noise-again":
                    normals = [self.p["noise"], *self.p["normals"]]
                    noise = np.array(normals[i], F).reshape(x.shape)
                x = x + noise * F(deviation)
            self.xs.append(x)


def plain(problem: Problem, folder: Path) -> dict[str, Any]:
    write_problem(folder / "problem.json", problem)
    return json.loads((folder / "problem.json").read_text())


def candidate(port: Port, *, timesteps: bool = False) -> Candidate:
    shape = tuple(port.p["shape"])
    right = all(x.shape == shape for x in port.xs)
    values = {("x", step, 0): x.astype(np.float64) for step, x in enumerate(port.xs) if right}
    if timesteps:
        told = enumerate(port.timesteps)
        values |= {("timestep", step, 0): np.array(t) for step, t in told}
    shapes = () if right else (port.xs[0].shape,)
    return Candidate(values, {}, "f32", complete=True, shapes=shapes)


def named(asked: Asked, bug: str, folder: Path) -> Verdict:
    problem = pose(asked)
    return judge(problem, candidate(Port(plain(problem, folder), bug).run()))


def written(xs: "list[np.ndarray]", dtype: str = "f32") -> Candidate:
    """What a candidate left that wrote x after each step, and nothing else."""
    values = {("x", step, 0): np.asarray(x, np.float64) for step, x in enumerate(xs)}
    return Candidate(values, {}, dtype, complete=True)


def margin(verdict: Verdict) -> float:
    """The largest share of what is allowed."""
    return max((row.error or 0.0) / row.limit for row in verdict.rows if row.name == "x")
