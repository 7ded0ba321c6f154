"""Tokens, text features and pixels: classes F of docs/bug-classes.md."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.models.text.clip import CLIPTextOutput, CLIPTextTransformer
from lydite.pipelines.family import Conditioning, Run
from lydite.pipelines.pipeline import Pipeline
from lydite.tokenizers.tokenizer import Tokenizer
from seeded_bugs.bugs.weights import CLIP
from seeded_bugs.cases import Apply, Bug, inputs, outputs
from seeded_bugs.patches import attribute, forward
from seeded_bugs.tiny_model import REQUEST

IDS = outputs("pipeline/token_ids")
TEXT, POOLED = outputs("pipeline/prompt_embeds"), outputs("pipeline/pooled")
Ids = NDArray[np.int32]


def tokens(change: Callable[[Ids, int], Ids]) -> Apply:
    """CLIP's ids as change(ids, end mark) has them; T5's stay."""

    def patched(original: Any) -> Any:
        def call(self: Any, text: str) -> Ids:
            ids = original(self, text)
            end = self.vocab_size - 1
            return change(ids, end).astype(np.int32) if end in ids else ids

        return call

    return attribute(Tokenizer, "__call__", patched)


def zero_padded(ids: Ids, end: int) -> Ids:
    after = np.arange(len(ids)) > int(np.argmax(ids == end))
    return np.where(after, 0, ids)


def without_start(ids: Ids, end: int) -> Ids:
    return np.append(ids[1:], ids[-1])


def without_end(ids: Ids, end: int) -> Ids:
    """The words cut off before the end mark; the last place keeps one, or nothing pools."""
    first = int(np.argmax(ids == end))
    return np.concatenate([ids[:first], np.zeros(len(ids) - first - 1, np.int32), [end]])


def other_vocabulary(ids: Ids, end: int) -> Ids:
    """Two letters have each other's id."""
    one, other = int(ids[1]), int(ids[1]) + 1
    return np.where(ids == one, other, np.where(ids == other, one, ids))


def conditioned(change: Callable[[Conditioning], Conditioning]) -> Apply:
    """Text features put together in another way."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        family = pipeline.family
        pipeline.family = replace(family, encode=lambda *args: change(family.encode(*args)))
        try:
            yield
        finally:
            pipeline.family = family

    return apply


def clips_exchanged(made: Conditioning, first: int = 24, second: int = 32) -> Conditioning:
    x = made["text"]
    left, right, rest = mx.split(x, [first, first + second], axis=-1)
    exchanged = mx.concatenate([right, left, rest], axis=-1)
    return {**made, "text": mx.concatenate([exchanged[:, :77], x[:, 77:]], axis=1)}


@contextmanager
def stale(pipeline: Pipeline) -> Generator[None]:
    """The features of the picture before are used again."""
    before = pipeline.encode(pipeline.plan(REQUEST.replace(prompt="a blue ring")))
    with conditioned(lambda made: before)(pipeline):
        yield


def hidden(choice: Callable[[CLIPTextOutput], mx.array]) -> Apply:
    return attribute(CLIPTextOutput, "penultimate", lambda original: property(choice))


def pooled_at(position: Any) -> Apply:
    return attribute(CLIPTextTransformer, "eos", lambda original: position)


def pooled_unnormed(self: Any, original: Any, ids: mx.array) -> CLIPTextOutput:
    made = original(ids)
    return made._replace(pooled=made.hidden_states[-1][mx.arange(ids.shape[0]), self.eos(ids)])


def unprojected(self: Any, original: Any, ids: mx.array) -> CLIPTextOutput:
    return self.text_model(ids)


BUGS = (
    Bug(
        id="pad-zero",
        cause="pad_token",
        bug_class="F60",
        site=IDS,
        apply=tokens(zero_padded),
        fix="CLIP-L pads with its end mark, CLIP-G with 0.",
    ),
    Bug(
        id="start-mark-missing",
        cause="special_tokens",
        bug_class="F59",
        site=IDS,
        apply=tokens(without_start),
        fix="CLIP's ids begin with the start mark.",
    ),
    Bug(
        id="end-mark-late",
        cause="special_tokens",
        bug_class="F59",
        site=IDS,
        apply=tokens(without_end),
        fix="The end mark follows the last word.",
        held_out=True,
    ),
    Bug(
        id="vocabulary-rebuilt",
        cause="vocabulary_order",
        bug_class="F59",
        site=IDS,
        apply=tokens(other_vocabulary),
        fix="Read the ids from vocab.json.",
    ),
    Bug(
        id="last-for-penultimate",
        cause="hidden_layer",
        bug_class="F61",
        site=TEXT,
        apply=hidden(lambda made: made.hidden_states[-1]),
        fix="SD3 takes the last layer's input, hidden_states[-2].",
    ),
    Bug(
        id="final-norm-applied",
        cause="final_norm",
        bug_class="F61",
        site=TEXT,
        apply=hidden(lambda made: made.last),
        fix="SD3 takes hidden_states[-2], without the final norm.",
    ),
    Bug(
        id="clip-skip-off-by-one",
        cause="hidden_layer",
        bug_class="F61",
        site=TEXT,
        apply=hidden(lambda made: made.hidden_states[-3]),
        fix="SD3 takes hidden_states[-2].",
        held_out=True,
    ),
    Bug(
        id="pooled-at-last-token",
        cause="pooled_token",
        bug_class="F61",
        site=inputs("text_encoder/text_projection"),
        apply=pooled_at(lambda self, ids: mx.full((ids.shape[0],), ids.shape[1] - 1)),
        fix="Pool at the first end mark.",
    ),
    Bug(
        id="pooled-at-first-token",
        cause="pooled_token",
        bug_class="F61",
        site=inputs("text_encoder/text_projection"),
        apply=pooled_at(lambda self, ids: mx.zeros((ids.shape[0],), mx.int32)),
        fix="Pool at the first end mark.",
        held_out=True,
    ),
    Bug(
        id="pooled-without-final-norm",
        cause="final_norm",
        bug_class="F61",
        site=inputs("text_encoder_2/text_projection"),
        apply=forward("text_encoder_2/text_model", pooled_unnormed),
        fix="Pool after final_layer_norm.",
    ),
    Bug(
        id="pooled-not-projected",
        cause="layer_missing",
        bug_class="A2",
        # the projection has no counterpart; its result is first missed in the joint vector
        site=(*POOLED, *outputs("text_encoder/text_projection")),
        apply=forward("text_encoder", unprojected),
        fix="Apply text_projection to the pooled vector.",
    ),
    Bug(
        id="clips-exchanged",
        cause="concat_order",
        bug_class="F61",
        site=TEXT,
        apply=conditioned(clips_exchanged),
        fix="CLIP-L's features come first, then CLIP-G's.",
    ),
    Bug(
        id="t5-before-clip",
        cause="concat_order",
        bug_class="F61",
        site=TEXT,
        apply=conditioned(
            lambda made: {
                **made,
                "text": mx.concatenate([made["text"][:, 77:], made["text"][:, :77]], axis=1),
            }
        ),
        fix="CLIP's tokens come first, then T5's.",
        held_out=True,
    ),
    Bug(
        id="pooled-rows-exchanged",
        cause="cfg_swapped",
        bug_class="E55",
        site=POOLED,
        apply=conditioned(lambda made: {**made, "pooled": made["pooled"][::-1]}),
        fix="The negative prompt comes first, pooled vectors included.",
    ),
    Bug(
        id="stale-conditioning",
        cause="stale_state",
        bug_class="E58",
        site=TEXT,
        apply=stale,
        severity="fatal",
        fix="Encode the prompt of this picture.",
    ),
    Bug(
        id="negative-prompt-ignored",
        cause="negative_prompt",
        bug_class="E55",
        site=IDS,
        apply=attribute(
            Run, "prompts", lambda original: property(lambda self: ("", self.request.prompt))
        ),
        fix="Encode the negative prompt that was given.",
    ),
    Bug(
        id="token-positions-missing",
        cause="branch_missing",
        bug_class="A2",
        site=outputs(f"{CLIP}.embeddings"),
        apply=forward(f"{CLIP}.embeddings", lambda self, original, ids: self.token_embedding(ids)),
        fix="Add the position embedding.",
        held_out=True,
    ),
    Bug(
        id="pixels-truncated",
        cause="uint8_truncation",
        bug_class="F63",
        site=outputs("pipeline/image"),
        apply=attribute(mx, "round", lambda original: mx.floor),
        severity="subtle",
        seen_in=(),  # a trace holds the picture before it is made bytes
        fix="Round to the nearest level before the cast to uint8.",
    ),
)
