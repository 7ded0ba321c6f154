"""The text around a prompt that a language model is given in place of the prompt alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lydite.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptTemplate:
    """Text before and after a prompt. Features of the first `dropped` tokens are not used."""

    before: str
    after: str
    dropped: int

    def __call__(self, prompt: str) -> str:
        return self.before + prompt + self.after

    def truncated(self, prompt: str, tokenizer: Tokenizer, length: int | None = None) -> str | None:
        """The end of `prompt` that does not fit and is cut off; None when all of it fits.

        `length` is a limit lower than the tokenizer's, for prompt and template together.
        """
        rest = tokenizer.truncated(self(prompt), length)
        if rest is None or len(rest) <= len(self.after):
            return None
        return rest.removesuffix(self.after)[-len(prompt) :]


@dataclass(frozen=True)
class TemplateTokenizer:
    """Prompts to the ids of the template around them; features after `max_length` are not used."""

    tokenizer: Tokenizer
    template: PromptTemplate
    max_length: int  # of the tokens that are not dropped

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Ids of the template with `text` in it, without padding."""
        return self.tokenizer(self.template(text))

    def truncated(self, text: str) -> str | None:
        """The end of `text` that is not read; None when all of it is."""
        length = self.template.dropped + self.max_length
        return self.template.truncated(text, self.tokenizer, length)


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
