"""Traits of operators that have only a name here, no meaning: they come with files."""

from graphgen.traits import Trait, declare_traits

_CONTRIB = "com.microsoft"

declare_traits("Constant", Trait.CONSTANT)
for _name in ("If", "Loop", "Scan"):
    declare_traits(_name, Trait.CONTROL_FLOW)
for _name in ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"):
    declare_traits(_name, Trait.RANDOM)
for _name in ("RandomUniform", "RandomUniformLike"):
    declare_traits(_name, Trait.RANDOM)
declare_traits("MaxUnpool", Trait.REFERENCE_DIFFERS)
declare_traits("OneHot", Trait.ADDS_AXIS)
declare_traits("Resize", Trait.REFERENCE_DIFFERS | Trait.SIZED)
declare_traits("SimplifiedLayerNormalization", Trait.BY_ROWS | Trait.NORMALIZES)

# Quantized numbers.
for _name in ("ConvInteger", "QLinearConv"):
    declare_traits(_name, Trait.QUANTIZED | Trait.PRODUCT)
declare_traits("QAttention", Trait.QUANTIZED | Trait.PRODUCT, domain=_CONTRIB)
