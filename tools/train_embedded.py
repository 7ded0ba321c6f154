"""Make the embedded model from nothing: scenes → VAE → judge → transformer and text encoders → folder.

    PYTHONPATH=src python tools/train_embedded.py --work runs/embedded --stage vae --seconds 230
    ...                                           --stage judge --seconds 100
    ...                                           --stage transformer --seconds 570 --to-fraction 0.5
    ...                                           --stage transformer --seconds 570 --from-fraction 0.5
    ...                                           --stage transformer --round 2 --seconds 570 --to-fraction 0.6
    ...                                           --stage transformer --round 2 --seconds 380 --from-fraction 0.6
    ...                                           --stage evaluate
    ...                                           --stage export --folder embedded-model

Another tiny SD3, with the VAE and the judge of a finished one:

    ...  --work runs/other --stage reuse --folder src/lydite/embedded/model
    ...  --work runs/other --stage transformer --width 256 --depth 4 --scenes 300000 --seconds 360
    ...  --work runs/other --stage export --width 256 --depth 4 --folder other-model

Each stage reads what the earlier ones left in --work, so they can run as separate short calls.
--seconds is the time of the whole call: training takes what its preparation leaves. A second round
starts from the weights of the first, on other scenes with more objects in them. With --tiny
every stage runs on a CPU within seconds and proves nothing but the script. Needs torch, diffusers
and transformers, and one large GPU for the real thing.
"""  # noqa: E501

import argparse
import copy
import json
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from lydite.embedded import captions, scenes
from lydite.embedded.captions import MAX_TOKENS, Prompt
from lydite.evaluate import prompt_accuracy as accuracy

START = time.monotonic()
LOG = logging.getLogger("train_embedded")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32  # of the arithmetic; weights stay in float32

LATENT_CHANNELS = 16
SHIFT = 3.0  # of the schedule, as in SD3
STEPS, GUIDANCE, ZERO_TOKENS = 16, 3.0, 16  # how the finished model is meant to be run
TRAINED_ZERO_TOKENS = 8
CHUNK = 20_000  # scenes per seed
CROWDED = (
    0.18,
    0.41,
    0.41,
)  # of scenes with one, two, three objects, in the rounds after the first


@dataclass(frozen=True)
class Recipe:
    """Every size of the run."""

    scenes: int = 800_000
    captions: int = 4  # per scene
    pictures: int = 300_000  # of the scenes, for VAE and judge
    rebuilt: int = 60_000  # pictures the judge sees as the VAE gives them back
    vae_channels: tuple[int, ...] = (32, 64, 64, 64)
    width: int = 192
    head: int = 64
    depth: int = 6
    joint: int = 256
    clip_widths: tuple[int, int] = (64, 128)
    clip_head: int = 32
    vae_batch: int = 64
    judge_batch: int = 256
    batch: int = 512
    warm_up: int = 500
    probe: int = 512  # prompts
    held_out: int = 1536
    bare: int = 512
    workers: int = 14


TINY = Recipe(
    scenes=128,
    pictures=64,
    rebuilt=16,
    vae_channels=(8, 8, 8, 8),
    width=64,
    depth=2,
    joint=64,
    clip_widths=(32, 32),
    vae_batch=2,
    judge_batch=4,
    batch=4,
    warm_up=5,
    probe=4,
    held_out=8,
    bare=4,
    workers=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--seconds", type=float, default=570, help="of the whole call")
    parser.add_argument("--round", type=int, default=1, help="of the transformer's training")
    parser.add_argument("--from-fraction", type=float, default=0.0, help="> 0 resumes")
    parser.add_argument("--to-fraction", type=float, default=1.0, help="of the schedule")
    parser.add_argument("--folder", type=Path, help="where `export` writes the model, and `reuse` "
                        "reads one")  # fmt: skip
    for size in ("width", "depth", "scenes"):
        parser.add_argument(f"--{size}", type=int, help="other than the recipe's")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    start_log(args.work / "train.log")
    torch.manual_seed(round(1000 * (args.round - 1 + args.from_fraction)))
    torch.backends.cudnn.benchmark = True
    allow_tf32(True)
    LOG.info("stage %s: %s", args.stage, " ".join(sys.argv[1:]))
    sizes = {key: getattr(args, key) for key in ("width", "depth", "scenes") if getattr(args, key)}
    STAGES[args.stage](args, replace(TINY if args.tiny else Recipe(), **sizes))
    device = torch.cuda.get_device_name() if CUDA else "a CPU"
    LOG.info("stage %s done, torch %s on %s", args.stage, torch.__version__, device)


# --- data -----------------------------------------------------------------------------------------


def sample_chunks(n: int, lap: int = 1) -> Iterator[scenes.Scenes]:
    """The scenes of a round of training, a seed for every CHUNK of them."""
    for start in range(0, n, CHUNK):
        yield sample_chunk(start // CHUNK, min(CHUNK, n - start), lap)


def sample_chunk(chunk: int, n: int, lap: int) -> scenes.Scenes:
    share = scenes.SHARE if lap == 1 else CROWDED
    return scenes.sample_scenes(n, seed=1000 * lap + chunk, share=share)


def join(parts: Sequence[scenes.Scenes]) -> scenes.Scenes:
    names = scenes.Scenes.__dataclass_fields__
    return scenes.Scenes(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def draw(drawn: scenes.Scenes, batch: int = 4000) -> Tensor:
    """Pictures of scenes on the device: (N, 3, SIDE, SIDE) bytes."""
    shape = (len(drawn), 3, scenes.SIDE, scenes.SIDE)
    pictures = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    for start in range(0, len(drawn), batch):
        part = drawn[start : start + batch].map(lambda array: torch.as_tensor(array).to(DEVICE))
        painted = (scenes.render(part, torch) * 255).round().to(torch.uint8)
        pictures[start : start + batch] = painted.permute(0, 3, 1, 2)
    return pictures


def from_bytes(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def to_bytes(pictures: Tensor) -> Tensor:
    return ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def start_captions(recipe: Recipe, lap: int) -> Callable[[], Tensor]:
    """Write the captions of all scenes in other processes; call the result for their ids."""
    jobs = [(start // CHUNK, min(CHUNK, recipe.scenes - start), recipe.captions, lap)
            for start in range(0, recipe.scenes, CHUNK)]  # fmt: skip
    pool = multiprocessing.get_context("spawn").Pool(recipe.workers)
    waiting = pool.map_async(chunk_captions, jobs, chunksize=1)

    def collect() -> Tensor:
        ids = np.concatenate(waiting.get())
        pool.terminate()
        return torch.from_numpy(ids).to(DEVICE)

    return collect


def chunk_captions(job: tuple[int, int, int, int]) -> Any:
    """Token ids of several captions per scene of a chunk: (n, k, MAX_TOKENS)."""
    chunk, n, k, lap = job
    drawn, rng, vocabulary = sample_chunk(chunk, n, lap), Random(1000 * lap + chunk), Words()
    ids = np.empty((n, k, MAX_TOKENS), np.int16)
    for index in range(n):
        scene = drawn.scene(index)
        for variant in range(k):
            ids[index, variant] = vocabulary.encode(captions.caption(scene, rng).text)
    return ids


class Words:
    """A CLIP vocabulary in which each word of the captions is one token."""

    def __init__(self) -> None:
        self.merges = learn_merges(captions.words())
        letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
        letters += [chr(256 + index) for index in range(256 - len(letters))]  # CLIP's bytes
        tokens = letters + [f"{letter}</w>" for letter in letters]
        tokens += ["".join(pair) for pair in self.merges]
        tokens += ["<|startoftext|>", "<|endoftext|>"]  # CLIP takes the highest id for the end
        self.ids = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
        self.start, self.end = self.ids[tokens[-2]], self.ids[tokens[-1]]

    def encode(self, text: str) -> list[int]:
        ids = [self.ids[f"{word}</w>"] for word in captions.split(text)]
        if len(ids) > MAX_TOKENS - 2:
            raise ValueError(f"more than {MAX_TOKENS} tokens: {text}")
        return [self.start, *ids] + [self.end] * (MAX_TOKENS - 1 - len(ids))


def learn_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent pair first, until every word is whole."""
    split = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for parts in split:
            for pair in pairwise(parts):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return merges
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for parts in split:
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1


# --- one step, many steps -------------------------------------------------------------------------


class TrainingStep:
    """Loss, gradients, clipping, AdamW and a moving average: on a GPU one captured CUDA graph.

    A step is a thousand small kernels; launched one by one they would take three times as long.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        loss: Callable[[], Tensor],
        *,
        rate: float,
        decay: float,
        average: float,
    ) -> None:
        self.count = 0
        self._modules, self._loss, self._peak, self._keep = modules, loss, rate, average
        self.parameters = [p for module in modules for p in module.parameters()]
        self.average = [p.detach().clone() for p in self.parameters]
        self._recent_loss = torch.zeros((), device=DEVICE)
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=torch.zeros((), device=DEVICE),
            betas=(0.9, 0.99),
            fused=CUDA or None,
            capturable=CUDA,
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prepare()

    def __call__(self, rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"].fill_(rate * self._peak)  # in place: the graph reads it
        if self._graph is None:
            self._adam.zero_grad(set_to_none=True)
            self._body()
        else:
            self._graph.replay()
        self.count += 1

    @property
    def loss(self) -> float:
        return self._recent_loss.item() / (1 - 0.99 ** max(1, self.count))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in place of the trained ones."""
        kept = [p.detach().clone() for p in self.parameters]
        _copy(self.average, self.parameters)
        yield
        _copy(kept, self.parameters)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "tensors": self._tensors()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave; in place, for the graph holds on to its tensors."""
        _copy(state["tensors"], self._tensors())
        self.count = state["count"]

    def _tensors(self) -> list[Tensor]:
        return [*(p.detach() for p in self.parameters), *self.average, *self._moments()]

    def _moments(self) -> list[Tensor]:
        states = [self._adam.state[p] for p in self.parameters]
        names = ("step", "exp_avg", "exp_avg_sq")
        return [*(state[name] for state in states for name in names), self._recent_loss]

    def _body(self) -> None:
        loss = self._loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._adam.step()
        with torch.no_grad():
            self._recent_loss.lerp_(loss.detach(), 0.01)
            now = [p.detach() for p in self.parameters]
            torch._foreach_lerp_(self.average, now, 1 - self._keep)

    def _prepare(self) -> None:
        """Compile, tune and capture with a rate of zero, then forget what these steps left."""
        fresh = [copy.deepcopy(module.state_dict()) for module in self._modules]
        stream = torch.cuda.Stream() if CUDA else None
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a no-op without a GPU
            for _ in range(4 if CUDA else 1):
                self._adam.zero_grad(set_to_none=True)
                self._body()
        if stream:
            torch.cuda.current_stream().wait_stream(stream)
            synchronize()
            self._adam.zero_grad(set_to_none=True)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._body()
            synchronize()
        for module, weights in zip(self._modules, fresh, strict=True):
            module.load_state_dict(weights)
        for moment in self._moments():
            moment.zero_()
        _copy(self.parameters, self.average)


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for old, new in zip(source, target, strict=True):
            new.copy_(old)


def train(
    step: TrainingStep,
    until: float,
    *,
    fractions: tuple[float, float] = (0.0, 1.0),
    warm_up: int,
    probe: Callable[[float], None] = lambda fraction: None,
    probes: int = 0,
) -> None:
    """Take steps until the clock says `until`; the rate follows the fraction of the whole run."""
    begin, first_count, at_once = time.monotonic(), step.count, 25 if CUDA else 1
    logged, probed = 0, 0
    while (passed := (time.monotonic() - begin) / max(until - begin, 1e-3)) < 1:
        fraction = fractions[0] + (fractions[1] - fractions[0]) * passed
        for _ in range(at_once):
            step(min(1.0, (step.count + 1) / warm_up) * decayed(fraction))
        synchronize()
        if passed * 20 >= logged:
            logged += 1
            speed = (time.monotonic() - begin) / (step.count - first_count)
            LOG.info("%4.0f %%  step %6d  loss %.5f  %.2f ms/step",
                     100 * fraction, step.count, step.loss, 1000 * speed)  # fmt: skip
        if passed * (probes + 1) >= probed + 1:
            probed += 1
            with step.averaged():
                probe(fraction)
    LOG.info("trained %d steps in %.1f s", step.count - first_count, time.monotonic() - begin)


def decayed(fraction: float) -> float:
    """Full rate for the first third, then a straight line down to 2 %."""
    return 1.0 if fraction < 0.35 else max(0.02, 1 - (fraction - 0.35) / 0.65)


# --- VAE ------------------------------------------------------------------------------------------


def make_vae(recipe: Recipe) -> AutoencoderKL:
    blocks = len(recipe.vae_channels)
    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
        "block_out_channels": recipe.vae_channels,
    }
    return AutoencoderKL(
        **sizes,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=scenes.SIDE,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).to(DEVICE)  # pyright: ignore[reportArgumentType]


def train_vae(args: argparse.Namespace, recipe: Recipe) -> None:
    """L1, squared error, gradients and a touch of KL: no adversary is needed for flat shapes."""
    pictures = draw(join(list(sample_chunks(recipe.pictures))))
    LOG.info("%d pictures drawn", len(pictures))
    vae = make_vae(recipe)
    encode, decode = compiled(vae.encoder, args), compiled(vae.decoder, args)

    def loss() -> Tensor:
        x = from_bytes(pictures[torch.randint(len(pictures), (recipe.vae_batch,), device=DEVICE)])
        with autocast():
            mean, log_variance = encode(x).float().chunk(2, dim=1)
            log_variance = log_variance.clamp(-20, 10)
            latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            error = decode(latent).float() - x
        across, down = error.diff(dim=-1).abs().mean(), error.diff(dim=-2).abs().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return error.abs().mean() + error.square().mean() + 0.5 * (across + down) + 5e-5 * kl

    step = TrainingStep([vae], loss, rate=1e-3, decay=1e-4, average=0.998)
    LOG.info("VAE: %d parameters, ready to train", sum(p.numel() for p in vae.parameters()))
    train(step, START + args.seconds - 20, warm_up=min(200, recipe.warm_up))
    _copy(step.average, step.parameters)
    vae.requires_grad_(False)
    level_channels(vae, pictures[:CHUNK])
    latents = encode_pictures(vae, pictures[:CHUNK]).float()
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    save_half({"": vae}, args.work / "vae.safetensors")
    record(args, "vae", {"shift_factor": shift, "scaling_factor": scale})

    vae = load_vae(args, recipe)
    unseen = draw(scenes.sample_scenes(min(2048, recipe.pictures), seed=77))
    psnr = torch.cat([reconstruction_psnr(vae, part) for part in unseen.split(256)])
    report = {"psnr": psnr.mean().item(), "psnr_5_percent": psnr.quantile(0.05).item()}
    record(args, "vae", {"shift_factor": shift, "scaling_factor": scale, "steps": step.count,
                         **report})  # fmt: skip
    LOG.info("VAE: %s", report)


def level_channels(vae: AutoencoderKL, pictures: Tensor) -> None:
    """Give every latent channel a spread of 1, by scaling the convolutions on both sides of it."""
    spread = encode_pictures(vae, pictures).float().std(dim=(0, 2, 3))
    out, back = vae.encoder.conv_out, vae.decoder.conv_in
    assert out.bias is not None
    out.weight[:LATENT_CHANNELS] /= spread[:, None, None, None]
    out.bias[:LATENT_CHANNELS] /= spread
    out.bias[LATENT_CHANNELS:] -= 2 * spread.log()
    back.weight *= spread[None, :, None, None]


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, pictures: Tensor, batch: int = 1000) -> Tensor:
    """Means of the latents, not yet shifted and scaled: bfloat16."""
    parts: list[Tensor] = []
    for part in pictures.split(batch):
        with autocast():
            parts.append(vae.encoder(from_bytes(part))[:, :LATENT_CHANNELS].to(torch.bfloat16))
    return torch.cat(parts)


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Decibels per picture, in float32 throughout."""
    allow_tf32(False)
    x = from_bytes(pictures)
    y = vae.decoder(vae.encoder(x)[:, :LATENT_CHANNELS]).clamp(-1, 1)
    allow_tf32(True)
    return -10 * ((y - x) / 2).square().mean(dim=(1, 2, 3)).log10()


def load_vae(args: argparse.Namespace, recipe: Recipe) -> AutoencoderKL:
    vae = make_vae(recipe).requires_grad_(False).eval()
    load_half({"": vae}, args.work / "vae.safetensors")
    known = read_record(args)["vae"]
    vae.register_to_config(**{key: known[key] for key in ("shift_factor", "scaling_factor")})
    return vae


def reuse(args: argparse.Namespace, recipe: Recipe) -> None:
    """Take the VAE and the judge of a finished model."""
    known = AutoencoderKL.from_pretrained(args.folder / "vae")
    save_half({"": known}, args.work / "vae.safetensors")
    scale = {key: known.config[key] for key in ("shift_factor", "scaling_factor")}
    record(args, "vae", scale)
    save_file(load_file(args.folder / "judge.safetensors"), args.work / "judge.safetensors")


# --- judge ----------------------------------------------------------------------------------------


class Judge(nn.Module):
    """The network of lydite.evaluate.judge, with normalization that `folded` removes."""

    def __init__(self, normalized: bool = True) -> None:
        super().__init__()
        width = accuracy.WIDTH

        def layer(before: int, after: int, stride: int) -> Any:
            if not normalized:
                return nn.Conv2d(before, after, 3, stride, 1)
            conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(after, eps=1e-5))

        self.stem = nn.ModuleList(layer(*sizes) for sizes in accuracy.STEM)
        self.body = nn.ModuleList(layer(width, width, 1) for _ in range(accuracy.DEPTH))
        self.head = nn.Conv2d(width, accuracy.ANSWERS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.stem:
            x = F.silu(layer(x))
        for layer in self.body:
            x = x + F.silu(layer(x))
        return self.head(x), x.mean(dim=(2, 3))

    @torch.no_grad()
    def folded(self) -> "Judge":
        """The same function with each normalization made part of its convolution."""
        plain = Judge(normalized=False).to(DEVICE).eval()
        plain.head.load_state_dict(self.head.state_dict())
        ours: list[Any] = [*self.stem, *self.body]
        theirs: list[Any] = [*plain.stem, *plain.body]
        for (conv, norm), folded in zip(ours, theirs, strict=True):
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            folded.weight.copy_(conv.weight * scale[:, None, None, None])
            folded.bias.copy_(norm.bias - norm.running_mean * scale)
        return plain


def train_judge(args: argparse.Namespace, recipe: Recipe) -> None:
    """Half the pictures as drawn, half as the VAE gives them back from disturbed latents."""
    vae = load_vae(args, recipe)
    drawn = join(list(sample_chunks(recipe.pictures)))
    pictures = draw(drawn)
    rebuilt = torch.cat([rebuild(vae, part) for part in pictures[: recipe.rebuilt].split(500)])
    LOG.info("%d pictures drawn, %d rebuilt", len(pictures), len(rebuilt))
    truth = drawn.map(lambda array: torch.as_tensor(array).to(DEVICE))
    judge, half = Judge().to(DEVICE), recipe.judge_batch // 2
    assert judge.head.bias is not None
    judge.head.bias.data[accuracy.PRESENT] = -4.0  # most cells are empty

    def loss() -> Tensor:
        first = torch.randint(len(pictures), (half,), device=DEVICE)
        second = torch.randint(len(rebuilt), (half,), device=DEVICE)
        x = from_bytes(torch.cat([pictures[first], rebuilt[second]]))
        x = x + 0.06 * torch.rand(len(x), 1, 1, 1, device=DEVICE) * torch.randn_like(x)
        with autocast():
            answers, _ = judge(x)
        chosen = torch.cat([first, second])
        return judge_loss(answers.float(), truth.map(lambda array: array[chosen]))

    step = TrainingStep([judge], loss, rate=2e-3, decay=1e-3, average=0.0)
    LOG.info("judge: %d parameters, ready", sum(p.numel() for p in judge.parameters()))
    train(step, START + args.seconds - 25, warm_up=min(100, recipe.warm_up))
    save_half({"": judge.eval().folded()}, args.work / "judge.safetensors")

    judge = load_judge(args)
    unseen = scenes.sample_scenes(min(4096, recipe.pictures), seed=4242)
    says = [unseen.scene(index) for index in range(len(unseen))]
    shown = draw(unseen)
    through_vae = torch.cat([rebuild(vae, part, noise=0.0) for part in shown.split(500)])
    results = {
        "drawn": asdict(accuracy.score(look(judge, shown), says)),
        "through the VAE": asdict(accuracy.score(look(judge, through_vae), says)),
    }
    record(args, "judge", {"steps": step.count, **results})
    LOG.info("judge: %s", json.dumps(results))


def judge_loss(answers: Tensor, truth: scenes.Scenes) -> Tensor:
    """Focal loss on where objects are; what they are, at the cells of their centres only."""
    cells = answers.shape[-1]
    flat = answers.flatten(2)  # (B, ANSWERS, cells²)
    present = torch.zeros(len(flat), cells * cells, device=DEVICE)
    total = torch.zeros((), device=DEVICE)
    for slot in range(scenes.MOST_OBJECTS):
        there = (truth.count > slot).float()
        x, y = truth.x[:, slot] / accuracy.STRIDE, truth.y[:, slot] / accuracy.STRIDE
        column, row = (each.long().clamp(0, cells - 1) for each in (x, y))
        cell = (row * cells + column)[:, None]
        present.scatter_reduce_(1, cell, there[:, None], "amax")
        at = flat.gather(2, cell[:, None].expand(-1, flat.shape[1], 1))[..., 0]  # (B, ANSWERS)
        place = torch.stack([x - column - 0.5, y - row - 0.5], dim=1)
        size = truth.radius[:, slot] / accuracy.RADIUS_UNIT
        each = F.cross_entropy(at[:, accuracy.SHAPE], truth.shape[:, slot], reduction="none")
        each = each + F.cross_entropy(at[:, accuracy.COLOR], truth.color[:, slot], reduction="none")
        each = each + (at[:, accuracy.OFFSET] - place).abs().sum(dim=1)
        each = each + (at[:, accuracy.RADIUS] - size).abs()
        total = total + (each * there).mean()
    missed = F.binary_cross_entropy_with_logits(
        flat[:, accuracy.PRESENT], present, reduction="none"
    )
    return total + 0.5 * (missed * (1 - torch.exp(-missed)) ** 2).sum(dim=1).mean()


@torch.no_grad()
def rebuild(vae: AutoencoderKL, pictures: Tensor, noise: float = 0.25) -> Tensor:
    """Pictures through the VAE, with up to `noise` of a latent's spread added on the way."""
    with autocast():
        latents = vae.encoder(from_bytes(pictures))[:, :LATENT_CHANNELS].float()
        amount = noise * torch.rand(len(latents), 1, 1, 1, device=DEVICE)
        return to_bytes(vae.decoder(latents + amount * torch.randn_like(latents)))


def load_judge(args: argparse.Namespace) -> Judge:
    judge = Judge(normalized=False).to(DEVICE).requires_grad_(False).eval()
    load_half({"": judge}, args.work / "judge.safetensors")
    return judge


@torch.no_grad()
def look(judge: Judge, pictures: Tensor) -> list[accuracy.Reading]:
    """Read pictures (N, 3, SIDE, SIDE) given as bytes."""
    answers = torch.cat([judge(from_bytes(part))[0] for part in pictures.split(256)])
    shown = pictures.permute(0, 2, 3, 1).cpu().numpy()
    return accuracy.read(answers.permute(0, 2, 3, 1).float().cpu().numpy(), shown)


# --- transformer and text encoders ----------------------------------------------------------------


def make_transformer(recipe: Recipe) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        sample_size=scenes.SIDE // 8,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=recipe.depth,
        attention_head_dim=recipe.head,
        num_attention_heads=recipe.width // recipe.head,
        caption_projection_dim=recipe.width,
        joint_attention_dim=recipe.joint,
        pooled_projection_dim=sum(recipe.clip_widths),
        pos_embed_max_size=12,
        qk_norm="rms_norm",
    ).to(DEVICE)  # pyright: ignore[reportArgumentType]
    zeroed = ("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                module.bias.zero_()
                if name.endswith(zeroed):  # blocks start as the identity; diffusers leaves this out
                    nn.init.zeros_(module.weight)
        patch = model.pos_embed.proj
        nn.init.xavier_uniform_(patch.weight.view(len(patch.weight), -1))
        nn.init.constant_(cast(Tensor, patch.bias), 0)
        model.context_embedder.weight[:, sum(recipe.clip_widths) :] = 0  # always fed zeros
    return model


def make_text_encoders(recipe: Recipe) -> list[CLIPTextModelWithProjection]:
    words = Words()
    return [
        CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(words.ids),
                hidden_size=width,
                intermediate_size=4 * width,
                projection_dim=width,
                num_hidden_layers=2,
                num_attention_heads=width // recipe.clip_head,
                max_position_embeddings=MAX_TOKENS,
                hidden_act=activation,
                bos_token_id=words.start,
                eos_token_id=words.end,
                pad_token_id=pad,
            )
        ).to(DEVICE)  # pyright: ignore[reportArgumentType]
        for width, activation, pad in zip(
            recipe.clip_widths, ("quick_gelu", "gelu"), (words.end, 0), strict=True
        )
    ]


Weights = dict[str, Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def project(x: Tensor, w: Weights, *names: str) -> Tensor:
    """One product for several layers with the same input."""
    if len(names) == 1:
        return linear(x, w[f"{names[0]}.weight"], w[f"{names[0]}.bias"])
    weight = torch.cat([w[f"{name}.weight"] for name in names])
    return linear(x, weight, torch.cat([w[f"{name}.bias"] for name in names]))


def normalize(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def joint_block(
    w: Weights, x: Tensor, text: Tensor, time: Tensor, bias: Tensor, heads: int, last: bool
) -> tuple[Tensor, Tensor]:
    """diffusers' JointTransformerBlock as a function of its weights, so that it compiles once.

    `time` is silu of the embedding; `bias` is added to the logits of every key.
    """
    B, L, _ = x.shape
    shift, scale, gate, ff_shift, ff_scale, ff_gate = project(time, w, "norm1.linear")[
        :, None
    ].chunk(6, -1)
    text_mods = project(time, w, "norm1_context.linear")[:, None].chunk(2 if last else 6, -1)
    text_scale, text_shift = text_mods[:2] if last else (text_mods[1], text_mods[0])

    def split(h: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.reshape(B, -1, heads, each.shape[-1] // heads).transpose(1, 2)
                     for each in h.chunk(3, -1))  # fmt: skip

    def rms(h: Tensor, name: str) -> Tensor:
        wide = h.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * w[f"attn.{name}.weight"]).to(h.dtype)

    h, c = normalize(x) * (1 + scale) + shift, normalize(text) * (1 + text_scale) + text_shift
    q, k, v = split(project(h, w, "attn.to_q", "attn.to_k", "attn.to_v"))
    text_qkv = project(c, w, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
    text_q, text_k, text_v = split(text_qkv)
    q = torch.cat([rms(q, "norm_q"), rms(text_q, "norm_added_q")], 2)
    k = torch.cat([rms(k, "norm_k"), rms(text_k, "norm_added_k")], 2)
    v = torch.cat([v, text_v], 2)
    mask = bias.to(q.dtype).view(1, 1, 1, -1).expand(B, heads, q.shape[2], -1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    x = x + gate * project(o[:, :L], w, "attn.to_out.0")
    h = normalize(x) * (1 + ff_scale) + ff_shift
    h = F.gelu(project(h, w, "ff.net.0.proj"), approximate="tanh")
    x = x + ff_gate * project(h, w, "ff.net.2")
    if last:
        return x, text
    text = text + text_mods[2] * project(o[:, L:], w, "attn.to_add_out")
    c = normalize(text) * (1 + text_mods[4]) + text_mods[3]
    c = F.gelu(project(c, w, "ff_context.net.0.proj"), approximate="tanh")
    return x, text + text_mods[5] * project(c, w, "ff_context.net.2")


def clip_encoder(
    w: Weights, ids: Tensor, heads: int, layers: int, quick: bool, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """CLIPTextModelWithProjection as a function: what SD3 takes of it, hidden_states[-2] and pooled."""  # noqa: E501
    embeddings = "text_model.embeddings"
    x = F.embedding(ids, w[f"{embeddings}.token_embedding.weight"])
    x = (x + w[f"{embeddings}.position_embedding.weight"]).to(dtype)
    hidden = x
    B, _, D = x.shape

    def norm(h: Tensor, name: str) -> Tensor:
        weight, bias = w[f"{name}.weight"].to(dtype), w[f"{name}.bias"].to(dtype)
        return F.layer_norm(h, (D,), weight, bias, 1e-5)

    for index in range(layers):
        at, hidden = f"text_model.encoder.layers.{index}", x
        names = (f"{at}.self_attn.{name}_proj" for name in "qkv")
        qkv = project(norm(x, f"{at}.layer_norm1"), w, *names).chunk(3, -1)
        q, k, v = (each.reshape(B, -1, heads, D // heads).transpose(1, 2) for each in qkv)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + project(o, w, f"{at}.self_attn.out_proj")
        h = project(norm(x, f"{at}.layer_norm2"), w, f"{at}.mlp.fc1")
        h = h * torch.sigmoid(1.702 * h) if quick else F.gelu(h)
        x = x + project(h, w, f"{at}.mlp.fc2")
    pooled = norm(x, "text_model.final_layer_norm")
    pooled = pooled[torch.arange(B, device=ids.device), (ids == end).int().argmax(-1)]
    return hidden, linear(pooled, w["text_projection.weight"], None)


class Velocity:
    """Transformer and text encoders as one function for training, equal to the library's models.

    A pipeline appends hundreds of all-zero T5 tokens. They stay equal to each other in every block,
    so n of them are TRAINED_ZERO_TOKENS of them with log(n / TRAINED_ZERO_TOKENS) on their logits.
    """

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        encoders: Sequence[CLIPTextModelWithProjection],
        args: argparse.Namespace,
        dtype: torch.dtype = DTYPE,
    ) -> None:
        self._transformer, self._encoders, self._dtype = transformer, encoders, dtype
        self._blocks = [dict(block.named_parameters()) for block in transformer.transformer_blocks]
        self._texts = [dict(encoder.named_parameters()) for encoder in encoders]
        self._block, self._clip = compiled(joint_block, args), compiled(clip_encoder, args)

    def __call__(self, x: Tensor, timestep: Tensor, ids: Tensor, log_zeros: Tensor) -> Tensor:
        model, dtype = self._transformer, self._dtype
        context, pooled = self._text(ids)
        tokens = model.pos_embed(x).to(dtype)  # (B, 64, D)
        time = F.silu(model.time_text_embed(timestep, pooled.float())).to(dtype)
        text = linear(context, model.context_embedder.weight, model.context_embedder.bias)
        none = torch.zeros(tokens.shape[1] + MAX_TOKENS, device=x.device)
        bias = torch.cat([none, log_zeros.expand(TRAINED_ZERO_TOKENS)])
        heads = model.config["num_attention_heads"]
        for index, weights in enumerate(self._blocks):
            last = index == len(self._blocks) - 1
            tokens, text = self._block(weights, tokens, text, time, bias, heads, last)
        out = model.norm_out.linear
        scale, shift = linear(time, out.weight, out.bias)[:, None].chunk(2, -1)
        tokens = normalize(tokens) * (1 + scale) + shift
        tokens = linear(tokens, model.proj_out.weight, model.proj_out.bias).float()
        side = x.shape[-1] // 2
        patches = tokens.view(len(x), side, side, 2, 2, LATENT_CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", patches).reshape(x.shape)

    def _text(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden, pooled = [], []
        pairs = zip(self._encoders, self._texts, both_paddings(ids), strict=True)
        for index, (encoder, weights, padded) in enumerate(pairs):
            config = encoder.config
            states, vector = self._clip(
                weights,
                padded,
                config.num_attention_heads,
                config.num_hidden_layers,
                index == 0,
                config.eos_token_id,
                self._dtype,
            )
            hidden.append(states)
            pooled.append(vector)
        return self._pad(torch.cat(hidden, -1)), torch.cat(pooled, -1)

    def _pad(self, hidden: Tensor) -> Tensor:
        wider = self._transformer.config["joint_attention_dim"] - hidden.shape[-1]
        return F.pad(hidden, (0, wider, 0, TRAINED_ZERO_TOKENS))


def both_paddings(ids: Tensor) -> tuple[Tensor, Tensor]:
    """SD3's first tokenizer pads with the end mark, the second with token 0."""
    end = ids[:, -1:]
    return ids, torch.where((ids == end).int().cumsum(-1) > 1, torch.zeros_like(ids), ids)


def check_velocity(recipe: Recipe, args: argparse.Namespace) -> None:
    """The function above against the library's own forward pass, with disturbed weights."""
    allow_tf32(False)
    models = [make_transformer(recipe), *make_text_encoders(recipe)]
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter += 0.03 * torch.randn_like(parameter)
        ids = torch.tensor([Words().encode("a red star"), Words().encode("")], device=DEVICE)
        x = torch.randn(2, LATENT_CHANNELS, scenes.SIDE // 8, scenes.SIDE // 8, device=DEVICE)
        time, zeros = torch.tensor([100.0, 900.0], device=DEVICE), 24
        eager = argparse.Namespace(**{**vars(args), "eager": True})
        log_zeros = torch.tensor(math.log(zeros / TRAINED_ZERO_TOKENS), device=DEVICE)
        ours = Velocity(models[0], models[1:], eager, torch.float32)(x, time, ids, log_zeros)
        context, pooled = encode_ids(models[0], models[1:], ids, zeros)
        theirs = models[0](x, context, pooled, time).sample
    error = ((ours - theirs).norm() / theirs.norm()).item()
    LOG.info("training function against the library: relative error %.1e", error)
    if not error < 1e-4:
        raise RuntimeError("the training function is not the library's model")
    allow_tf32(True)


def train_transformer(args: argparse.Namespace, recipe: Recipe) -> None:
    """Rectified flow on latents, the text encoders trained along with the transformer."""
    collect = start_captions(recipe, args.round)
    check_velocity(recipe, args)
    vae, judge = load_vae(args, recipe), load_judge(args)
    latents = all_latents(args, recipe, vae)
    ids = collect()
    LOG.info("latents %s, captions %s", tuple(latents.shape), tuple(ids.shape))
    torch.manual_seed(1)
    transformer, encoders = make_transformer(recipe), make_text_encoders(recipe)
    if args.round > 1 and args.from_fraction == 0:
        load_weights(args, transformer, encoders)
    torch.manual_seed(1000 * args.round + round(1000 * args.from_fraction))  # new in every call
    velocity = Velocity(transformer, encoders, args)
    empty, B = torch.tensor(Words().encode(""), device=DEVICE), recipe.batch

    def loss() -> Tensor:
        index = torch.randint(len(latents), (B,), device=DEVICE)
        variant = torch.randint(recipe.captions, (B,), device=DEVICE)
        unguided = torch.rand(B, 1, device=DEVICE) < 0.1
        text = torch.where(unguided, empty, ids[index, variant].long())
        x, noise = latents[index].float(), torch.randn(latents[:B].shape, device=DEVICE)
        sigma = sample_sigmas(B)
        mixed = torch.lerp(x, noise, sigma.view(-1, 1, 1, 1))
        predicted = velocity(mixed, 1000 * sigma, text, sample_log_zeros())
        return (predicted - (noise - x)).square().mean()

    modules = [transformer, *encoders]
    rate = 1e-3 if args.round == 1 else 5e-4
    step = TrainingStep(modules, loss, rate=rate, decay=0.03, average=0.9995)
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    LOG.info("parameters %s, ready to train", sizes)
    if args.from_fraction > 0:
        step.restore(torch.load(args.work / "state.pt", map_location=DEVICE))
    prompts = captions.held_out_prompts(recipe.probe, seed=31)

    def probe(fraction: float) -> None:
        noise = make_noise(len(prompts), seed=31)
        pictures = generate(transformer, encoders, vae, prompts, noise)
        result = accuracy.score(look(judge, pictures), [prompt.says for prompt in prompts])
        LOG.info("probe at %.2f: everything %.3f  %s", fraction, result.everything,
                 {name: round(share, 3) for name, share in result.attributes.items()})  # fmt: skip

    fractions = (args.from_fraction, args.to_fraction)
    train(step, START + args.seconds - 25, fractions=fractions, warm_up=recipe.warm_up,
          probe=probe, probes=3)  # fmt: skip
    torch.save(step.state(), args.work / "state.pt")
    with step.averaged():
        probe(args.to_fraction)
        save_half({"": transformer}, args.work / "transformer.safetensors")
        texts = {f"text_encoder_{number}.": each for number, each in enumerate(encoders, 1)}
        save_half(texts, args.work / "text_encoders.safetensors")


def sample_sigmas(n: int) -> Tensor:
    """Mostly noisy: what a picture shows is decided above 0.6, where it is still mostly noise."""
    shifted = torch.sigmoid(1.0 + 1.1 * torch.randn(n, device=DEVICE))
    anywhere = torch.rand(n, device=DEVICE) < 0.15
    return torch.where(anywhere, torch.rand(n, device=DEVICE), shifted)


def sample_log_zeros() -> Tensor:
    """How many zero tokens there seem to be: diffusers' 256 half the time, else 1 to 512."""
    usual = torch.full((), math.log(256.0), device=DEVICE)
    other = torch.rand((), device=DEVICE) * math.log(512.0)
    chosen = torch.where(torch.rand((), device=DEVICE) < 0.5, usual, other)
    return chosen - math.log(TRAINED_ZERO_TOKENS)


def all_latents(args: argparse.Namespace, recipe: Recipe, vae: AutoencoderKL) -> Tensor:
    """Latents of every scene, as the transformer sees them; kept on disk for the next call."""
    path = args.work / f"latents-{args.round}.pt"
    if path.exists():
        return torch.load(path, map_location=DEVICE)
    shift, scale = vae.config["shift_factor"], vae.config["scaling_factor"]
    parts = [
        encode_pictures(vae, draw(chunk)) for chunk in sample_chunks(recipe.scenes, args.round)
    ]
    latents = torch.cat([((part.float() - shift) * scale).to(torch.bfloat16) for part in parts])
    if args.to_fraction < 1:
        torch.save(latents, path)
    return latents


# --- pictures from prompts ------------------------------------------------------------------------


def make_noise(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    side = scenes.SIDE // 8
    return torch.randn(n, LATENT_CHANNELS, side, side, generator=generator).to(DEVICE)


def encode_ids(
    transformer: SD3Transformer2DModel,
    encoders: Sequence[CLIPTextModelWithProjection],
    ids: Tensor,
    zeros: int,
) -> tuple[Tensor, Tensor]:
    """Context and pooled vector as diffusers' pipeline makes them without T5."""
    outputs = [
        encoder(padded, output_hidden_states=True)
        for encoder, padded in zip(encoders, both_paddings(ids), strict=True)
    ]
    hidden = torch.cat([output.hidden_states[-2] for output in outputs], -1)
    wider = transformer.config["joint_attention_dim"] - hidden.shape[-1]
    pooled = torch.cat([output.text_embeds for output in outputs], -1)
    return F.pad(hidden, (0, wider, 0, zeros)), pooled


@torch.no_grad()
def generate(
    transformer: SD3Transformer2DModel,
    encoders: Sequence[CLIPTextModelWithProjection],
    vae: AutoencoderKL,
    prompts: Sequence[Prompt],
    noise: Tensor,
    *,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    zeros: int = ZERO_TOKENS,
) -> Tensor:
    """Pictures (N, 3, SIDE, SIDE) as bytes, by the library's models and schedule."""
    words = Words()
    texts = [words.encode(text) for text in ("", *(prompt.text for prompt in prompts))]
    context, pooled = encode_ids(transformer, encoders, torch.tensor(texts, device=DEVICE), zeros)
    n = len(prompts)
    context = torch.cat([context[:1].expand(n, -1, -1), context[1:]])
    pooled = torch.cat([pooled[:1].expand(n, -1), pooled[1:]])
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(steps, device=DEVICE)
    x = noise
    for now in scheduler.timesteps:
        both = transformer(torch.cat([x, x]), context, pooled, now.expand(2 * n)).sample
        without, with_text = both.chunk(2)
        change = without + guidance * (with_text - without)
        x = scheduler.step(change, now, x, return_dict=False)[0]
    x = x / vae.config["scaling_factor"] + vae.config["shift_factor"]
    return torch.cat([to_bytes(vae.decoder(part)) for part in x.split(256)])


# --- the finished model ---------------------------------------------------------------------------


def load_models(
    args: argparse.Namespace, recipe: Recipe
) -> tuple[SD3Transformer2DModel, list[CLIPTextModelWithProjection]]:
    transformer, encoders = make_transformer(recipe), make_text_encoders(recipe)
    load_weights(args, transformer, encoders)
    for model in (transformer, *encoders):
        model.requires_grad_(False).eval()
    return transformer, encoders


def load_weights(
    args: argparse.Namespace,
    transformer: SD3Transformer2DModel,
    encoders: Sequence[CLIPTextModelWithProjection],
) -> None:
    load_half({"": transformer}, args.work / "transformer.safetensors")
    texts = {f"text_encoder_{number}.": each for number, each in enumerate(encoders, 1)}
    load_half(texts, args.work / "text_encoders.safetensors")


def evaluate(args: argparse.Namespace, recipe: Recipe) -> None:
    """Prompt accuracy of the weights as they are stored, in float32; a first sheet of pictures."""
    allow_tf32(False)
    vae, judge = load_vae(args, recipe), load_judge(args)
    transformer, encoders = load_models(args, recipe)
    held_out = captions.held_out_prompts(recipe.held_out, seed=99991)
    bare = captions.bare_nouns(recipe.bare, seed=99992)
    results: dict[str, Any] = {}

    def measure(name: str, prompts: Sequence[Prompt], **options: Any) -> Tensor:
        noise = make_noise(len(prompts), seed=7)
        parts = [
            generate(transformer, encoders, vae, prompts[at : at + 512], noise[at : at + 512],
                     **options)
            for at in range(0, len(prompts), 512)
        ]  # fmt: skip
        pictures = torch.cat(parts)
        readings, says = look(judge, pictures), [prompt.says for prompt in prompts]
        results[name] = asdict(accuracy.score(readings, says))
        for count in (1, 2, 3):
            chosen = [i for i, scene in enumerate(says) if len(scene.things) == count]
            if chosen and len(chosen) < len(says):
                part = accuracy.score([readings[i] for i in chosen], [says[i] for i in chosen])
                results[f"{name}, {count} objects"] = asdict(part)
        LOG.info("%s: %s", name, json.dumps(results[name]))
        return pictures

    pictures = measure("16 steps", held_out)
    measure("bare nouns", bare)
    if not args.tiny:
        measure("8 steps", held_out, steps=8)
        measure("28 steps", held_out, steps=28)
        measure("guidance 5", held_out, guidance=5.0)
        measure("256 zero tokens", held_out[:512], zeros=256)
    record(args, "accuracy", results)
    first = pictures[:48].permute(0, 2, 3, 1).cpu().numpy()
    np.savez_compressed(args.work / "pictures.npz", pictures=first,
                        texts=[prompt.text for prompt in held_out[:48]])  # fmt: skip


def export(args: argparse.Namespace, recipe: Recipe) -> None:
    """A standard diffusers folder: weights in half precision, a T5 whose output is exactly zero."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    folder: Path = args.folder
    transformer, encoders = load_models(args, recipe)
    words = Words()
    for name, pad in (("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")):
        write_clip_tokenizer(folder / name, words, pad)
    letters = [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *letters]
    tokenizer_3 = T5Tokenizer(vocab=pieces, extra_ids=100)
    tokenizer_3.save_pretrained(folder / "tokenizer_3")
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer_3),
            d_model=recipe.joint,
            d_kv=32,
            num_heads=1,
            d_ff=32,
            num_layers=1,
            feed_forward_proj="gated-gelu",
        )
    )
    nn.init.zeros_(t5.encoder.final_layer_norm.weight)

    parts = {"transformer": transformer, "vae": load_vae(args, recipe)}
    parts |= {"text_encoder": encoders[0], "text_encoder_2": encoders[1], "text_encoder_3": t5}
    for name, model in parts.items():
        model.half().save_pretrained(folder / name)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        path = folder / name / "config.json"  # transformers loads what this says, diffusers float32
        write_json(path, {**json.loads(path.read_text()), "dtype": "float32"})
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(folder / "lydite.json", DEFAULTS)
    save_file(load_file(args.work / "judge.safetensors"), folder / "judge.safetensors")
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    LOG.info("%s: %.2f MB", folder, total / 1e6)
    check_folder(args)


def write_clip_tokenizer(folder: Path, words: Words, pad: str) -> None:
    write_json(folder / "vocab.json", words.ids)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in words.merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    marks = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": MAX_TOKENS, **marks}
    settings |= {"unk_token": "<|endoftext|>", "pad_token": pad}
    write_json(folder / "tokenizer_config.json", settings)


def check_folder(args: argparse.Namespace) -> None:
    """diffusers loads the folder as it is; its tokenizers give the ids of training."""
    from diffusers import StableDiffusion3Pipeline

    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(args.folder)
    words, rng = Words(), Random(5)
    drawn = scenes.sample_scenes(500, seed=5)
    for index in range(len(drawn)):
        text = captions.caption(drawn.scene(index), rng).text
        padded = pipeline.tokenizer(text, padding="max_length").input_ids
        if padded != words.encode(text):
            raise RuntimeError(f"the saved tokenizer reads {text!r} as {padded}")
    generator = torch.Generator().manual_seed(0)
    picture = pipeline("a large red star above a small blue ring", num_inference_steps=STEPS,
                       guidance_scale=GUIDANCE, max_sequence_length=256,
                       generator=generator).images[0]  # fmt: skip
    picture.save(args.work / "sample.png")


# How the model is meant to be run; its T5 is a stub.
DEFAULTS = {"steps": 16, "guidance": 3.0, "text_length": 16, "untrained": ["text_encoder_3"]}
MODEL_INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


# --- files, log, device ---------------------------------------------------------------------------


def save_half(models: Mapping[str, nn.Module], path: Path) -> None:
    """Weights of models, each under its prefix, as float16."""
    save_file(
        {
            prefix + name: value.detach().half().contiguous().clone()
            for prefix, model in models.items()
            for name, value in model.state_dict().items()
        },
        path,
    )


def load_half(models: Mapping[str, nn.Module], path: Path) -> None:
    stored = load_file(path, device=str(DEVICE))
    for prefix, model in models.items():
        weights = {n.removeprefix(prefix): v for n, v in stored.items() if n.startswith(prefix)}
        model.load_state_dict(weights)  # float32 parameters keep their type


def record(args: argparse.Namespace, name: str, facts: dict[str, Any]) -> None:
    """Keep facts of a stage for the later ones and for the reader."""
    write_json(args.work / "results.json", {**read_record(args), name: facts})


def read_record(args: argparse.Namespace) -> dict[str, Any]:
    path = args.work / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def start_log(path: Path) -> None:
    class Clock(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"[{time.monotonic() - START:6.1f}] {record.getMessage()}"

    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(path)):
        handler.setFormatter(Clock())
        LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)


def compiled(function: Any, args: argparse.Namespace) -> Any:
    return torch.compile(function, dynamic=False) if CUDA and not args.eager else function


def autocast() -> torch.autocast:
    # Captured graphs would keep a cached cast of last step's weights.
    return torch.autocast(DEVICE.type, dtype=DTYPE, enabled=CUDA, cache_enabled=False)


def allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


STAGES = {
    "reuse": reuse,
    "vae": train_vae,
    "judge": train_judge,
    "transformer": train_transformer,
    "evaluate": evaluate,
    "export": export,
}

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
