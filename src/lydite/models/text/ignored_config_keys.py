"""What a config.json of transformers holds besides the numbers of its own model."""

from collections.abc import Mapping
from typing import Any

# Written by transformers 4.2 to 5.22 into any model's config; no text encoder reads them.
IGNORED = frozenset(
    {
        # bookkeeping
        "architectures",
        "attn_implementation",
        "dtype",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_return_dict",
        # training and fine-tuning
        "attention_dropout",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dropout",
        "dropout_rate",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "num_labels",
        "prefix",
        "problem_type",
        "task_specific_params",
        "tf_legacy_loss",
        "use_bfloat16",
        "xla_device",
        # a decoder, which no text encoder has
        "decoder_start_token_id",
        "is_encoder_decoder",
        "num_decoder_layers",
        "scale_decoder_outputs",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "use_cache",
        # ids of special tokens; where a model looks at one, its config has the field
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        # text generation
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

# Keys that would change the arithmetic, with the one value we run.
FIXED: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "pruned_heads": {},
}
