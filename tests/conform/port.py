"""A port of five samplers written by hand, in float32, with a switch for every mistake."""

import math
from itertools import pairwise

import numpy as np

from .wiring import F, Wiring


class Port(Wiring):
    """One run of the port."""

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

    def euler(self, x: np.ndarray, sigmas: list[float]) -> None:
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            if self.bug == "c-in-in-place":
                x = x * F(self.scalings(sigma)[0])
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

    def slope(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
        denoised = self.denoise(x, sigma, step)
        if self.bug == "denoised-as-derivative":
            return denoised
        return (x - denoised) / F(sigma)

    def dpm_2(self, x: np.ndarray, sigmas: list[float]) -> None:
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            slope, middle = self.slope(x, sigma, i), math.sqrt(sigma * after)
            if after > 0:
                halfway = x + slope * F(middle - sigma)
                slope = self.slope(halfway, middle, i)
            x = x + slope * F(after - sigma)
            self.xs.append(x)

    def heun(self, x: np.ndarray, sigmas: list[float]) -> None:
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            first = self.slope(x, sigma, i)
            ahead = x + first * F(after - sigma)
            if after > 0 and self.bug != "is-euler":
                second = self.slope(
                    ahead, sigma if self.bug == "second-call-at-first-sigma" else after, i
                )
                share = F(1.0 if self.bug == "slopes-not-averaged" else 0.5)
                slope = second if self.bug == "second-slope-alone" else (first + second) * share
                ahead = x + slope * F(after - sigma)
            x = ahead
            self.xs.append(x)

    def alpha(self, sigma: float) -> float:
        flow = self.p["law"] == "flow" and self.bug != "ve-form-on-flow"
        return 1 - sigma if flow else 1.0

    def log_snr(self, sigma: float) -> float:
        return math.log(self.alpha(sigma) / sigma) if self.alpha(sigma) else -math.inf

    def dpmpp_2m(self, x: np.ndarray, sigmas: list[float]) -> None:
        bug, old = self.bug, None
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            denoised = self.denoise(x, sigma, i)
            directed = denoised
            if old is not None and after > 0 and bug != "history-dropped":
                before, here, there = (self.log_snr(s) for s in sigmas[i - 1 : i + 2])
                h, last = there - here, here - before
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
            x = F(ratio) * x + F(self.alpha(after) - self.alpha(sigma) * ratio) * directed
            if old is None or bug != "history-not-updated":
                old = denoised
            self.xs.append(x)

    def euler_ancestral(self, x: np.ndarray, sigmas: list[float]) -> None:
        bug = self.bug
        assert self.p["law"] == "ve" or bug == "ve-form-on-flow"
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            up = after * np.sqrt(sigma**2 - after**2) / sigma
            down = after**2 / sigma
            if bug == "up-and-down-swapped":
                up, down = down, up
            x = x + self.slope(x, sigma, i) * F(down - sigma)
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
