"""What a PNG remembers of how it was made: A1111's text for other tools, one JSON key for us."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from PIL import Image, PngImagePlugin

from lydite import __version__
from lydite.core.errors import FileError
from lydite.pipelines.components import Component
from lydite.pipelines.images import Pixels, open_image

KEY = "lydite"
A1111_NAMES = {
    "euler": "Euler",
    "euler_ancestral": "Euler a",
    "heun": "Heun",
    "lms": "LMS",
    "dpm_2": "DPM2",
    "dpm_2_ancestral": "DPM2 a",
    "dpm_fast": "DPM fast",
    "dpm_adaptive": "DPM adaptive",
    "dpmpp_2m": "DPM++ 2M",
    "dpmpp_sde": "DPM++ SDE",
    "dpmpp_2m_sde": "DPM++ 2M SDE",
    "dpmpp_2m_sde_heun": "DPM++ 2M SDE Heun",
    "dpmpp_2s_ancestral": "DPM++ 2S a",
    "dpmpp_3m_sde": "DPM++ 3M SDE",
    "restart": "Restart",
    "ddim": "DDIM",
    "ddim_cfg_pp": "DDIM CFG++",
    "plms": "PLMS",
    "uni_pc": "UniPC",
    "lcm": "LCM",
}


@dataclass(frozen=True)
class Record:
    """Every setting of one picture. The same record on the same machine gives the same bytes."""

    model: str
    model_hash: str
    prompt: str
    negative: str
    seed: int
    steps: int
    guidance: float
    width: int
    height: int
    schedule: str
    text_length: int
    noise: str
    dtype: str
    components: str | None = None
    image: str | None = None
    image_hash: str | None = None
    strength: float | None = None
    sampler: str = "euler"
    convention: str = "lydite"
    guidance_steps: tuple[float, ...] = ()
    guidance_rescale: float = 0.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    options: dict[str, float] = field(default_factory=dict)
    version: str = __version__
    mlx: str = ""

    def a1111(self) -> str:
        """The text that A1111 and the tools around it read."""
        facts = {
            "Steps": self.steps,
            "Sampler": A1111_NAMES.get(self.sampler, self.sampler),
            "Schedule type": self.schedule,
            "CFG scale": f"{self.guidance:g}",
            "Seed": self.seed,
            "Size": f"{self.width}x{self.height}",
            "Model hash": self.model_hash[:10],
            "Model": Path(self.model).stem.replace(",", "_"),
        }
        if self.strength is not None:
            facts["Denoising strength"] = f"{self.strength:g}"
        facts["Version"] = f"lydite {self.version}"
        lines = [self.prompt]
        if self.negative:
            lines.append(f"Negative prompt: {self.negative}")
        lines.append(", ".join(f"{name}: {value}" for name, value in facts.items()))
        return "\n".join(lines)


def write_png(path: Path, pixels: Pixels, record: Record) -> None:
    """Write the picture with its record inside."""
    text = PngImagePlugin.PngInfo()
    text.add_itxt("parameters", record.a1111())
    text.add_itxt(KEY, msgspec.json.encode(asdict(record)).decode())
    Image.fromarray(pixels).save(path, format="PNG", pnginfo=text)


def read_record(path: Path) -> Record:
    """The record inside a PNG made by us."""
    text = open_image(path).info.get(KEY)
    if not isinstance(text, str):
        raise FileError(f"{path}: has no {KEY!r} metadata, so it cannot be replayed.")
    try:
        return msgspec.json.decode(str(text), type=Record)
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: its {KEY!r} metadata cannot be read ({error}).") from error


def model_hash(components: Mapping[str, Component]) -> str:
    """A fingerprint of all networks: names, shapes, dtypes, and a kilobyte from each tensor."""
    total = hashlib.sha256()
    for name, component in sorted(components.items()):
        with component.scope() as scope:
            for tensor, info in sorted(scope.tensors.items()):
                total.update(f"{name} {tensor} {info.dtype} {info.shape}\n".encode())
                flat = scope.read(tensor).reshape(-1)
                middle = flat.size // 2
                total.update(flat[middle : middle + 1024 // flat.itemsize].tobytes())
    return total.hexdigest()
