"""SD3 and FLUX.1 in one file as DiffusionKit has them: denoiser, with SD3 also the autoencoder."""

from functools import partial

from lydite.pipelines.families import flux_single_file, sd3_single_file
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import InferredModel, InferredNetwork
from lydite.weights.maps import diffusionkit as names

FLUX = InferredModel(
    title="FLUX.1 of DiffusionKit",
    networks=(
        InferredNetwork(
            "transformer",
            "model.diffusion_model.",
            "unified_transformer_blocks.",
            partial(flux_single_file.infer_transformer, rules=names.FLUX),
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
)

SD3 = InferredModel(
    title="SD3 of DiffusionKit",
    networks=(
        InferredNetwork(
            "vae",
            "first_stage_model.",
            "decoder.mid_blocks.",
            partial(
                sd3_single_file.infer_vae,
                levels=("encoder.down_blocks", "decoder.up_blocks"),
                rules=names.sd3_vae,
                **sd3_single_file.VAE_SCALE,
            ),
        ),
        InferredNetwork(
            "transformer",
            "model.diffusion_model.",
            "x_pos_embedder.",
            partial(
                sd3_single_file.infer_transformer,
                blocks="multimodal_transformer_blocks",
                rules=names.sd3,
            ),
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
)
