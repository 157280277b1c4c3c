"""A tower of CLIP or SigLIP in a folder of its own, such as the texts' of image generators."""

from typing import Any

from graphgen.models.published.clip import FAMILIES as BOTH
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.towers import ABSENT, ImageSide, TextSide, tokens, without_effect
from graphgen.nn.module import TensorSpec
from graphgen.value import Tensor


class Alone:
    """A tower whose folder has no other: its vector, which a projection turns into an embedding."""

    def __init__(self, config: Config, side: str, projection: str):
        self.clip = config.model_type.startswith("clip")
        absent = ABSENT["clip" if self.clip else "siglip"][side]
        config.replace({n: value for n, value in absent.items() if config.given(n) is None})
        without_effect(config)
        size = config.take("projection_dim", int, 512) if self.clip else None
        projected = config.has(f"{projection}.weight")
        make: Any = super().__init__
        make(config, self.clip, size if projected else None)
        self.output = f"{'text' if side == 'text' else 'image'}_embeds"
        self.output = self.output if projected else "pooler_output"


class AloneText(Alone, TextSide):
    """The text tower alone."""

    def __init__(self, config: Config):
        super().__init__(config, "text", "text_projection")

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        y, x = self.vectors(inputs["input_ids"], inputs.get("attention_mask"))
        return {self.output: y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Texts."""
        return tokens("batch_size", clip=self.clip)


class AloneImage(Alone, ImageSide):
    """The image tower alone."""

    def __init__(self, config: Config):
        super().__init__(config, "vision", "visual_projection")

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        y, x = self.vectors(pixel_values)
        return {self.output: y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Images."""
        return self.vision_model.inputs()


FAMILIES = {
    f"{kind}_{side}_model": Family(
        tasks={"feature-extraction": tower},
        names=BOTH[kind].names,
        unused=r"(.*\.)?position_ids",
        prefix=f"{side}_model.",
    )
    for kind in ("clip", "siglip")
    for side, tower in (("text", AloneText), ("vision", AloneImage))
}
