"""Euler's method in NumPy, fed through `lydite sampler conform`: put your own loop in its place.

$ lydite sampler conform --write problem.json --sampler euler --guidance 3
$ python examples/sampler_candidate.py problem.json run
$ lydite sampler conform problem.json run
"""

import json
import os
import sys
from itertools import pairwise

import numpy as np


def main(problem, folder):
    with open(problem) as file:
        p = json.load(file)
    x = np.array(p["x"], np.float32).reshape(p["shape"])
    os.makedirs(folder)
    header(folder, False, framework="numpy")
    for i, (sigma, after) in enumerate(pairwise(p["sigmas"])):
        c_in, c_skip, c_out = scalings(p["prediction"], sigma, p["sigma_data"])
        t = sigma if p["prediction"] == "denoised" else p["timesteps"][i]
        f = network(p, p["denoiser"], x * c_in, t)
        if p["guidance"]:
            uncond = network(p, p["guidance"]["uncond"], x * c_in, t)
            f = uncond + (f - uncond) * p["guidance"]["scale"]
        denoised = x * c_skip + f * c_out
        x = x + (x - denoised) / sigma * (after - sigma)
        add(folder, 2 * i, "sampler/denoised", denoised, step=i)  # helps to explain
        add(folder, 2 * i + 1, "sampler/x", x, step=i)  # what is judged
    header(folder, True, framework="numpy")


def scalings(prediction, sigma, data):  # the denoised is c_skip * x + c_out * F(c_in * x, t)
    root = (sigma**2 + 1) ** 0.5
    wide = (sigma**2 + data**2) ** 0.5
    kinds = {"eps": (1 / root, 1.0, -sigma), "v": (1 / root, 1 / root**2, -sigma / root)}
    kinds |= {"x0": (1 / root, 0.0, 1.0), "flow": (1.0, 1.0, -sigma), "denoised": (1.0, 0.0, 1.0)}
    kinds |= {"edm": (1 / wide, (data / wide) ** 2, sigma * data / wide)}
    kinds |= {"cosmos": (1 / (sigma + 1), 1 / (sigma + 1), -sigma / (sigma + 1))}
    return kinds[prediction]


def network(p, kind, u, t):  # stands for a real one; in words: p["words"]["network"]
    sigma = max(t / p["training_steps"], 1e-4) if p["prediction"] == "flow" else t
    if p["prediction"] in ("eps", "v", "x0"):
        sigma = float(np.exp(np.interp(t, range(len(p["table"])), np.log(p["table"]))))
    if p["prediction"] == "edm":
        sigma = float(np.exp(4 * np.clip(t, -3, 3)))
    if p["prediction"] == "cosmos":
        sigma = np.clip(t, 1e-4, 1 - 1e-4) / (1 - np.clip(t, 1e-4, 1 - 1e-4))
    c_in, c_skip, c_out = scalings(p["prediction"], sigma, p["sigma_data"])
    x = u / c_in
    if kind["name"] in ("zero", "identity"):
        return (x * (kind["name"] == "identity") - x * c_skip) / c_out
    a, s = (1.0 if p["law"] == "ve" else 1 - sigma), kind["spread"]
    width = (s * a) ** 2 + sigma**2
    images = np.stack([(x * (s**2 * a) + sigma**2 * m) / width for m in kind["means"]])
    logits = np.stack([-((x - a * m) ** 2) / (2 * width) for m in kind["means"]])
    odds = np.exp(logits - logits.max(0))
    return ((odds * images).sum(0) / odds.sum(0) - x * c_skip) / c_out


# What follows is the writer of docs/trace-format.md, word for word.


def put(folder, name, data):  # a file is complete, or absent
    with open(f"{folder}/part", "wb") as file:
        file.write(data)
    os.replace(f"{folder}/part", f"{folder}/{name}")


def header(folder, complete, **more):  # first with False; with True when the run ended by itself
    fields = {"format": "lydite-trace", "version": 1, "complete": complete, **more}
    put(folder, "trace.json", json.dumps(fields).encode())


def add(folder, i, name, value, **more):  # more: port, kind, step, call, dims
    a = np.array(value, order="C")  # evaluated, copied, contiguous
    dtype = a.dtype.name.upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")
    entry = {"dtype": dtype, "shape": a.shape, "data_offsets": [0, a.nbytes]}
    head, shard = json.dumps({str(i): entry}).encode(), f"t-{i:05}.safetensors"
    put(folder, shard, len(head).to_bytes(8, "little") + head + a.tobytes())
    line = {"i": i, "name": name, "shape": a.shape, "dtype": dtype, "shard": shard, "key": str(i)}
    with open(f"{folder}/events.jsonl", "a") as lines:
        lines.write(json.dumps({**line, **more}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
