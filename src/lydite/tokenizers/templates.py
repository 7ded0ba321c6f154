"""The text around a prompt that a language model is given in place of the prompt alone."""

from dataclasses import dataclass

from lydite.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptTemplate:
    """Text before and after a prompt. Features of the first `dropped` tokens are not used."""

    before: str
    after: str
    dropped: int

    def __call__(self, prompt: str) -> str:
        return self.before + prompt + self.after

    def truncated(self, prompt: str, tokenizer: Tokenizer) -> str | None:
        """The end of `prompt` that does not fit and is cut off; None when all of it fits."""
        rest = tokenizer.truncated(self(prompt))
        if rest is None or len(rest) <= len(self.after):
            return None
        return rest.removesuffix(self.after)[-len(prompt) :]


# Reference: diffusers 0.42.1, pipelines/qwenimage/pipeline_qwenimage.py. With the published
# vocabulary `before` is 34 tokens; the pipeline drops 34 with any other.
QWEN_IMAGE = PromptTemplate(
    before=(
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
        "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n"
    ),
    after="<|im_end|>\n<|im_start|>assistant\n",
    dropped=34,
)

# The chat template of Qwen3's tokenizer for one message of the user and the answer to begin:
# ZImagePipeline lets the model think, Flux2KleinPipeline does not.
Z_IMAGE = PromptTemplate(
    before="<|im_start|>user\n", after="<|im_end|>\n<|im_start|>assistant\n", dropped=0
)
FLUX2_KLEIN = PromptTemplate(
    before=Z_IMAGE.before, after=f"{Z_IMAGE.after}<think>\n\n</think>\n\n", dropped=0
)
