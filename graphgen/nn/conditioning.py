"""What a condition, such as a time step or a class, does to the tokens of a block."""

from graphgen import ops
from graphgen.errors import positive
from graphgen.nn.module import Module, Parameter, zeros
from graphgen.value import Tensor


class Modulation(Module):
    """Shifts, scales and gates of a condition c: the parts of W silu(c) + b, (B, 1, features) each.

    For adaptive layer norm, x + gate · f(norm(x) · (1 + scale) + shift), where the norm has no gain
    and no bias of its own. W and b are zero at first, so each block is the identity before it is
    trained: adaLN-Zero (Peebles & Xie, arXiv 2212.09748, 3.2).

    Args:
        condition: The size of the condition c, (B, condition).
        features: The size of each part.
        count: The number of parts: 3 for a shift, a scale and a gate.
    """

    def __init__(self, condition: int, features: int, *, count: int = 3):
        positive("Modulation", condition=condition, features=features, count=count)
        self.condition, self.features, self.count = condition, features, count
        self.weight = Parameter((condition, count * features), initialize=zeros)
        self.bias = Parameter((count * features,), initialize=zeros)

    def __call__(self, c: Tensor) -> tuple[Tensor, ...]:
        self.expect_last(c, self.condition)
        parts = ops.unsqueeze(ops.matmul(ops.silu(c), self.weight) + self.bias, [1])
        return tuple(ops.split(parts, axis=-1, num_outputs=self.count))
