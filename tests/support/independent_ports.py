"""Correct ports of four networks in NumPy, with names, axis orders and module trees of their own.

The references are diffusers and transformers with tiny random weights, recorded with hooks. The
ports follow no convention of theirs: channels last, q, k and v in one matrix, blocks counted from
the other end, functions where the reference has modules. A port takes `wrong`, the name of a bug.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from scipy.special import erf

from lydite.trace.events import Header
from lydite.trace.recorder import Recorder
from lydite.trace.torch_capture import record_modules
from lydite.trace.writer import Capture

Weights = Mapping[str, Any]
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class Port:
    """What the ports share: rounding to the run's precision, and a recorder."""

    def __init__(self, recorder: Recorder, dtype: str, wrong: str = "") -> None:
        self.recorder, self.dtype, self.wrong = recorder, NUMPY[dtype], wrong

    def r(self, x: Any) -> Any:
        return np.asarray(x, np.float32).astype(self.dtype).astype(np.float32)

    def put(self, name: str, x: Any, kind: str = "activation") -> Any:
        kept = x if kind in ("ids", "schedule") else np.asarray(x).astype(self.dtype)
        return_value = self.recorder.record(name, kept, kind=kind)
        return x if kind in ("ids", "schedule") else np.asarray(return_value, np.float32)

    def affine(self, x: Any, w: Any, b: Any = None) -> Any:
        y = x @ w
        return self.r(y if b is None else y + b)

    def standardize(self, x: Any, eps: float) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))

    def rms(self, x: Any, w: Any, eps: float) -> Any:
        return self.r(self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)) * w)

    def silu(self, x: Any) -> Any:
        return self.r(x / (1 + np.exp(-x)))

    def gelu_tanh(self, x: Any) -> Any:
        if self.wrong == "gelu":
            return self.r(x * 0.5 * (1 + erf(x / np.sqrt(2.0))))
        return self.r(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))

    def attend(self, q: Any, k: Any, v: Any, mask: Any = 0.0) -> Any:
        """Heads on axis 1."""
        scale = 1.0 if self.wrong == "scale" else q.shape[-1] ** -0.5
        s = self.r(q @ k.swapaxes(-1, -2)) * scale + mask
        p = np.exp(s - s.max(-1, keepdims=True))
        return self.r(self.r(p / p.sum(-1, keepdims=True)) @ v)

    def waves(self, t: Any, width: int) -> Any:
        """Cosines, then sines; a plain function that records nothing."""
        f = np.exp(
            np.arange(width // 2, dtype=np.float32) * np.float32(-np.log(1e4) / (width // 2))
        )
        a = np.asarray(t, np.float32)[:, None] * f
        return self.r(np.concatenate([np.cos(a), np.sin(a)], -1))


def heads(x: Any, n: int) -> Any:
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)


def join(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def arrays(model: Any) -> dict[str, Any]:
    """The parameters of a torch model, by the reference's names."""
    return {name: value.detach().float().numpy() for name, value in model.state_dict().items()}


def linear(w: Weights, name: str) -> tuple[Any, Any]:
    return w[f"{name}.weight"].T, w.get(f"{name}.bias")


def fused(w: Weights, *names: str) -> tuple[Any, Any]:
    return (
        np.concatenate([w[f"{n}.weight"].T for n in names], -1),
        np.concatenate([w[f"{n}.bias"] for n in names]),
    )


@contextmanager
def start(
    folder: Path, side: str, dtype: str, keep: tuple[str, ...], weights: Weights | None
) -> Generator[Recorder]:
    header = Header(side=side, framework="torch" if side == "reference" else "numpy", dtype=dtype)
    with Recorder.start(folder, header=header, capture=Capture(points=keep)) as recorder:
        if weights is not None:
            recorder.writer.add_weights(weights)
        yield recorder


# a multi-modal diffusion transformer with its sampler

STEPS, GUIDANCE = 3, 4.0


def make_mmdit() -> Any:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=16, out_channels=16, num_layers=3,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=24,
        caption_projection_dim=32, pooled_projection_dim=20, pos_embed_max_size=12,
        qk_norm="rms_norm",
    ).eval()  # fmt: skip
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3.0) if value.ndim > 1 else value.add_(0.2 * torch.randn_like(value))
    return model


def mmdit_inputs() -> dict[str, Any]:
    g = np.random.default_rng(3)
    return {
        "noise": g.standard_normal((1, 16, 16, 16)).astype(np.float32),
        "text": g.standard_normal((2, 7, 24)).astype(np.float32),
        "pooled": g.standard_normal((2, 20)).astype(np.float32),
        "sigmas": np.array([1.0, 0.8, 0.45, 0.0], np.float32),
    }


def mmdit_reference(model: Any, folder: Path, dtype: str, keep: tuple[str, ...] = ("*",)) -> None:
    given, precision = mmdit_inputs(), getattr(torch, dtype)
    model = model.to(precision)
    text, pooled = (torch.from_numpy(given[n]).to(precision) for n in ("text", "pooled"))
    prefixed = {f"transformer/{name}": value for name, value in arrays(model).items()}
    with torch.no_grad(), start(folder, "reference", dtype, keep, prefixed) as rec:
        rec.record("pipeline/noise", given["noise"], kind="input")
        rec.record("pipeline/sigmas", given["sigmas"], kind="schedule")
        x = torch.from_numpy(given["noise"]).to(precision)
        with record_modules(rec, model, scope="transformer"):
            for step in range(STEPS):
                rec.step = step
                t = torch.tensor([float(given["sigmas"][step]) * 1000] * 2, dtype=precision)
                v = model(
                    hidden_states=torch.cat([x, x]), encoder_hidden_states=text,
                    pooled_projections=pooled, timestep=t,
                ).sample  # fmt: skip
                v = v[:1] + GUIDANCE * (v[1:] - v[:1])
                rec.record("pipeline/velocity", v)
                x = (x.float() + float(given["sigmas"][step + 1] - given["sigmas"][step])
                     * v.float()).to(precision)  # fmt: skip
                rec.record("pipeline/latents", x)
    model.float()


class Mmdit(Port):
    def load(self, w: Weights) -> None:
        p: dict[str, Any] = {}

        def two(name: str, source: str) -> None:
            p[f"{name}.w"], bias = linear(w, source)
            if bias is not None:
                p[f"{name}.b"] = bias

        p["patch.w"] = w["pos_embed.proj.weight"].transpose(2, 3, 1, 0).reshape(64, 32)
        p["patch.b"] = w["pos_embed.proj.bias"]
        p["table"] = w["pos_embed.pos_embed"].reshape(12, 12, 32)
        for name, source in (("t", "timestep"), ("y", "text")):
            two(f"cond.{name}.a", f"time_text_embed.{source}_embedder.linear_1")
            two(f"cond.{name}.b", f"time_text_embed.{source}_embedder.linear_2")
        two("words", "context_embedder")
        for i in range(3):
            old, last = f"transformer_blocks.{i}", i == 2
            for s, tail, qkv, norm, out in (
                ("img", "", ("to_q", "to_k", "to_v"), "norm_{}", "to_out.0"),
                ("txt", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_{}",
                 "to_add_out"),
            ):  # fmt: skip
                new = f"stack.{i}.{s}"
                two(f"{new}.mod", f"{old}.norm1{tail}.linear")
                p[f"{new}.qkv.w"], p[f"{new}.qkv.b"] = fused(w, *(f"{old}.attn.{n}" for n in qkv))
                for letter in "qk":
                    p[f"{new}.scale_{letter}"] = w[f"{old}.attn.{norm.format(letter)}.weight"]
                if last and s == "txt":
                    continue
                two(f"{new}.o", f"{old}.attn.{out}")
                two(f"{new}.up", f"{old}.ff{tail}.net.0.proj")
                two(f"{new}.down", f"{old}.ff{tail}.net.2")
        two("end.mod", "norm_out.linear")
        two("end.lin", "proj_out")
        self.p = {name: self.r(value) for name, value in p.items()}

    def lin(self, name: str, x: Any) -> Any:
        return self.put(name, self.affine(x, self.p[f"{name}.w"], self.p[f"{name}.b"]))

    def run(self, given: dict[str, Any]) -> None:
        x = given["noise"].transpose(0, 2, 3, 1)
        self.put("start", x, "input")
        self.put("sigma_table", given["sigmas"], "schedule")
        x = self.r(x)
        for step in range(STEPS):
            self.recorder.step = step
            t = self.r(np.repeat(given["sigmas"][step] * np.float32(1000), 2))
            v = self.net(np.concatenate([x, x]), self.r(given["text"]), self.r(given["pooled"]), t)
            v = self.r(v[:1] + self.r(GUIDANCE * self.r(v[1:] - v[:1])))
            self.put("guided", v)
            x = self.r(x + (given["sigmas"][step + 1] - given["sigmas"][step]) * v)
            x = self.put("state", x)

    def net(self, x: Any, text: Any, pooled: Any, t: Any) -> Any:
        n = x.shape[0]
        p = x.reshape(n, 8, 2, 8, 2, 16).transpose(0, 1, 3, 2, 4, 5).reshape(n, 64, 64)
        h = self.lin("patch", p)
        h = self.r(h + self.p["table"][2:10, 2:10].reshape(1, 64, 32))
        c = self.lin("cond.t.b", self.silu(self.lin("cond.t.a", self.waves(t, 256))))
        y = self.lin("cond.y.b", self.silu(self.lin("cond.y.a", pooled)))
        vec = self.put("cond", self.r(c + y))
        act = self.silu(vec)
        e = self.lin("words", text)
        for i in range(3):
            e, h = self.block(i, e, h, act)
        scale, shift = np.split(self.lin("end.mod", act), 2, -1)
        h = self.r(self.standardize(h, 1e-6) * (1 + scale[:, None]) + shift[:, None])
        out = self.lin("end.lin", h)
        out = out.reshape(n, 8, 8, 2, 2, 16).transpose(0, 1, 3, 2, 4, 5).reshape(n, 16, 16, 16)
        return self.put("velocity_pair", out)

    def block(self, i: int, e: Any, h: Any, act: Any) -> tuple[Any, Any]:
        last, name = i == 2, f"stack.{i}"
        parts: dict[str, Any] = {}
        for s, x in (("img", h), ("txt", e)):
            m = self.lin(f"{name}.{s}.mod", act)[:, None]
            if last and s == "txt":
                scale, shift = np.split(m, 2, -1)
                rest: Any = None
            else:
                shift, scale, *rest = np.split(m, 6, -1)
            if self.wrong == "chunks" and i == 1 and s == "img":
                shift, scale = scale, shift
            a = self.r(self.standardize(x, 1e-6) * (1 + scale) + shift)
            q, k, v = np.split(self.lin(f"{name}.{s}.qkv", a), 3, -1)
            q, k = (
                self.rms(heads(z, 4), self.p[f"{name}.{s}.scale_{letter}"], 1e-6)
                for z, letter in ((q, "q"), (k, "k"))
            )
            parts[s] = (q, k, heads(v, 4), rest)
        q, k, v = (np.concatenate([parts["img"][j], parts["txt"][j]], 2) for j in range(3))
        both = join(self.attend(q, k, v))
        both = self.put(f"{name}.mixed", both)
        result = {"img": h, "txt": e}
        for s, rows in (("img", both[:, :64]), ("txt", both[:, 64:])):
            rest = parts[s][3]
            if rest is None:
                continue
            gate, shift, scale, gate2 = rest
            x = self.r(result[s] + self.r(gate * self.lin(f"{name}.{s}.o", rows)))
            a = self.r(self.standardize(x, 1e-6) * (1 + scale) + shift)
            u = self.gelu_tanh(self.lin(f"{name}.{s}.up", a))
            result[s] = self.r(x + self.r(gate2 * self.lin(f"{name}.{s}.down", u)))
            result[s] = self.put(f"{name}.{s}", result[s])
        return result["txt"], result["img"]


# the decoder of an autoencoder, channels last, blocks counted from the picture


def make_vae() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    kind: Any = AutoencoderKL
    model = kind(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1, norm_num_groups=4, use_post_quant_conv=False, use_quant_conv=False,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5) if value.ndim > 1 else value.add_(0.2 * torch.randn_like(value))
    return model


def vae_latents() -> Any:
    return np.random.default_rng(4).standard_normal((1, 4, 8, 8)).astype(np.float32)


def vae_reference(model: Any, folder: Path, dtype: str, keep: tuple[str, ...] = ("*",)) -> None:
    precision = getattr(torch, dtype)
    model = model.to(precision)
    z = torch.from_numpy(vae_latents())
    prefixed = {f"vae/{n}": v for n, v in arrays(model).items() if n.startswith("decoder")}
    with torch.no_grad(), start(folder, "reference", dtype, keep, prefixed) as rec:
        rec.record("pipeline/latents", z, kind="input")
        with record_modules(rec, model.decoder, scope="vae/decoder"):
            image = model.decoder(z.to(precision))
        rec.record("pipeline/image", image)
    model.float()


class Vae(Port):
    def load(self, w: Weights) -> None:
        p: dict[str, Any] = {}

        def unit(new: str, old: str) -> None:
            for a, b in (("gn1", "norm1"), ("c1", "conv1"), ("gn2", "norm2"), ("c2", "conv2"),
                         ("skip", "conv_shortcut")):  # fmt: skip
                copy(f"{new}.{a}", f"{old}.{b}")

        def copy(new: str, old: str) -> None:
            if f"decoder.{old}.weight" not in w:
                return
            value = w[f"decoder.{old}.weight"]
            moved = value.transpose(0, 2, 3, 1) if value.ndim == 4 else value
            p[f"{new}.weight"] = moved.T if moved.ndim == 2 else moved
            p[f"{new}.bias"] = w[f"decoder.{old}.bias"]

        copy("first", "conv_in")
        unit("centre.0", "mid_block.resnets.0")
        unit("centre.1", "mid_block.resnets.1")
        copy("centre.att.gn", "mid_block.attentions.0.group_norm")
        for a, b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")):
            copy(f"centre.att.{a}", f"mid_block.attentions.0.{b}")
        for i in range(3):
            for j in range(2):
                unit(f"level.{2 - i}.unit.{j}", f"up_blocks.{i}.resnets.{j}")
            copy(f"level.{2 - i}.grow", f"up_blocks.{i}.upsamplers.0.conv")
        copy("final.gn", "conv_norm_out")
        copy("final.conv", "conv_out")
        self.p = {name: self.r(value) for name, value in p.items()}

    def conv(self, name: str, x: Any) -> Any:
        k = self.p[f"{name}.weight"]
        size = k.shape[1]
        pad = size // 2
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        h, w = x.shape[1] - size + 1, x.shape[2] - size + 1
        cols = [x[:, i : i + h, j : j + w] for i in range(size) for j in range(size)]
        y = np.concatenate(cols, -1) @ k.reshape(k.shape[0], -1).T
        return self.put(name, self.r(y + self.p[f"{name}.bias"]))

    def gn(self, name: str, x: Any) -> Any:
        flat = x.reshape(x.shape[0], -1, 4, x.shape[-1] // 4)
        m = flat.mean((1, 3), keepdims=True)
        v = ((flat - m) ** 2).mean((1, 3), keepdims=True)
        eps = 1e-2 if self.wrong == "eps" and name == "level.2.unit.0.gn1" else 1e-6
        y = ((flat - m) / np.sqrt(v + eps)).reshape(x.shape)
        return self.put(name, self.r(y * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]))

    def unit(self, name: str, x: Any) -> Any:
        h = self.conv(f"{name}.c1", self.silu(self.gn(f"{name}.gn1", x)))
        h = self.conv(f"{name}.c2", self.silu(self.gn(f"{name}.gn2", h)))
        skip = self.conv(f"{name}.skip", x) if f"{name}.skip.weight" in self.p else x
        return self.put(name, self.r(skip + h))

    def run(self, z: Any) -> None:
        self.put("z", z.transpose(0, 2, 3, 1), "input")
        x = self.conv("first", self.r(z.transpose(0, 2, 3, 1)))
        x = self.unit("centre.0", x)
        shape = x.shape
        a = self.gn("centre.att.gn", x).reshape(1, -1, shape[-1])
        q, k, v = (
            self.put(f"centre.att.{n}", self.affine(a, self.p[f"centre.att.{n}.weight"],
                                                    self.p[f"centre.att.{n}.bias"]))
            for n in "qkv"
        )  # fmt: skip
        a = self.attend(q[:, None], k[:, None], v[:, None])[:, 0]
        a = self.affine(a, self.p["centre.att.o.weight"], self.p["centre.att.o.bias"])
        a = self.put("centre.att.o", a)
        x = self.put("centre.att", self.r(x + a.reshape(shape)))
        x = self.unit("centre.1", x)
        for level in (2, 1, 0):
            for j in range(2):
                x = self.unit(f"level.{level}.unit.{j}", x)
            if f"level.{level}.grow.weight" in self.p:
                x = self.conv(f"level.{level}.grow", x.repeat(2, 1).repeat(2, 2))
            x = self.put(f"level.{level}", x)
        x = self.conv("final.conv", self.silu(self.gn("final.gn", x)))
        self.put("picture", x)


# a text encoder: one matrix for q, k and v, no batch axis


def make_clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(2)
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, projection_dim=24, num_hidden_layers=5,
        num_attention_heads=4, max_position_embeddings=16, hidden_act="quick_gelu", eos_token_id=98,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4.0) if value.ndim > 1 else value.add_(0.2 * torch.randn_like(value))
    return model


def clip_ids() -> Any:
    return np.array([[97, 5, 41, 33, 8, 61, 98, 98, 98, 98]], np.int64)


def clip_reference(model: Any, folder: Path, dtype: str, keep: tuple[str, ...] = ("*",)) -> None:
    precision = getattr(torch, dtype)
    model = model.to(precision)
    with torch.no_grad(), start(folder, "reference", dtype, keep, arrays(model)) as rec:
        rec.record("pipeline/token_ids", clip_ids(), kind="ids")
        with record_modules(rec, model, scope="text_encoder"):
            model(torch.from_numpy(clip_ids()))
    model.float()


class Clip(Port):
    def load(self, w: Weights) -> None:
        w = {name.removeprefix("text_model."): value for name, value in w.items()}
        p = {
            "tok": w["embeddings.token_embedding.weight"],
            "pos": w["embeddings.position_embedding.weight"],
            "lnf.g": w["final_layer_norm.weight"], "lnf.b": w["final_layer_norm.bias"],
            "to_joint": w["text_projection.weight"].T,
        }  # fmt: skip
        for i in range(5):
            old, new = f"encoder.layers.{i}", f"h{i}"
            names = (f"{old}.self_attn.{n}_proj" for n in "qkv")
            p[f"{new}/att/in/w"], p[f"{new}/att/in/b"] = fused(w, *names)
            p[f"{new}/att/out/w"], p[f"{new}/att/out/b"] = linear(w, f"{old}.self_attn.out_proj")
            for a, b in (("up", "fc1"), ("down", "fc2")):
                p[f"{new}/{a}/w"], p[f"{new}/{a}/b"] = linear(w, f"{old}.mlp.{b}")
            for a in "12":
                p[f"{new}/ln{a}/g"] = w[f"{old}.layer_norm{a}.weight"]
                p[f"{new}/ln{a}/b"] = w[f"{old}.layer_norm{a}.bias"]
        self.p = {name: self.r(value) for name, value in p.items()}

    def ln(self, name: str, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        g, b = (self.p.get(f"{name}/{n}", self.p.get(f"{name}.{n}")) for n in "gb")
        return self.put(f"enc/{name}", self.r(y * g + b))

    def lin(self, name: str, x: Any) -> Any:
        return self.put(f"enc/{name}", self.affine(x, self.p[f"{name}/w"], self.p[f"{name}/b"]))

    def run(self, ids: Any) -> None:
        self.put("prompt_ids", ids[0], "ids")
        x = self.put("enc/emb", self.r(self.p["tok"][ids[0]] + self.p["pos"][: ids.shape[1]]))
        mask = np.triu(np.full((ids.shape[1],) * 2, -1e30, np.float32), 1)
        if self.wrong == "mask":
            mask = mask * 0
        for i in range(5):
            h = self.lin(f"h{i}/att/in", self.ln(f"h{i}/ln1", x))
            q, k, v = (heads(z[None], 4) for z in np.split(h, 3, -1))
            a = join(self.attend(q, k, v, mask))[0]
            x = self.r(x + self.lin(f"h{i}/att/out", a))
            u = self.lin(f"h{i}/up", self.ln(f"h{i}/ln2", x))
            u = self.r(u * self.r(1 / (1 + np.exp(-self.r(np.float32(1.702) * u)))))
            x = self.put(f"enc/h{i}", self.r(x + self.lin(f"h{i}/down", u)))
        x = self.ln("lnf", x)
        last = x[int((ids[0] == 98).argmax())]
        self.put("enc/pooled", self.r(last @ self.p["to_joint"]))


# a transformer with rotary positions and single-stream blocks


def make_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(5)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=20,
        guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(3.0) if value.ndim > 1 else value.add_(0.2 * torch.randn_like(value))
    return model


def flux_inputs() -> dict[str, Any]:
    g = np.random.default_rng(6)
    rows, columns = np.mgrid[:4, :5].reshape(2, -1)
    return {
        "x": g.standard_normal((1, 20, 16)).astype(np.float32),
        "text": g.standard_normal((1, 6, 24)).astype(np.float32),
        "pooled": g.standard_normal((1, 20)).astype(np.float32),
        "positions": np.stack([0 * rows, rows, columns], -1).astype(np.float32),
    }


def flux_reference(model: Any, folder: Path, dtype: str, keep: tuple[str, ...] = ("*",)) -> None:
    given, precision = flux_inputs(), getattr(torch, dtype)
    model = model.to(precision)
    with torch.no_grad(), start(folder, "reference", dtype, keep, arrays(model)) as rec:
        rec.record("pipeline/latents", given["x"], kind="input")
        with record_modules(rec, model, scope="transformer"):
            model(
                hidden_states=torch.from_numpy(given["x"]).to(precision),
                encoder_hidden_states=torch.from_numpy(given["text"]).to(precision),
                pooled_projections=torch.from_numpy(given["pooled"]).to(precision),
                timestep=torch.tensor([0.7], dtype=precision),
                guidance=torch.tensor([3.5], dtype=precision),
                img_ids=torch.from_numpy(given["positions"]), txt_ids=torch.zeros(6, 3),
            )  # fmt: skip
    model.float()


class Flux(Port):
    def load(self, w: Weights) -> None:
        p: dict[str, Any] = {}

        def two(name: str, *sources: str) -> None:
            p[f"{name}_kernel"], p[f"{name}_bias"] = fused(w, *sources)

        two("img_in", "x_embedder")
        two("txt_in", "context_embedder")
        for a, b in (("time", "timestep"), ("guid", "guidance"), ("vec", "text")):
            two(f"{a}_0", f"time_text_embed.{b}_embedder.linear_1")
            two(f"{a}_1", f"time_text_embed.{b}_embedder.linear_2")
        for i in range(2):
            old = f"transformer_blocks.{i}"
            for s, tail, qkv, norm, out in (
                ("i", "", ("to_q", "to_k", "to_v"), "norm_{}", "to_out.0"),
                ("t", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "norm_added_{}",
                 "to_add_out"),
            ):  # fmt: skip
                new = f"double{i}_{s}"
                two(f"{new}_ada", f"{old}.norm1{tail}.linear")
                two(f"{new}_qkv", *(f"{old}.attn.{n}" for n in qkv))
                two(f"{new}_out", f"{old}.attn.{out}")
                two(f"{new}_mlp0", f"{old}.ff{tail}.net.0.proj")
                two(f"{new}_mlp1", f"{old}.ff{tail}.net.2")
                for z in "qk":
                    p[f"{new}_{z}scale"] = w[f"{old}.attn.{norm.format(z)}.weight"]
            old, new = f"single_transformer_blocks.{i}", f"single{i}"
            two(f"{new}_ada", f"{old}.norm.linear")
            two(f"{new}_in", *(f"{old}.attn.to_{z}" for z in "qkv"), f"{old}.proj_mlp")
            two(f"{new}_out", f"{old}.proj_out")
            for z in "qk":
                p[f"{new}_{z}scale"] = w[f"{old}.attn.norm_{z}.weight"]
        two("last_ada", "norm_out.linear")
        two("last", "proj_out")
        self.p = {name: self.r(value) for name, value in p.items()}

    def lin(self, name: str, x: Any) -> Any:
        return self.put(name, self.affine(x, self.p[f"{name}_kernel"], self.p[f"{name}_bias"]))

    def embed(self, name: str, x: Any) -> Any:
        return self.lin(f"{name}_1", self.silu(self.lin(f"{name}_0", x)))

    def turn(self, x: Any, angles: Any) -> Any:
        c, s = np.cos(angles), np.sin(angles)
        a, b = x[..., ::2], x[..., 1::2]
        if self.wrong == "halves":
            half = x.shape[-1] // 2
            a, b = x[..., :half], x[..., half:]
            return self.r(np.concatenate([a * c - b * s, a * s + b * c], -1))
        return self.r(np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape))

    def run(self, given: dict[str, Any]) -> None:
        x = self.put("packed", given["x"], "input")
        positions = np.concatenate([np.zeros((6, 3)), given["positions"]])
        angles = np.concatenate(
            [positions[:, a, None] / 1e4 ** (np.arange(0, d, 2) / d) for a, d in
             enumerate((4, 6, 6))], -1
        ).astype(np.float32)  # fmt: skip
        t, g = (self.waves(self.r(self.r(np.array([n])) * 1000), 256) for n in (0.7, 3.5))
        vec = self.r(self.embed("time", t) + self.embed("guid", g))
        vec = self.silu(self.put("vec", self.r(vec + self.embed("vec", self.r(given["pooled"])))))
        h, e = self.lin("img_in", self.r(x)), self.lin("txt_in", self.r(given["text"]))
        for i in range(2):
            h, e = self.double(i, h, e, vec, angles)
        x = np.concatenate([e, h], 1)
        for i in range(2):
            x = self.single(i, x, vec, angles)
        scale, shift = np.split(self.lin("last_ada", vec)[:, None], 2, -1)
        h = self.r(self.standardize(x[:, 6:], 1e-6) * (1 + scale) + shift)
        self.lin("last", h)

    def double(self, i: int, h: Any, e: Any, vec: Any, angles: Any) -> tuple[Any, Any]:
        made: dict[str, Any] = {}
        for s, x in (("i", h), ("t", e)):
            name = f"double{i}_{s}"
            shift, scale, *rest = np.split(self.lin(f"{name}_ada", vec)[:, None], 6, -1)
            a = self.r(self.standardize(x, 1e-6) * (1 + scale) + shift)
            q, k, v = (heads(z, 2) for z in np.split(self.lin(f"{name}_qkv", a), 3, -1))
            q, k = (
                self.rms(q, self.p[f"{name}_qscale"], 1e-6),
                self.rms(k, self.p[f"{name}_kscale"], 1e-6),
            )
            made[s] = (q, k, v, rest)
        q, k, v = (np.concatenate([made["t"][j], made["i"][j]], 2) for j in range(3))
        y = join(self.attend(self.turn(q, angles), self.turn(k, angles), v))
        result = {}
        for s, x, rows in (("i", h, y[:, 6:]), ("t", e, y[:, :6])):
            name = f"double{i}_{s}"
            gate, shift, scale, gate2 = made[s][3]
            x = self.r(x + self.r(gate * self.lin(f"{name}_out", rows)))
            a = self.r(self.standardize(x, 1e-6) * (1 + scale) + shift)
            u = self.gelu_tanh(self.lin(f"{name}_mlp0", a))
            x = self.r(x + self.r(gate2 * self.lin(f"{name}_mlp1", u)))
            result[s] = self.put(name, x)
        return result["i"], result["t"]

    def single(self, i: int, x: Any, vec: Any, angles: Any) -> Any:
        name = f"single{i}"
        shift, scale, gate = np.split(self.lin(f"{name}_ada", vec)[:, None], 3, -1)
        a = self.r(self.standardize(x, 1e-6) * (1 + scale) + shift)
        wide = self.lin(f"{name}_in", a)
        q, k, v = (heads(z, 2) for z in np.split(wide[..., :96], 3, -1))
        q = self.turn(self.rms(q, self.p[f"{name}_qscale"], 1e-6), angles)
        k = self.turn(self.rms(k, self.p[f"{name}_kscale"], 1e-6), angles)
        y = join(self.attend(q, k, v))
        y = self.lin(f"{name}_out", np.concatenate([y, self.gelu_tanh(wide[..., 96:])], -1))
        return self.put(name, self.r(x + self.r(gate * y)))


Reference = Callable[..., None]
PORTS: dict[str, tuple[Callable[[], Any], Reference, type[Any], Callable[[], Any]]] = {
    "mmdit": (make_mmdit, mmdit_reference, Mmdit, mmdit_inputs),
    "vae": (make_vae, vae_reference, Vae, vae_latents),
    "clip": (make_clip, clip_reference, Clip, clip_ids),
    "flux": (make_flux, flux_reference, Flux, flux_inputs),
}


def record_reference(name: str, folder: Path, dtype: str, keep: tuple[str, ...] = ("*",)) -> Path:
    """Run the reference of a port and leave its trace in `folder`."""
    make, record, _, _ = PORTS[name]
    record(make(), folder, dtype, keep)
    return folder


def record_port(
    name: str,
    folder: Path,
    dtype: str,
    *,
    keep: tuple[str, ...] = ("*",),
    weights: bool = True,
    wrong: str = "",
) -> Path:
    """Run a port and leave its trace in `folder`."""
    make, _, kind, inputs = PORTS[name]
    with start(folder, "port", dtype, keep, None) as recorder:
        port = kind(recorder, dtype, wrong)
        port.load(arrays(make()))
        if weights:
            recorder.writer.add_weights(
                {path: value.astype(port.dtype) for path, value in port.p.items()}
            )
        port.run(inputs())
    return folder
