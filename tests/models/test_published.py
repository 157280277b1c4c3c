"""Configurations as they are published, with small sizes, and the weights next to them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from random_checkpoints import stored_shapes

from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.models.published.rope import rotary
from graphgen.safetensors import Weight

ENCODER: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 60,
}
BERT = {
    **ENCODER,
    "architectures": ["BertForMaskedLM"],
    "gradient_checkpointing": False,
    "model_type": "bert",
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
}
ROBERTA = {
    **ENCODER,
    "architectures": ["RobertaForMaskedLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "model_type": "roberta",
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
DECODER: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 60,
}
LLAMA = {**DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA |= {"pretraining_tp": 1, "rope_scaling": None}
QWEN = {**DECODER, "use_sliding_window": False, "tie_word_embeddings": True}
LONG = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
LONG_WAVES = {**LONG, "original_max_position_embeddings": 8, "rope_type": "llama3"}
SEQ2SEQ: dict[str, Any] = {
    "activation_dropout": 0.1,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 16,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 1,
    "dropout": 0.1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 1,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 32,
    "normalize_before": False,
    "num_hidden_layers": 1,
    "use_cache": True,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 24,
    "d_kv": 8,
    "d_model": 16,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 2,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"translation_en_to_de": {"prefix": "translate: "}},
    "vocab_size": 60,
}

PUBLISHED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "bert-base-uncased": (
        BERT,
        "fill-mask",
        [
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
        ],
    ),
    "bert-base-multilingual-cased": (
        {
            **BERT,
            "directionality": "bidi",
            "pooler_fc_size": 768,
            "pooler_num_attention_heads": 12,
            "pooler_num_fc_layers": 3,
            "pooler_size_per_head": 128,
            "pooler_type": "first_token_transform",
        },
        "fill-mask",
        ["cls.predictions.decoder.weight", "bert.embeddings.position_ids"],
    ),
    "all-MiniLM-L6-v2": (
        {
            **BERT,
            "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
            "architectures": ["BertModel"],
        },
        "feature-extraction",
        ["bert.embeddings.position_ids", "bert.pooler.dense.weight"],
    ),
    "ms-marco-MiniLM-L6-v2": (
        {
            **BERT,
            "id2label": {"0": "LABEL_0"},
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        },
        "text-classification",
        ["bert.embeddings.position_ids"],
    ),
    "roberta-base": (
        ROBERTA,
        "fill-mask",
        ["roberta.embeddings.position_ids", "roberta.pooler.dense.bias", "lm_head.decoder.weight"],
    ),
    "xlm-roberta-base": (
        {**ROBERTA, "model_type": "xlm-roberta", "output_past": True},
        "feature-extraction",
        ["lm_head.bias", "lm_head.dense.weight", "lm_head.layer_norm.bias"],
    ),
    "camembert-base": (
        {**ROBERTA, "model_type": "camembert", "bos_token_id": 5, "eos_token_id": 6}
        | {"output_past": True},
        "fill-mask",
        ["roberta.embeddings.position_ids", "lm_head.decoder.weight", "roberta.pooler.dense.bias"],
    ),
    "electra-small-generator": (
        {**BERT, "model_type": "electra", "embedding_size": 8, "summary_activation": "gelu"}
        | {"summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True},
        "fill-mask",
        ["electra.embeddings.position_ids", "generator_lm_head.weight"],
    ),
    "electra-small-discriminator": (
        {**ENCODER, "model_type": "electra", "embedding_size": 8, "type_vocab_size": 2},
        "feature-extraction",
        ["electra.embeddings.position_ids", "discriminator_predictions.dense.weight"],
    ),
    "albert-base-v2": (
        {
            **ENCODER,
            "bos_token_id": 2,
            "classifier_dropout_prob": 0.1,
            "down_scale_factor": 1,
            "embedding_size": 8,
            "eos_token_id": 3,
            "gap_size": 0,
            "hidden_act": "gelu_new",
            "inner_group_num": 1,
            "model_type": "albert",
            "net_structure_type": 0,
            "num_hidden_groups": 1,
            "num_memory_blocks": 0,
            "type_vocab_size": 2,
        },
        "fill-mask",
        ["predictions.decoder.weight", "albert.pooler.bias", "sop_classifier.classifier.bias"],
    ),
    "all-mpnet-base-v2": (
        {**ENCODER, "model_type": "mpnet", "layer_norm_eps": 1e-5, "pad_token_id": 1}
        | {"bos_token_id": 0, "eos_token_id": 2, "relative_attention_num_buckets": 32},
        "feature-extraction",
        ["mpnet.pooler.dense.bias"],
    ),
    "deberta-base": (
        {
            **ENCODER,
            "layer_norm_eps": 1e-7,
            "max_relative_positions": -1,
            "model_type": "deberta",
            "padding_idx": 0,
            "pos_att_type": "c2p|p2c",
            "position_biased_input": False,
            "relative_attention": True,
            "type_vocab_size": 0,
        },
        "text-classification",
        ["lm_predictions.lm_head.bias", "deberta.embeddings.position_embeddings.weight"],
    ),
    "deberta-v2-xlarge": (
        {
            **ENCODER,
            "attention_head_size": 8,
            "conv_act": "gelu",
            "conv_kernel_size": 3,
            "layer_norm_eps": 1e-7,
            "max_relative_positions": -1,
            "model_type": "deberta-v2",
            "norm_rel_ebd": "layer_norm",
            "pooler_dropout": 0,
            "pooler_hidden_act": "gelu",
            "pooler_hidden_size": 16,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
            "position_buckets": 16,
            "relative_attention": True,
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        "feature-extraction",
        ["cls.predictions.bias", "deberta.embeddings.position_embeddings.weight"],
    ),
    "deberta-v3-base, with a classifier": (
        {
            **ENCODER,
            "id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"},
            "label2id": {"contradiction": 2, "entailment": 0, "neutral": 1},
            "layer_norm_eps": 1e-7,
            "legacy": True,
            "max_relative_positions": -1,
            "model_type": "deberta-v2",
            "norm_rel_ebd": "layer_norm",
            "pad_token_id": 0,
            "pooler_dropout": 0,
            "pooler_hidden_act": "gelu",
            "pooler_hidden_size": 16,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 16,
            "relative_attention": True,
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        "text-classification",
        ["mask_predictions.dense.weight", "lm_predictions.lm_head.bias"],
    ),
    "ModernBERT-base": (
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 50281,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_dropout": 0.0,
            "classifier_pooling": "mean",
            "cls_token_id": 50281,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "embedding_dropout": 0.0,
            "eos_token_id": 50282,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "gradient_checkpointing": False,
            "hidden_activation": "gelu",
            "hidden_size": 16,
            "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02,
            "intermediate_size": 24,
            "layer_norm_eps": 1e-05,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
            "model_type": "modernbert",
            "norm_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
            "pad_token_id": 50283,
            "position_embedding_type": "absolute",
            "reference_compile": True,
            "sep_token_id": 50282,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": 60,
        },
        "fill-mask",
        ["decoder.weight"],
    ),
    "nomic-embed-text-v1.5": (
        {
            "activation_function": "swiglu",
            "attn_pdrop": 0.0,
            "bos_token_id": None,
            "causal": False,
            "dense_seq_output": True,
            "embd_pdrop": 0.0,
            "eos_token_id": None,
            "fused_bias_fc": True,
            "fused_dropout_add_ln": True,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-12,
            "max_trained_positions": 2048,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "model_type": "nomic_bert",
            "n_embd": 16,
            "n_head": 2,
            "n_inner": 24,
            "n_layer": 2,
            "n_positions": 8192,
            "pad_vocab_size_multiple": 64,
            "parallel_block": False,
            "parallel_block_tied_norm": False,
            "prenorm": False,
            "qkv_proj_bias": False,
            "reorder_and_upcast_attn": False,
            "resid_pdrop": 0.0,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "summary_activation": None,
            "summary_first_dropout": 0.0,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "torch_dtype": "float32",
            "type_vocab_size": 2,
            "use_cache": True,
            "use_flash_attn": True,
            "use_rms_norm": False,
            "use_xentropy": True,
            "vocab_size": 60,
        },
        "feature-extraction",
        [],
    ),
    "distilbert-base-uncased": (
        {
            "activation": "gelu",
            "attention_dropout": 0.1,
            "dim": 16,
            "dropout": 0.1,
            "hidden_dim": 24,
            "initializer_range": 0.02,
            "max_position_embeddings": 32,
            "model_type": "distilbert",
            "n_heads": 2,
            "n_layers": 2,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "transformers_version": "4.10.0.dev0",
            "vocab_size": 60,
        },
        "feature-extraction",
        ["vocab_layer_norm.bias", "vocab_projector.weight", "vocab_transform.bias"],
    ),
    "vit-base-patch16-224": (
        {
            "attention_probs_dropout_prob": 0.0,
            "encoder_stride": 16,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 16,
            "id2label": {"0": "tench", "1": "goldfish"},
            "image_size": 32,
            "initializer_range": 0.02,
            "intermediate_size": 24,
            "label2id": {"tench": 0, "goldfish": 1},
            "layer_norm_eps": 1e-12,
            "model_type": "vit",
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 16,
            "qkv_bias": True,
        },
        "image-classification",
        ["vit.pooler.dense.weight", "vit.pooler.dense.bias"],
    ),
    "llama-7b": (
        {**LLAMA, "max_sequence_length": 2048, "num_key_value_heads": None, "pad_token_id": 0},
        "text-generation",
        ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    ),
    "Llama-3.2-1B": (
        {**LLAMA, "rope_scaling": LONG_WAVES, "head_dim": 4, "mlp_bias": False}
        | {"attention_bias": False, "tie_word_embeddings": True, "eos_token_id": [1, 2]},
        "text-generation",
        [],
    ),
    "Llama-3.2-1B-Instruct, of unsloth": (
        {**LLAMA, "pad_token_id": 4, "unsloth_fixed": True, "unsloth_version": "2024.9"},
        "text-generation",
        [],
    ),
    "SmolLM2-135M": (
        {**LLAMA, "is_llama_config": True, "rope_interleaved": False},
        "text-generation",
        [],
    ),
    "Falcon3-1B": ({**LLAMA, "activation": "swiglu", "head_dim": 4}, "text-generation", []),
    "TinyLlama-1.1B": ({**LLAMA, "attention_bias": False}, "text-generation", []),
    "Mistral-7B-v0.1": (
        {**DECODER, "model_type": "mistral", "sliding_window": 4096},
        "text-generation",
        [],
    ),
    "Mistral-7B-v0.3": (
        {**DECODER, "model_type": "mistral", "sliding_window": None, "head_dim": 4},
        "text-generation",
        [],
    ),
    "Qwen2.5-0.5B": (
        {**QWEN, "model_type": "qwen2", "max_window_layers": 24, "sliding_window": 32768}
        | {"use_mrope": False},
        "text-generation",
        ["lm_head.weight"],
    ),
    "Qwen3-0.6B": (
        {**QWEN, "model_type": "qwen3", "max_window_layers": 28, "sliding_window": None}
        | {"head_dim": 8, "attention_bias": False, "rope_scaling": None},
        "text-generation",
        ["lm_head.weight"],
    ),
    "Qwen3-Embedding-0.6B": (
        {**QWEN, "model_type": "qwen3", "max_window_layers": 28, "sliding_window": None}
        | {"head_dim": 8, "attention_bias": False, "rope_scaling": None},
        "feature-extraction",
        [],
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 32,
            "n_embd": 16,
            "n_head": 2,
            "n_layer": 2,
            "n_positions": 32,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 60,
        },
        "text-generation",
        ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias", "lm_head.weight"],
    ),
    "t5-small": (
        T5,
        "text2text-generation",
        [
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ],
    ),
    "sentence-t5-base": (
        {**T5, "architectures": ["T5EncoderModel"], "gradient_checkpointing": False},
        "feature-extraction",
        ["encoder.embed_tokens.weight", "decoder.block.0.layer.0.layer_norm.weight"],
    ),
    "flan-t5-base": (
        {
            **T5,
            "classifier_dropout": 0.0,
            "dense_act_fn": "gelu_new",
            "feed_forward_proj": "gated-gelu",
            "is_gated_act": True,
            "num_decoder_layers": 2,
            "relative_attention_max_distance": 128,
            "tie_word_embeddings": False,
        },
        "text2text-generation",
        ["encoder.embed_tokens.weight", "lm_head.weight"],
    ),
    "bart-base": (
        {
            **SEQ2SEQ,
            "activation_function": "gelu",
            "decoder_start_token_id": 2,
            "early_stopping": True,
            "eos_token_id": 2,
            "forced_bos_token_id": 0,
            "forced_eos_token_id": 2,
            "gradient_checkpointing": False,
            "model_type": "bart",
            "no_repeat_ngram_size": 3,
            "normalize_embedding": True,
            "num_beams": 4,
            "pad_token_id": 1,
            "scale_embedding": False,
            "task_specific_params": {"summarization": {"length_penalty": 1.0}},
            "vocab_size": 60,
        },
        "text2text-generation",
        ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"],
    ),
    "opus-mt-en-de": (
        {
            **SEQ2SEQ,
            "_num_labels": 3,
            "activation_function": "swish",
            "bad_words_ids": [[59]],
            "decoder_start_token_id": 59,
            "decoder_vocab_size": 60,
            "eos_token_id": 0,
            "extra_pos_embeddings": 60,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "model_type": "marian",
            "normalize_embedding": False,
            "num_beams": 6,
            "pad_token_id": 59,
            "scale_embedding": True,
            "share_encoder_decoder_embeddings": True,
            "static_position_embeddings": True,
            "vocab_size": 60,
        },
        "text2text-generation",
        ["final_logits_bias", "model.encoder.embed_positions.weight", "lm_head.weight"],
    ),
}
"""What is told of each, the task it is for, and weights that are stored beyond the parameters."""


def causal_lm(fields: dict[str, Any]) -> Any:
    return FAMILIES[fields["model_type"]].tasks["text-generation"](Config(fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_known(name: str) -> None:
    fields, task, extra = PUBLISHED[name]
    config, family = Config(fields), FAMILIES[fields["model_type"]]
    config.stored = frozenset(extra)
    module = family.tasks[task](config)
    config.finish()
    stored = {name: _weight((1,), name) for name in extra}
    stored |= {name: _weight(shape, name) for name, shape in stored_shapes(family, module).items()}
    family.weights(module, stored, ir.DataType.FLOAT, name)


def _weight(shape: tuple[int, ...], name: str) -> Weight:
    return Weight(Path("model.safetensors"), name, ir.DataType.FLOAT, shape, 0)


@pytest.mark.parametrize(
    ("fields", "windows", "kv_heads"),
    [
        ({"model_type": "mistral"}, [4096, 4096], 8),
        ({"model_type": "mistral", "sliding_window": None}, [None, None], 8),
        ({"model_type": "mistral", "sliding_window": 7}, [7, 7], 8),
        ({"model_type": "mistral", "num_key_value_heads": None}, [4096, 4096], 16),
        ({"model_type": "llama"}, [None, None], 16),
        ({"model_type": "qwen2", "num_attention_heads": 32}, [None, None], 32),
        (
            {"model_type": "qwen3", "num_attention_heads": 32, "use_sliding_window": True}
            | {"max_window_layers": 1, "head_dim": 2},
            [None, 4096],
            32,
        ),
    ],
)
def test_what_is_absent_is_what_transformers_takes(
    fields: dict[str, Any], windows: list[int | None], kv_heads: int
) -> None:
    small = {**DECODER, "num_attention_heads": 16, "hidden_size": 64}
    module = causal_lm({**{k: v for k, v in small.items() if "key" not in k}, **fields})
    assert [layer.window for layer in module.layers] == windows
    assert {layer.attention.kv_heads for layer in module.layers} == {kv_heads}


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}, "rope_theta": 5e5}, 2e4),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}, "rope_theta": 5e5}, 5e5),
    ],
)
def test_theta_among_the_other_rotary_parameters_comes_first(
    fields: dict[str, Any], theta: float
) -> None:
    found = rotary(Config({"model_type": "llama", **fields}), 8).frequencies
    np.testing.assert_allclose(found, theta ** (-np.arange(4) / 4), rtol=1e-6)


LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1.0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; it must be 1.0",
        ),
        (
            {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.25; it must be 1.0",
        ),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 500.0}},
            "'factor': 4.0}; it must be absent, or as rope_parameters: {'rope_type': 'linear', ",
        ),
        ({"rope_scaling": LLAMA3}, "must be with low_freq_factor below high_freq_factor"),
        ({"head_dim": 7}, "head_dim is 7; it must be an even number of features"),
        ({"rope_theta": 1e-3}, "rope_theta is 0.001; it must be at least 1"),
    ],
)
def test_rotary_fields_that_transformers_reads_otherwise_are_refused(
    kind: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(GraphgenError) as error:
        causal_lm({"model_type": kind, **DECODER, **fields})
    assert told in str(error.value)


def test_rotary_fields_without_effect_are_accepted() -> None:
    default = rotary(Config({"model_type": "llama"}), 8).frequencies
    fields = {"partial_rotary_factor": 1, "rope_scaling": LINEAR, "rope_parameters": LINEAR}
    found = rotary(Config({"model_type": "llama", **fields}), 8).frequencies
    np.testing.assert_allclose(found, default / 4.0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_window_of_layers_that_is_switched_off_is_refused(kind: str) -> None:
    fields = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    with pytest.raises(GraphgenError, match="where use_sliding_window is false"):
        causal_lm({"model_type": kind, **DECODER, **fields})
    module = causal_lm({"model_type": kind, **DECODER, **fields, "use_sliding_window": True})
    assert [layer.window for layer in module.layers] == [None, 5]


@pytest.mark.parametrize("terms", [["p2c", "p2c"], "c2p|p2c|c2p", "", [["c2p"]], ["p2p"], 1])
def test_scores_of_distances_are_known_and_stand_once(terms: Any) -> None:
    fields = {"model_type": "deberta", **ENCODER, "pos_att_type": terms}
    with pytest.raises(GraphgenError, match=r"pos_att_type is .* must be c2p, p2c or both"):
        FAMILIES["deberta"].tasks["fill-mask"](Config(fields))
