"""The table of architectures: a model, its inputs and a description by each name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphgen.models import (
    block,
    bytenet,
    conformer,
    convs2s,
    decoder,
    dit,
    encoder,
    gemma,
    mamba,
    memory_network,
    moe,
    neural_gpu,
    recurrent,
    sparse,
    transformer,
    whisper,
    word_vectors,
)
from graphgen.nn.module import Module


@dataclass(frozen=True)
class Architecture:
    """A model to build by name: `create(**sizes)`, called on `inputs()`, or on `specs(**sizes)`."""

    create: Callable[..., Module]
    inputs: Callable[..., dict[str, Any]]
    description: str
    preset: Mapping[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, Any]:
        """The sizes that `create` takes, with their defaults."""
        parameters = inspect.signature(self.create).parameters.values()
        return {p.name: self.preset.get(p.name, p.default) for p in parameters}

    def specs(self, **sizes: Any) -> dict[str, Any]:
        """The inputs of `create(**sizes)`, where some of its sizes are also sizes of inputs."""
        known = inspect.signature(self.inputs).parameters
        every = {**self.sizes(), **sizes}
        return self.inputs(**{name: size for name, size in every.items() if name in known})


ARCHITECTURES: dict[str, Architecture] = {
    "block": Architecture(
        block.Block, block.inputs, "the minimal self-attention block, from tokens to probabilities"
    ),
    "decoder": Architecture(
        decoder.DecoderLM, decoder.inputs, "causal language model of the GPT family, pre-norm"
    ),
    "encoder": Architecture(
        encoder.EncoderModel, encoder.inputs, "encoder of the BERT family, post-norm"
    ),
    **{
        f"decoder-{pattern}": Architecture(
            sparse.SparseDecoder,
            decoder.inputs,
            f"causal language model of long texts, {about}",
            {"pattern": pattern},
        )
        for pattern, about in sparse.PATTERNS.items()
    },
    "transformer-base": Architecture(
        transformer.Transformer,
        transformer.inputs,
        "encoder-decoder of arXiv 1706.03762, its base configuration",
    ),
    "transformer-big": Architecture(
        transformer.Transformer,
        transformer.inputs,
        "the same, its big configuration",
        {"features": 1024, "num_heads": 16, "dropout": 0.3},
    ),
    "recurrent": Architecture(
        recurrent.RecurrentSeq2Seq,
        transformer.inputs,
        "recurrent encoder-decoder without attention (arXiv 1409.3215)",
    ),
    "recurrent-additive": Architecture(
        recurrent.RecurrentSeq2Seq,
        transformer.inputs,
        "the same with additive attention (arXiv 1409.0473)",
        {"score": "additive"},
    ),
    "recurrent-multiplicative": Architecture(
        recurrent.RecurrentSeq2Seq,
        transformer.inputs,
        "the same with multiplicative attention (arXiv 1508.04025)",
        {"score": "multiplicative"},
    ),
    "bytenet": Architecture(
        bytenet.ByteNet,
        transformer.inputs,
        "encoder-decoder of dilated convolutions, arXiv 1610.10099",
    ),
    "convs2s": Architecture(
        convs2s.ConvS2S,
        transformer.inputs,
        "encoder-decoder of gated convolutions with attention, arXiv 1705.03122",
    ),
    "neural-gpu": Architecture(
        neural_gpu.NeuralGPU,
        transformer.inputs,
        "Extended Neural GPU, arXiv 1610.08613, its steps unrolled",
    ),
    "memory-network": Architecture(
        memory_network.MemoryNetwork,
        memory_network.inputs,
        "end-to-end memory network, arXiv 1503.08895",
    ),
    "word-vectors": Architecture(
        word_vectors.SkipGram,
        word_vectors.inputs,
        "skip-gram with negative sampling, arXiv 1310.4546",
    ),
    "dit": Architecture(
        dit.DiT, dit.inputs, "diffusion model of image patches with adaLN-Zero, arXiv 2212.09748"
    ),
    "conformer": Architecture(
        conformer.Conformer,
        conformer.inputs,
        "encoder of speech with attention and convolutions, arXiv 2005.08100",
    ),
    "whisper": Architecture(
        whisper.Whisper, whisper.inputs, "encoder-decoder from sound to text, arXiv 2212.04356"
    ),
    "gemma": Architecture(
        gemma.Gemma,
        gemma.inputs,
        "causal language model like Gemma 2, arXiv 2408.00118: local and global layers, softcaps",
    ),
    "moe": Architecture(
        moe.MoEDecoder,
        moe.inputs,
        "causal language model of which each token uses 2 of 8 experts, arXiv 2401.04088",
    ),
    "mamba": Architecture(
        mamba.Mamba,
        mamba.inputs,
        "causal language model of selective state spaces, without attention, arXiv 2312.00752",
    ),
}
"""The architectures by name."""
