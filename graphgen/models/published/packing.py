"""How a checkpoint's configuration says that its weights are GPTQ's or AWQ's.

AutoRound (arXiv 2309.05516) finds other integers, and stores them as one of these two does.
"""

from collections.abc import Collection
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
    others: tuple[tuple[int, int], ...] = ()  # bits and groups of layers with a rule of their own

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
    able = (4,) if awq else (2, 3, 4, 8)
    if bits not in able:
        own.refuse("bits", bits, "4" if awq else "2, 3, 4 or 8")
    name = own.named("group_size", "q_group_size")
    group = own.raw(name, 128)
    if not _is_group(group):
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
    others = _ruled(own, bits, group, able)
    own.expect("pack_dtype", "int32")
    own.expect("packing_format", *(name for name, kind in _AUTO_ROUND.items() if kind == method))
    own.expect("data_type", "int")
    own.expect("act_bits", 16)
    for note in _NOTES.split():
        own.raw(note)
    return Packing(awq, bits, group, one_less, ordered, others)


def _is_group(value: Any) -> bool:
    return type(value) is int and (value == -1 or 0 < value <= 1 << 24)


def _ruled(
    own: Config, bits: int, group: int, able: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """The bits and groups of layers that rules give others; which these are, their tensors say.

    Those that stay as floats have none of the tensors.
    """
    found = set[tuple[int, int]]()
    for name in ("dynamic", "extra_config"):
        rules = own.raw(name, {})
        if not isinstance(rules, dict):
            own.refuse(name, rules, "an object of rules for layers")
        for layer, rule in rules.items():
            if str(layer).startswith("-:"):
                continue
            wanted = f"a rule of {layer} with bits and group_size as the others"
            if not isinstance(rule, dict):
                own.refuse(name, rule, wanted)
            kind, size = rule.get("bits", bits), rule.get("group_size", group)
            if kind in (16, 32):
                continue
            fits = kind in able and _is_group(size) and rule.get("data_type", "int") == "int"
            if not fits or rule.get("act_bits", 16) != 16:
                own.refuse(name, rule, wanted)
            found.add((kind, size))
    return tuple(sorted(found - {(bits, group)}))
