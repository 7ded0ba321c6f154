"""Traces for `lydite diff` from any Python environment: copy this file; it needs NumPy alone.

LYDITE_TRACE=FOLDER records. LYDITE_INJECT=REFERENCE with LYDITE_INJECT_AT=PATTERN,PATTERN returns
the reference's values. Without them a tap returns its argument. Format: docs/trace-format.md.
FOLDER is new or empty. A trace is complete when the process ends, or after `finish()`.
"""

import atexit
import fnmatch
import json
import os
import sys

import numpy as np

step, _folder, _count, _calls, _weights, _injected = 0, None, 0, {}, {}, None


def set_step(number):
    """Say which step of the loop the taps that follow belong to."""
    global step
    step = number


def tap(name, x, slot="out", kind="activation", dims=None):
    """Record an array of any framework and return it, or the reference's value when injecting."""
    folder = os.environ.get("LYDITE_TRACE")
    if not folder:
        return x
    _begin(folder)
    call = _calls[name, slot, step] = _calls.get((name, slot, step), -1) + 1
    _add(folder, name, x, port=slot, kind=kind, step=step, call=call, dims=dims)
    return _reference(name, slot, call, x)


def weights(parameters, scope=""):
    """Record shape and statistics of parameters: pairs of name and array, or a dict.

    Later calls add to it. A parameter belongs to the tap whose name it begins with: the weight of
    the layer that gives tap("mlp/fc1", x) is "mlp/fc1.weight".
    """
    folder = os.environ.get("LYDITE_TRACE")
    if not folder:
        return
    _begin(folder)
    for name, value in dict(parameters).items():
        a = _numpy(value).astype(np.float64)
        stats = {"count": a.size, "min": a.min(), "max": a.max(), "mean": a.mean(), "std": a.std()}
        stats |= {"rms": (a * a).mean() ** 0.5, "nan": 0, "inf": 0, "zero": int((a == 0).sum())}
        info = {"shape": a.shape, "dtype": _dtype(value), "stats": stats}
        _weights[f"{scope}/{name}" if scope else name] = info
    _put(folder, "weights.json", json.dumps(_weights).encode())


def watch(model, scope):
    """Record inputs and outputs of every module of a torch model from now on, and its weights."""
    weights(model.state_dict(), scope)
    for path, module in model.named_modules():
        name = f"{scope}/{path}" if path else scope

        def before(_, args, kwargs, name=name):
            named = {**{str(n): x for n, x in enumerate(args)}, **kwargs}
            for key, x in named.items():
                _leaves(name, f"in.{key}", x)

        def after(_, args, output, name=name):
            _leaves(name, "out", output)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _leaves(name, slot, value):
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        tap(name, value, slot)
    elif isinstance(value, dict):
        for key, item in value.items():
            _leaves(name, f"{slot}.{key}", item)
    elif isinstance(value, list | tuple):
        for n, item in enumerate(value):
            _leaves(name, slot if slot == "out" and n == 0 else f"{slot}.{n}", item)


def finish(complete=True):
    """Complete the trace. The next tap begins another one, where LYDITE_TRACE then says."""
    global _folder, _count
    if _folder:
        _header(_folder, complete)
    _folder, _count = None, 0
    _calls.clear()
    _weights.clear()


atexit.register(lambda: finish(getattr(sys, "last_value", None) is None))


def _begin(folder):
    global _folder
    if folder == _folder:
        return
    if _folder:
        finish()
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        sys.exit(f"{folder}: not empty; LYDITE_TRACE needs a new folder.")
    _header(folder, False)
    _folder = folder


def _header(folder, complete):
    fields = {"format": "lydite-trace", "version": 1, "complete": complete}
    _put(folder, "trace.json", json.dumps(fields).encode())


def _add(folder, name, x, **more):
    global _count
    a, i = np.array(_numpy(x), order="C"), _count
    stored = a.dtype.name.upper().replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")
    entry = {"dtype": stored, "shape": a.shape, "data_offsets": [0, a.nbytes]}
    head, shard = json.dumps({str(i): entry}).encode(), f"t-{i:05}.safetensors"
    head += b" " * (-len(head) % 8)
    _put(folder, shard, len(head).to_bytes(8, "little") + head + a.tobytes())
    line = {"i": i, "name": name, "shape": a.shape, "dtype": _dtype(x), "shard": shard}
    with open(f"{folder}/events.jsonl", "a") as lines:
        lines.write(json.dumps({**line, "key": str(i), **more}) + "\n")
    _count += 1


def _put(folder, name, data):  # a file is complete, or absent
    with open(f"{folder}/part", "wb") as file:
        file.write(data)
    os.replace(f"{folder}/part", f"{folder}/{name}")


def _dtype(x):
    return str(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype).rpartition(".")[2]


def _numpy(x):
    """NumPy has no bfloat16 and no float8: these are stored as float32, which holds them."""
    narrow = "bfloat16" in _dtype(x) or "float8" in _dtype(x)
    if hasattr(x, "detach"):  # torch
        x = x.detach().cpu()
        return (x.float() if narrow else x).numpy()
    if type(x).__module__.startswith("mlx") and narrow:
        return np.array(x.astype(sys.modules["mlx.core"].float32))
    return np.asarray(x).astype(np.float32) if narrow else np.asarray(x)


def _reference(name, slot, call, x):
    """The reference's value of this name, slot, step and call, where it is to be injected."""
    global _injected
    folder, patterns = os.environ.get("LYDITE_INJECT"), os.environ.get("LYDITE_INJECT_AT", "")
    wanted = (p.rpartition(":")[::2] if ":" in p else (p, "out*") for p in patterns.split(","))
    if not folder or not any(
        fnmatch.fnmatchcase(name, a) and fnmatch.fnmatchcase(slot, b) for a, b in wanted
    ):
        return x
    if _injected is None:
        with open(f"{folder}/events.jsonl") as lines:
            events = [json.loads(line) for line in lines]
        numbered = {e["i"]: e for e in events}
        _injected = {}
        for e in events:
            key = (e["name"], e.get("port", "out"), e.get("step", 0))
            e = numbered[e["alias_of"]] if e.get("alias_of") is not None else e
            _injected.setdefault(key, []).append(e)
    events = _injected.get((name, slot, step), [])
    if call >= len(events) or "shard" not in events[call]:
        return x
    with open(f"{folder}/{events[call]['shard']}", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[events[call]["key"]]
        first, last = entry["data_offsets"]
        file.seek(8 + size + first)
        data = file.read(last - first)
    if entry["dtype"] == "BF16":
        new = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        kinds = {"F": "f", "I": "i", "U": "u", "B": "?"}
        kind, bits = kinds[entry["dtype"][0]], entry["dtype"].lstrip("FIUBOL")
        new = np.frombuffer(data, "?" if kind == "?" else f"<{kind}{int(bits) // 8}")
    new = new.reshape(entry["shape"])
    if hasattr(x, "detach"):
        return sys.modules["torch"].tensor(new, dtype=x.dtype, device=x.device)
    if type(x).__module__.startswith("mlx"):
        return sys.modules["mlx.core"].array(new).astype(x.dtype)
    return new.astype(x.dtype)
