"""How a checkpoint's configuration says that its weights are GPTQ's or AWQ's.

AutoRound (arXiv 2309.05516) finds other integers, and stores them as one of these two does.
"""

from typing import Any, NamedTuple

from graphgen.models.published.config import Config

_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}

_NOTES = (
    "damp_percent damp_auto_increment static_groups true_sequential model_seqlen batch_size "
    "block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize dataset "
    "tokenizer use_exllama exllama_config disable_exllama max_input_length cache_block_outputs "
    "use_cuda_fp16 backend meta model_name_or_path model_file_base_name pad_token_id "
    "quantizer lm_head is_marlin_format modules_to_not_convert do_fuse fuse_max_seq_len "
    "modules_to_fuse exllama_version zero_point sym w_bit q_group_size act_group_aware hyb_act mse "
    "autoround_version iters nsamples seqlen lr minmax_lr amp train_bs gradient_accumulate_steps "
    "enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning enable_alg_ext scale_dtype "
    "low_gpu_mem_usage to_quant_block_names quant_block_list model_free"
)
"""Fields that are notes on how it was made, or that the tensors themselves say."""


class Packing(NamedTuple):
    """What quantization_config says of the tensors."""

    awq: bool
    bits: int
    group: int  # -1: all of K
    one_less: bool  # than it is, each zero is stored
    ordered: bool  # by g_idx, not as they stand, columns form groups

    @property
    def method(self) -> str:
        """What the field calls it."""
        return "awq" if self.awq else "gptq"


def packing_of(own: Config, method: str) -> Packing:
    """The packing that a quantization_config of gptq, awq or auto-round names.

    Raises GraphgenError for a field whose bits cannot be read.
    """
    if method == "auto-round":
        method = own.choose("packing_format", _AUTO_ROUND)
    awq = method == "awq"
    bits = own.take(own.named("bits", "w_bit"), int)
    if bits not in ((4,) if awq else (2, 3, 4, 8)):
        own.refuse("bits", bits, "4" if awq else "2, 3, 4 or 8")
    name = own.named("group_size", "q_group_size")
    group = own.raw(name, 128)
    if type(group) is not int or not (group == -1 or 0 < group <= 1 << 24):
        own.refuse(name, group, "a size, or -1")
    ordered = bool(own.raw("desc_act", False)) and not awq and group != -1
    own.expect("method", method)
    name = own.named("checkpoint_format", "format")
    one_less = not awq and own.raw(name, "gptq") == "gptq"
    if awq:
        own.expect("version", "gemm", "GEMM")
        own.expect(name, "gemm", "GEMM")
    else:
        own.expect(name, "gptq", "gptq_v2")
    _check_rules(own, bits, group)
    own.expect("pack_dtype", "int32")
    own.expect("packing_format", *(name for name, kind in _AUTO_ROUND.items() if kind == method))
    own.expect("data_type", "int")
    own.expect("act_bits", 16)
    for note in _NOTES.split():
        own.raw(note)
    return Packing(awq, bits, group, one_less, ordered)


def _check_rules(own: Config, bits: int, group: int) -> None:
    """Refuse rules for some layers, unless they stay as floats, which their tensors say, too."""
    rules, layers = own.raw("dynamic", {}), own.raw("extra_config", {})
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        own.refuse("dynamic", rules, "rules -:LAYERS, which stay as floats")

    def fits(layer: Any) -> bool:
        if not isinstance(layer, dict) or layer.get("bits") in (16, 32):
            return isinstance(layer, dict)
        return bool(layer.get("bits", bits) == bits and layer.get("group_size", group) == group)

    if not isinstance(layers, dict) or not all(map(fits, layers.values())):
        own.refuse("extra_config", layers, "layers of 16 bits, which stay as floats")
