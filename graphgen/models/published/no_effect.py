"""Fields of a config.json that change no result of any model."""

import re

WITHOUT_EFFECT = re.compile(
    r"_\w+|architectures|model_type|transformers_version|torch_dtype|dtype|tokenizer_class|"
    r"\w+_token_id|\w+_token_ids|vocab_size_\w+|id2label|label2id|num_labels|problem_type|"
    r"task_specific_params|finetuning_task|return_dict\w*|use_cache|use_return_dict|output_\w+|"
    r"keys_to_ignore_at_inference|gradient_checkpointing|is_encoder_decoder|torchscript|tpu_\w+|"
    r"initializer_\w+|\w*init_std|\w*dropout\w*|\w+_pdrop|\w*layerdrop|classifier_drop\w*|"
    r"pretraining_tp|use_bfloat16|summary_\w+|pruned_heads|auto_map|quantization_config_\w+|"
    r"pooler_\w+|encoder_stride|tdnn_\w+|xvector_\w+|"  # heads that no task has
    r"apply_spec_augment|mask_(time|feature|channel)_\w+|no_mask_\w+|ctc_\w+|num_negatives|"
    r"\w*codevector\w*|contrastive_logits_temperature|diversity_loss_weight|freeze_\w+|"
    # How to generate; generation_config.json says it too.
    r"max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|"
    r"temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|"
    r"encoder_no_repeat_ngram_size|bad_words_ids|num_return_sequences|chunk_size_feed_forward|"
    r"exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|prefix|"
    r"remove_invalid_values|force_bos_token_to_be_generated|student_\w+|replacing_rate|save_step|"
    r"transformers\.js_config|custom_pipelines|cache_implementation|model_max_length|"
    r"n_special|predict_special_tokens|name|language|neftune_noise_alpha|num_steps|"  # never read
    r"unsloth_\w+|sbert_ce_default_activation_function|sentence_transformers|max_sequence_length"
)
"""Fields on how to train, store or generate: no tensor of a forward pass depends on them."""
