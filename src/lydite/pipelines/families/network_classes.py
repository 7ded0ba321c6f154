"""The network classes of all families, by their names in diffusers and transformers.

The modules of a class are imported when it is looked up: a picture of one family needs no other's.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

from lydite.pipelines.model import Kind


def _sd3_transformer() -> Kind:
    from lydite.models.mmdit import MMDiT, MMDiTConfig
    from lydite.weights.maps.mmdit import DIFFUSERS

    return Kind(MMDiTConfig, MMDiT, DIFFUSERS, quantized=True)


def _unet() -> Kind:
    from lydite.models import unet
    from lydite.weights.maps.unet import DIFFUSERS

    return Kind(unet.UNetConfig, unet.UNet, DIFFUSERS, unet.IGNORED, unet.FIXED)


def _flux_transformer() -> Kind:
    from lydite.models import flux
    from lydite.weights.maps.flux import DIFFUSERS

    return Kind(flux.FluxConfig, flux.FluxTransformer, DIFFUSERS, fixed=flux.FIXED, quantized=True)


def _flux2_transformer() -> Kind:
    from lydite.models import flux2

    return Kind(flux2.Flux2Config, flux2.Flux2Transformer, (), fixed=flux2.FIXED, quantized=True)


def _qwen_image_transformer() -> Kind:
    from lydite.models import qwen_image as model

    return Kind(
        model.QwenImageConfig,
        model.QwenImageTransformer,
        (),
        model.IGNORED,
        model.FIXED,
        quantized=True,
    )


def _z_image_transformer() -> Kind:
    from lydite.models import z_image as model

    return Kind(
        model.ZImageConfig, model.ZImageTransformer, (), model.IGNORED, model.FIXED, quantized=True
    )


def _kl_autoencoder() -> Kind:
    from lydite.models.vae import kl
    from lydite.weights.maps.vae import DIFFUSERS

    return Kind(kl.AutoencoderKLConfig, kl.AutoencoderKL, DIFFUSERS, kl.IGNORED, kl.FIXED)


def _flux2_autoencoder() -> Kind:
    from lydite.models.vae import flux2 as model
    from lydite.weights.maps.vae import FLUX2

    return Kind(
        model.AutoencoderKLFlux2Config, model.AutoencoderKLFlux2, FLUX2, model.IGNORED, model.FIXED
    )


def _qwen_image_autoencoder() -> Kind:
    from lydite.models.vae import qwen_image as model
    from lydite.weights.maps.vae import QWEN_IMAGE

    return Kind(
        model.QwenImageVAEConfig,
        model.AutoencoderKLQwenImage,
        QWEN_IMAGE,
        model.IGNORED,
        model.FIXED,
    )


def _clip(*, projection: bool) -> Kind:
    from lydite.models.text import clip
    from lydite.weights.maps.text import CLIP

    build = partial(clip.CLIPTextModel, projection=projection)
    return Kind(clip.CLIPTextConfig, build, CLIP, clip.IGNORED, clip.FIXED)


def _t5() -> Kind:
    from lydite.models.text import t5
    from lydite.weights.maps.text import T5

    return Kind(
        t5.T5Config, t5.T5EncoderModel, T5, t5.IGNORED, t5.FIXED, t5.KEEP_FLOAT32, quantized=True
    )


def _qwen2_5_vl() -> Kind:
    from lydite.models.text import qwen
    from lydite.weights.maps.text import QWEN2_5_VL

    return Kind(
        qwen.QwenConfig,
        qwen.Qwen2_5_VLTextEncoder,
        QWEN2_5_VL,
        qwen.IGNORED,
        qwen.QWEN2_5_VL_FIXED,
        flat=qwen.flat,
        quantized=True,
    )


def _qwen3(*, with_head: bool) -> Kind:
    from lydite.models.text import qwen
    from lydite.weights.maps.text import QWEN3, QWEN3_WITH_HEAD

    return Kind(
        qwen.QwenConfig,
        qwen.Qwen3TextEncoder if with_head else partial(qwen.QwenTextModel, qk_norm=True),
        QWEN3_WITH_HEAD if with_head else QWEN3,
        qwen.IGNORED,
        qwen.QWEN3_FIXED,
        flat=qwen.flat,
        quantized=True,
    )


class NetworkClasses(Mapping[str, Kind]):
    """Each class by its name."""

    def __init__(self, makers: Mapping[str, Callable[[], Kind]]) -> None:
        self._makers = {name: cache(make) for name, make in makers.items()}

    def __getitem__(self, name: str) -> Kind:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


KINDS = NetworkClasses(
    {
        "SD3Transformer2DModel": _sd3_transformer,
        "UNet2DConditionModel": _unet,
        "FluxTransformer2DModel": _flux_transformer,
        "Flux2Transformer2DModel": _flux2_transformer,
        "QwenImageTransformer2DModel": _qwen_image_transformer,
        "ZImageTransformer2DModel": _z_image_transformer,
        "AutoencoderKL": _kl_autoencoder,
        "AutoencoderKLFlux2": _flux2_autoencoder,
        "AutoencoderKLQwenImage": _qwen_image_autoencoder,
        "CLIPTextModel": partial(_clip, projection=False),
        "CLIPTextModelWithProjection": partial(_clip, projection=True),
        "T5EncoderModel": _t5,
        "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
        "Qwen3ForCausalLM": partial(_qwen3, with_head=True),
        "Qwen3Model": partial(_qwen3, with_head=False),
    }
)
