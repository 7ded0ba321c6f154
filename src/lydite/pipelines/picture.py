"""Pictures in files: pixels in and out, and what a file remembers of how it was made."""

import hashlib
import io
import struct
import warnings
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from lydite import __version__
from lydite.core.device import current_device
from lydite.core.errors import FileError, InputError, at, shown
from lydite.core.files import NameTaken, atomic_path, open_regular
from lydite.core.request import FIELDS, Request

Pixels = NDArray[np.uint8]  # (H, W, 3)
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # we write
READ = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP")  # none of them runs another program
# 8192×8192, more than any model takes. A side of millions costs far more memory than its pixels.
MOST_PIXELS, LONGEST_SIDE = 2**26, 2**16  # checked before they are decoded
UNREADABLE = (  # what Pillow raises for damaged files
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def check_format(path: Path, folder: str = "") -> str:
    """The format that the ending of a name means, or InputError; `folder` names another way."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            f"{shown(str(path))}: pictures are PNG, JPEG or WebP; end the name in "
            f"{', '.join(FORMATS)}{folder}."
        )
    return FORMATS[path.suffix.lower()]


@contextmanager
def opened_image(path: Path, formats: tuple[str, ...] = READ) -> Generator[Image.Image]:
    """An image file of one of these formats, not decoded yet; FileError for anything else.

    Pillow goes by the content of a file, and would start other programs for some formats. Whatever
    it raises or warns of in the block is an error of the file.
    """
    with open_regular(path) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd EXIF data
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(file, formats=formats) as image:
                    if image.width * image.height > MOST_PIXELS or max(image.size) > LONGEST_SIDE:
                        raise ValueError(f"{image.width}×{image.height} pixels are too many")
                    yield image
        except UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, UnidentifiedImageError):
                reason = f"expected {', '.join(dict.fromkeys(formats))}"
            raise FileError(f"{at(path)}: cannot be read as an image ({reason:.200}).") from error


def read_pixels(path: Path, formats: tuple[str, ...] = READ) -> Pixels:
    """An image file as (H, W, 3), turned as its EXIF says; transparency is dropped."""
    with opened_image(path, formats) as opened:
        return to_rgb(opened)


def describe_file(path: Path) -> tuple[tuple[int, int], bool]:
    """Width and height as `read_pixels` gives them, and whether a pixel is transparent."""
    with opened_image(path) as opened:
        image = ImageOps.exif_transpose(opened)
        transparent = False
        if image.has_transparency_data:
            transparent = np.asarray(image.convert("RGBA"))[:, :, 3].min() < 255
        return image.size, bool(transparent)


def to_rgb(image: Image.Image) -> Pixels:
    """(H, W, 3), turned as the EXIF data says; transparency is dropped. ValueError."""
    return np.asarray(_in_bytes(image).convert("RGB"))


def to_grey(image: Image.Image) -> NDArray[np.uint8]:
    """The brightness, (H, W), turned as the EXIF data says. ValueError."""
    return np.asarray(_in_bytes(image).convert("L"))


def _in_bytes(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":  # Pillow would clip: of values from 0 to 1 a black picture
        raise ValueError("its pixels are floats; expected 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
        values = np.asarray(image)
        image = Image.fromarray((values // 257).clip(0, 255).astype(np.uint8))
    return image


def given_image(image: object, name: str) -> Image.Image | Pixels:
    """What a caller passed as `name`: a Pillow image, or bytes that Pillow can take; InputError."""
    if isinstance(image, Image.Image):
        return image
    found = type(image).__name__
    if isinstance(image, np.ndarray):
        array = cast(NDArray[Any], image)
        found = f"an array of {array.dtype}, {list(array.shape)}"
        colours = array.shape[2:] in ((), (3,), (4,))
        if array.dtype == np.uint8 and array.ndim in (2, 3) and colours and array.size:
            return array
        if array.dtype.kind == "f":
            found += ". Of values from 0 to 1 make (255 * a).round().astype('uint8')"
    raise InputError(
        f"{name}: expected a PIL image or an array of uint8, (H, W, 3) from 0 to 255, "
        f"found {found}."
    )


def as_pixels(image: object) -> Pixels:
    """The image of an img2img run, as the command line reads it from a file; InputError."""
    given = given_image(image, "image")
    if isinstance(given, np.ndarray) and given.shape[2:] == (3,):
        return given
    try:
        return to_rgb(given if isinstance(given, Image.Image) else Image.fromarray(given))
    except ValueError as error:
        raise InputError(f"image: {error}.") from error


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    """Lanczos, as diffusers resizes the input of img2img."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def to_png(pixels: NDArray[np.uint8]) -> bytes:
    """The bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def pixel_hash(pixels: NDArray[np.uint8]) -> str:
    """A hash of the pixels themselves, whatever file they came from."""
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()


def save_pixels(path: Path, pixels: Pixels | Image.Image, *, replace: bool = True) -> None:
    """Write a picture without metadata."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    with atomic_path(path, replace=replace) as temporary:
        image.save(temporary, format=check_format(path), optimize=True)


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


USER_COMMENT, MAKER_NOTE = 0x9286, 0x927C  # EXIF tags: A1111's text, and ours


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A request, its seed and its model. The same record on the same machine, the same bytes."""

    request: Request
    seed: int
    model: str  # as the user named it; of an absolute path the last part
    model_hash: str
    dtype: str
    bits: int | None = None  # of weights that were rounded when the model was loaded
    tile: int | None = None  # pixels of a side, where the VAE decoded in tiles
    components: str | None = None
    refiner: str | None = None  # the model of the last steps
    loras: tuple[tuple[str, float], ...] = ()  # files and their weights
    embeddings: tuple[tuple[str, str], ...] = ()  # files of textual inversion and their words
    image: str | None = None  # img2img
    image_hash: str | None = None
    mask: str | None = None  # inpainting
    mask_hash: str | None = None
    version: str = __version__
    mlx: str = msgspec.field(default_factory=lambda: version("mlx"))
    device: str = msgspec.field(default_factory=lambda: current_device().describe())

    def to_json(self) -> str:
        """One flat object: the fields of the request and the others side by side."""
        own = {name: getattr(self, name) for name in _OWN}
        return msgspec.json.encode({**self.request.to_dict(), **own}).decode()

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Of this version or an earlier one; msgspec.DecodeError, RecursionError."""
        flat = msgspec.json.decode(text, type=dict[str, Any])
        request = {name: flat.pop(name) for name in FIELDS if name in flat}
        return msgspec.convert({**flat, "request": request}, cls)

    def a1111(self) -> str:
        """The text that A1111 and the tools around it read."""
        request = self.request
        facts = {
            "Steps": request.steps,
            "Sampler": A1111_NAMES.get(request.sampler or "", request.sampler),
            "Schedule type": request.schedule,
            "CFG scale": f"{request.guidance:g}",
            "Seed": self.seed,
            "Size": f"{request.width}x{request.height}",
            "Model hash": self.model_hash[:10],
            "Model": Path(self.model).stem.replace(",", "_"),
        }
        if request.strength is not None:
            facts["Denoising strength"] = f"{request.strength:g}"
        facts["Version"] = f"lydite {self.version}"
        lines = [request.prompt]
        if request.negative:
            lines.append(f"Negative prompt: {request.negative}")
        lines.append(", ".join(f"{name}: {value}" for name, value in facts.items()))
        return "\n".join(lines)


_OWN = tuple(name for name in Record.__struct_fields__ if name != "request")


def write_picture(path: Path, pixels: Pixels, record: Record, *, overwrite: bool) -> None:
    """Write the picture with its record inside; the ending of the name decides the format."""
    encode = _encoder(check_format(path), record)
    with atomic_path(path, replace=overwrite) as temporary:
        encode(Image.fromarray(pixels), temporary)


def _encoder(name: str, record: Record) -> Any:
    if name == "PNG":
        text = PngImagePlugin.PngInfo()
        text.add_itxt("parameters", record.a1111())
        text.add_itxt(KEY, record.to_json())
        return partial(Image.Image.save, format=name, pnginfo=text)
    exif = Image.Exif()
    ifd = exif.get_ifd(0x8769)
    ifd[USER_COMMENT] = b"UNICODE\0" + record.a1111().encode("utf-16-be")
    ifd[MAKER_NOTE] = record.to_json().encode()
    quality = {"quality": 95, "subsampling": 0} if name == "JPEG" else {"lossless": True}
    return partial(Image.Image.save, format=name, exif=exif, **quality)


def read_record(path: Path) -> Record:
    """The record inside a picture made by us."""
    with opened_image(path, tuple(FORMATS.values())) as image:
        if image.format == "PNG":
            image.load()  # text may stand behind the pixels
        text = image.info.get(KEY)
        if text is None:
            note = image.getexif().get_ifd(0x8769).get(MAKER_NOTE)
            text = note.decode(errors="replace") if isinstance(note, bytes) else None
    if not isinstance(text, str):
        raise FileError(f"{at(path)}: has no {KEY!r} metadata, so it cannot be replayed.")
    try:
        return Record.from_json(str(text))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise FileError(f"{at(path)}: its {KEY!r} metadata cannot be read ({error}).") from error


@dataclass(frozen=True, eq=False)
class Picture:
    """One finished image, the seed it came from, and what it was made with."""

    pixels: Pixels
    seed: int
    record: Record

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write PNG, JPEG or WebP by the ending of the name, with the settings inside.

        A file that exists stays, and NameTaken is raised, unless `overwrite` is true.
        """
        try:
            write_picture(Path(path), self.pixels, self.record, overwrite=overwrite)
        except NameTaken as error:
            raise NameTaken(f"{error} Choose another name, or pass overwrite=True.") from error
        return Path(path)
