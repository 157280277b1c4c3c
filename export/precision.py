"""Mixed precision: products in half precision, all else, including the weights, in float32."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphgen.errors import GraphgenError

Precision: TypeAlias = Literal["fp32", "fp16", "bf16"]

DTYPES: dict[Precision, ir.DataType | None] = {
    "fp32": None,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}
"""The dtype that products calculate in, by name; None if nothing is cast."""

LOSS_SCALE = "loss_scale"
"""The input of a training model in fp16 that its gradients are multiplied by."""

_START, _PATIENCE = 2.0**16, 2000
_PROPERTY, _GOOD = "graphgen.loss_scale", "graphgen.good_steps"


def check_device(who: str, dtype: str, device: str) -> None:
    """Raise if the artifacts' products have no kernels, or gain nothing."""
    if dtype != "fp32" and device != "cuda":
        reason = "has no bf16 kernels" if dtype == "bf16" else "gains nothing from fp16"
        raise GraphgenError(
            f"{who}: the artifacts are in {dtype}, for training on CUDA; onnxruntime on the CPU "
            f"{reason}: write them with dtype='fp32'"
        )


@dataclass
class LossScale:
    """What a loss in fp16 is multiplied by before its gradient, a power of two; 1 for others.

    Small gradients would be 0 in fp16. If one is not finite, the factor is halved and the step
    repeated; after 2,000 good steps it is doubled.
    """

    dynamic: bool
    value: float = 1.0
    good: int = 0

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "LossScale":
        """The initial scale, for what training_model.onnx says about itself."""
        dynamic = described.get("dtype") == "fp16"
        return cls(dynamic, _START if dynamic else 1.0)

    def made(self, norm: float) -> bool:
        """Whether a step can be made by gradients of this norm; if not, the factor is smaller."""
        again = not math.isfinite(norm) and self.value > 1.0
        if again:
            self.value, self.good = self.value / 2.0, 0
        return not again

    def count(self) -> None:
        """Count a step that was made, whose gradients had the factor as it was before."""
        self.good += 1
        if self.dynamic and self.good == _PATIENCE:
            self.value, self.good = self.value * 2.0, 0

    def properties(self) -> dict[str, int | float]:
        """What a checkpoint stores of it: nothing if the loss is not scaled."""
        return {_PROPERTY: self.value, _GOOD: self.good} if self.dynamic else {}

    def restore(self, properties: Mapping[str, Any]) -> None:
        """Go on as the run that wrote these properties would have."""
        self.value = properties.get(_PROPERTY, self.value)
        self.good = properties.get(_GOOD, self.good)
