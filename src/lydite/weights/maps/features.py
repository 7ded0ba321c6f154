"""Feature networks of metrics: the names of pytorch-fid, torchvision, lpips and transformers."""

from lydite.weights.maps.text import CLIP as CLIP_TEXT
from lydite.weights.rules import CONV1X1_TO_LINEAR, OIHW_TO_OHWI, Convert, Drop, Rename, Rule

INCEPTION: tuple[Rule, ...] = (
    Convert("{p}.conv.weight", OIHW_TO_OHWI),
    Drop("{p}.num_batches_tracked", because="counts training steps"),
    Drop("fc.bias", because="the Inception score takes the logits without it"),
)

# torchvision's AlexNet and VGG16.
LPIPS_BACKBONE: tuple[Rule, ...] = (
    Convert("features.{i}.weight", OIHW_TO_OHWI),
    Drop("classifier.{p}", because="LPIPS compares activations before the classifier"),
)
LPIPS_HEADS: tuple[Rule, ...] = (
    Rename("lin{i}.model.1.weight", "heads.{i}.weight"),
    Convert("heads.{i}.weight", CONV1X1_TO_LINEAR),
)

CLIP: tuple[Rule, ...] = (
    *CLIP_TEXT,
    Drop("vision_model.embeddings.position_ids", because="0, 1, 2, …: known without being stored"),
    Drop("logit_scale", because="scales similarities in training; CLIP score has its own scale"),
    Convert("vision_model.embeddings.patch_embedding.weight", OIHW_TO_OHWI),
)
