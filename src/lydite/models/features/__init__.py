"""Networks whose features metrics compare: Inception, CLIP, and the backbones of LPIPS."""
