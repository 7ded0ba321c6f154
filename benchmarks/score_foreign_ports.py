"""False alarms of `lydite diff` on correct ports that others wrote.

    pip install --no-deps --target packages mlx-lm mlx-embeddings mlx-vlm timm
    PYTHONPATH=packages python benchmarks/score_foreign_ports.py

Each port (MLX or torch, from PyPI) gets the random weights of a small model of transformers, and
both are recorded with Lydite's capture, in four ways: everything, without weights, the outputs of
blocks, the last output. A port in bfloat16 is compared with the float32 reference. A verdict
"diverge" is a false alarm. A package that is not installed is left out. Needs `reference`, an
extra of Lydite.
"""

import argparse
import importlib
import importlib.machinery
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from lydite.diff.compare import compare  # before MLX, for its BLAS

import mlx.core as mx  # isort: skip
import numpy as np
import torch
import transformers as hf
from mlx.utils import tree_flatten

from lydite.trace import mlx_capture, torch_capture
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.writer import Capture

DUMPS = {  # what is recorded of the port, and whether its weights are
    "everything": (("*",), True),
    "without weights": (("*",), False),
    "blocks": (("*.[0-9]:out*", "net:out*"), True),
    "last": (("net:out*",), False),
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
}
TEXT = {**SMALL, "max_position_embeddings": 64}
IDS = np.random.default_rng(0).integers(3, 90, (2, 17))
PICTURE = np.random.default_rng(1).standard_normal((2, 3, 28, 28)).astype(np.float32)


@dataclass(frozen=True)
class Port:
    """A port and its reference: how to build both, and how to call them."""

    package: str  # the module of the port
    reference: Callable[[], torch.nn.Module]
    port: Callable[[Any, dict[str, torch.Tensor]], Any]  # module and state of the reference
    call: Callable[[Any], Any]
    call_reference: Callable[[Any], Any]


def language(name: str, config: str, model: str, **more: Any) -> Port:
    """A language model of mlx-lm."""
    settings = {**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False, **more}

    def build(module: Any, state: dict[str, torch.Tensor]) -> Any:
        kind = getattr(hf, config)(**settings)
        rotary = kind.to_dict().get("rope_parameters") or {}
        arguments = {
            **kind.to_dict(),
            "model_type": name,
            "rope_theta": rotary.get("rope_theta", 10000.0),
        }
        return loaded(module.Model(module.ModelArgs.from_dict(arguments)), state)

    return Port(
        f"mlx_lm.models.{name}",
        lambda: getattr(hf, model)(getattr(hf, config)(**settings)),
        build,
        lambda net: net(mx.array(IDS)),
        lambda net: net(torch.from_numpy(IDS), use_cache=False),
    )


def encoder(name: str, config: str, model: str, *, inner: bool = False, **more: Any) -> Port:
    """A text encoder of mlx-embeddings; `inner`: without the pooling around it."""
    settings = {**TEXT, **more}
    mask = np.ones_like(IDS)

    def build(module: Any, state: dict[str, torch.Tensor]) -> Any:
        kind = getattr(hf, config)(**settings)
        arguments = {**kind.to_dict(), "model_type": name}
        net = module.Model(module.ModelArgs.from_dict(arguments))
        return loaded(net.model if inner else net, state)

    return Port(
        f"mlx_embeddings.models.{name}",
        lambda: getattr(hf, model)(getattr(hf, config)(**settings)),
        build,
        lambda net: net(mx.array(IDS), attention_mask=mx.array(mask)),
        lambda net: net(torch.from_numpy(IDS), attention_mask=torch.from_numpy(mask)),
    )


def vision(name: str, config: str, model: str, kind: str) -> Port:
    """A vision tower of mlx-vlm."""
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    settings = {**sizes, "image_size": 28, "patch_size": 7}
    settings |= {"vision_use_head": False} if "Siglip" in config else {}

    def build(module: Any, state: dict[str, torch.Tensor]) -> Any:
        configs = importlib.import_module(module.__name__.replace(".vision", ".config"))
        eps = getattr(hf, config)(**settings).layer_norm_eps
        known = {key: value for key, value in settings.items() if key != "vision_use_head"}
        made = configs.VisionConfig(model_type=kind, **known, layer_norm_eps=eps)
        state = {
            f"vision_model.{name.removeprefix('vision_model.')}": p for name, p in state.items()
        }
        return loaded(module.VisionModel(made), state)

    return Port(
        f"mlx_vlm.models.{name}.vision",
        lambda: getattr(hf, model)(getattr(hf, config)(**settings)),
        build,
        lambda net: net(mx.array(PICTURE.transpose(0, 2, 3, 1)), output_hidden_states=True),
        lambda net: net(torch.from_numpy(PICTURE).to(net.dtype), output_hidden_states=True),
    )


def vit() -> Port:
    """The vision transformer of timm, with q, k and v in one."""
    sizes: Any = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = hf.ViTConfig(**sizes, image_size=28, patch_size=7, layer_norm_eps=1e-6)

    def build(module: Any, state: dict[str, torch.Tensor]) -> Any:
        net = module.VisionTransformer(
            img_size=28,
            patch_size=7,
            embed_dim=64,
            depth=3,
            num_heads=4,
            mlp_ratio=2,
            num_classes=0,
            global_pool="",
        )
        new: dict[str, torch.Tensor] = {
            "cls_token": state["embeddings.cls_token"],
            "pos_embed": state["embeddings.position_embeddings"],
        }
        for end in ("weight", "bias"):
            new[f"patch_embed.proj.{end}"] = state[f"embeddings.patch_embeddings.projection.{end}"]
            new[f"norm.{end}"] = state[f"layernorm.{end}"]
            for n in range(3):
                layer = next(
                    beginning
                    for beginning in (f"encoder.layer.{n}", f"layers.{n}")
                    if any(name.startswith(beginning) for name in state)
                )

                def own(*names: str, layer: str = layer, end: str = end) -> torch.Tensor:
                    return next(
                        state[f"{layer}.{name}.{end}"]
                        for name in names
                        if f"{layer}.{name}.{end}" in state
                    )

                qkv = [
                    own(f"attention.attention.{a}", f"attention.{a}", f"attention.{b}")
                    for a, b in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
                ]
                block = f"blocks.{n}"
                new[f"{block}.attn.qkv.{end}"] = torch.cat(qkv)
                new[f"{block}.attn.proj.{end}"] = own(
                    "attention.output.dense", "attention.o_proj", "attention.output"
                )
                new[f"{block}.norm1.{end}"] = own("layernorm_before")
                new[f"{block}.norm2.{end}"] = own("layernorm_after")
                new[f"{block}.mlp.fc1.{end}"] = own("intermediate.dense", "mlp.fc1")
                new[f"{block}.mlp.fc2.{end}"] = own("output.dense", "mlp.fc2")
        net.load_state_dict(new)
        return net.eval()

    return Port(
        "timm.models.vision_transformer",
        lambda: hf.ViTModel(config, add_pooling_layer=False),
        build,
        lambda net: net(torch.from_numpy(PICTURE).to(next(net.parameters()).dtype)),
        lambda net: net(torch.from_numpy(PICTURE).to(net.dtype)),
    )


PORTS: dict[str, Callable[[], Port]] = {
    "llama": lambda: language("llama", "LlamaConfig", "LlamaForCausalLM"),
    "qwen2": lambda: language("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": lambda: language("qwen3", "Qwen3Config", "Qwen3ForCausalLM", head_dim=16),
    "gemma2": lambda: language(
        "gemma2", "Gemma2Config", "Gemma2ForCausalLM", head_dim=16, tie_word_embeddings=True
    ),
    "phi3": lambda: language("phi3", "Phi3Config", "Phi3ForCausalLM", pad_token_id=0),
    "starcoder2": lambda: language(  # the port always uses the erf form of GELU
        "starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", hidden_act="gelu"
    ),
    "olmo2": lambda: language("olmo2", "Olmo2Config", "Olmo2ForCausalLM"),
    "bert": lambda: encoder("bert", "BertConfig", "BertModel"),
    "xlm-roberta": lambda: encoder("xlm_roberta", "XLMRobertaConfig", "XLMRobertaModel"),
    "modernbert": lambda: encoder(
        "modernbert",  # the port always uses the tanh form of GELU
        "ModernBertConfig",
        "ModernBertModel",
        inner=True,
        pad_token_id=0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "clip-vision": lambda: vision(
        "llava", "CLIPVisionConfig", "CLIPVisionModel", "clip_vision_model"
    ),
    "siglip-vision": lambda: vision(
        "paligemma", "SiglipVisionConfig", "SiglipVisionModel", "siglip_vision_model"
    ),
    "timm-vit": vit,
}


def loaded(net: Any, state: dict[str, torch.Tensor]) -> Any:
    """An MLX module with the reference's weights, in its own names."""
    weights = {name: mx.array(value.float().numpy()) for name, value in state.items()}
    weights = net.sanitize(weights) if hasattr(net, "sanitize") else weights
    own = {name for name, _ in tree_flatten(net.parameters())}
    if "lm_head.weight" not in own:  # tied to the embedding
        weights.pop("lm_head.weight", None)
    net.load_weights(list(weights.items()))
    net.eval()
    return net


@contextmanager
def recorder(folder: Path, dtype: str, points: tuple[str, ...]) -> Iterator[Recorder]:
    header = Header(dtype=dtype, conditions={"seed": 0})
    with Recorder.start(folder, header=header, capture=Capture(points=points)) as started:
        yield started


def record_torch(
    net: Any, call: Callable[[Any], Any], folder: Path, dtype: str, points: Any, weights: bool
) -> None:
    net = net.to(getattr(torch, dtype))
    with (
        torch.no_grad(),
        recorder(folder, dtype, points) as started,
        torch_capture.record_modules(started, net, scope="net", weights=weights),
    ):
        call(net)


def record_mlx(
    net: Any, call: Callable[[Any], Any], folder: Path, dtype: str, points: Any, weights: bool
) -> None:
    net.set_dtype(getattr(mx, dtype))
    with (
        recorder(folder, dtype, points) as started,
        mlx_capture.record_modules(started, net, scope="net", weights=weights),
    ):
        mx.eval(call(net))


def score(name: str, root: Path) -> Counter[str]:
    """The verdicts on one port."""
    port = PORTS[name]()
    module = importlib.import_module(port.package)
    torch.manual_seed(0)
    reference = port.reference().eval()
    state = dict(reference.state_dict())
    for dtype in ("float32", "float64", "bfloat16"):
        record_torch(reference, port.call_reference, root / dtype, dtype, ("*",), True)
    counts: Counter[str] = Counter()
    for dtype, floor in (("float32", "float64"), ("bfloat16", "bfloat16")):
        for dump, (points, weights) in DUMPS.items():
            net = port.port(module, {key: value.float() for key, value in state.items()})
            record = record_torch if isinstance(net, torch.nn.Module) else record_mlx
            folder = root / f"{dtype}-{dump}"
            record(net, port.call, folder, dtype, points, weights)
            for measured in (True, False):
                with (
                    Trace.open(root / "float32") as theirs,
                    Trace.open(folder) as ours,
                    Trace.open(root / floor) as rounding,
                ):
                    verdict = compare(theirs, ours, floor=rounding if measured else None)
                counts[verdict.verdict] += 1
                if verdict.verdict != "agree":
                    how = "with --floor" if measured else "without --floor"
                    print(f"  {name}, {dtype}, {dump}, {how}: {verdict.sentence[:400]}")
    return counts


def without_torchvision() -> None:
    """Let timm be imported: it needs torchvision for its data loaders only."""
    try:
        importlib.import_module("torchvision")
    except Exception:  # noqa: BLE001 - not installed, or built for another torch
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".models",
                     ".models.feature_extraction", ".datasets", ".datasets.utils"):  # fmt: skip
            stub: Any = MagicMock()
            stub.__path__, stub.__spec__ = [], importlib.machinery.ModuleSpec("torchvision", None)
            sys.modules[f"torchvision{name}"] = stub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="names of ports, with commas")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for name in options.only.split(",") if options.only else PORTS:
        if name.startswith("timm"):
            without_torchvision()
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts = score(name, Path(folder))
            except ImportError as error:
                print(f"{name}: left out ({error})")
                continue
        total += counts
        print(f"{name}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    print("together: " + ", ".join(f"{n} {verdict}" for verdict, n in total.items()))


if __name__ == "__main__":
    main()
