"""Rows that are images: files, in the size and scale of preprocessor_config.json."""

import importlib
import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.files import regular
from graphgen.models.published.config import Config
from graphgen.models.published.folder import preprocessor, settings
from graphgen.operands import Array

PIXELS = "pixel_values"

_FILTERS = range(6)
"""How Pillow numbers its filters: 2 is the bilinear one."""

_MODES = {1: "L", 3: "RGB"}

_WIDE = ("I", "F")
"""How Pillow's modes of more than 8 bits a channel begin; their numbers do not become 0 to 255."""

_WARPED = 384
"""From this size on, images are resized for ConvNeXt without keeping their proportions."""

_MOST = 1 << 27
"""The largest number of pixels that an image is resized to."""

_CLIP = {
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "default_to_square": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {},
    "Siglip": {"resample": 3, "default_to_square": False},
    "DeiT": {"resample": 3, "size": {"height": 256, "width": 256}, "do_center_crop": True},
    "CLIP": _CLIP,
    "Bit": _CLIP,  # of DINOv2
    "ConvNext": {"resample": 3, "size": {"shortest_edge": 384}, "default_to_square": False},
}
"""What each class of transformers does if no field says otherwise."""

_PARTS = ("", "_vision_model")
_OF_TYPES = {
    **dict.fromkeys(("convnext", "convnextv2"), "ConvNext"),
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
    **{f"{name.lower()}{part}": name for name in ("CLIP", "Siglip") for part in _PARTS},
}
"""The class for a model type if no field names one; ViT's for any other."""

_KIND = re.compile(rf"({'|'.join(_DEFAULTS)})(ImageProcessor(Fast|Pil)?|FeatureExtractor)")

_TYPES = ("image_processor_type", "feature_extractor_type")
"""Fields that name a class; the older one may be beside the newer."""

_WITHOUT_EFFECT = (
    "processor_class do_convert_rgb data_format input_data_format return_tensors device "
    "disable_grouping"
).split()


class Image(NamedTuple):
    """A file, or what is in one, or its numbers, (C, H, W)."""

    where: str
    file: Path | None
    pixels: Array | None
    size: int = 1
    data: bytes | None = None


class Images:
    """Rows with `pixel_values`, lists (C, H, W), or `image`, a path relative to `base`.

    `image` may also be what is in a file, or an object of its `bytes` and `path`, as `datasets`
    saves it. A file is turned as its EXIF says, converted to as many channels as the graph reads,
    resized in whole numbers to `size` by `resample`, cut to the middle of `crop_size`, where black
    stands beyond its edges, multiplied by `rescale_factor`, and normalized by `image_mean` and
    `image_std`, as the image processors of transformers do with Pillow. If `size` names the
    shortest edge, the other one keeps the proportions.
    Raises GraphgenError for a preprocessor_config.json that asks for more, and names the field.
    """

    reads = ("image", PIXELS)

    def __init__(self, folder: Path, dims: Sequence[Any], base: Path):
        self.dims, self.base, self.missing = tuple(dims[1:]), base, ""
        path, fields = preprocessor(folder, "image_processor")
        if self.dims[0] not in _MODES:
            self.missing = f"the graph reads images of {self.dims[0]} channels; give {PIXELS}"
            return
        if not fields:
            self.missing = f"{path} is missing; copy it from the checkpoint, or give {PIXELS}"
            return
        config = Config({"model_type": "preprocessor", **fields}, str(path))
        for name in _WITHOUT_EFFECT:
            config.raw(name)
        kind = _OF_TYPES.get(str(settings(folder, "config.json").get("model_type")), "ViT")
        if any(map(config.given, _TYPES)):
            kind = "ViT"
        for name in _TYPES:
            named = config.raw(name, "ViTImageProcessor")
            found = _KIND.fullmatch(named) if isinstance(named, str) else None
            if found is None:  # others have other defaults
                config.refuse(name, named, f"of {', '.join(_DEFAULTS)}: [...]ImageProcessor")
            elif found[1] != "ViT":
                kind = found[1]
        self.defaults, self.shrinks = _DEFAULTS[kind], kind == "ConvNext"
        config.expect("do_pad", False)
        config.expect("use_square_size", False)
        config.raw("pad_size")
        self.share = config.take("crop_pct", float, 224 / 256) if self.shrinks else 1.0
        if not 0.01 <= self.share <= 1.0:
            config.refuse("crop_pct", self.share, "from 0.01 to 1")
        config.raw("crop_pct")  # of ConvNeXt alone
        self.resize = config.take("do_resize", bool, True)
        self._size(config)
        self.filter = config.raw("resample", self.defaults.get("resample", 2))
        if type(self.filter) is not int or self.filter not in _FILTERS:
            config.refuse("resample", self.filter, "the number of a filter of Pillow, 0 to 5")
        self.scale, self.mean, self.deviation = 1.0, np.zeros(()), np.ones(())
        scale = config.take("rescale_factor", float, 1 / 255)
        if config.take("do_rescale", bool, True):
            self.scale = scale
        mean, deviation = (self._channels(config, name) for name in ("image_mean", "image_std"))
        if config.take("do_normalize", bool, True):
            self.mean, self.deviation = mean, deviation
        config.finish()

    def _size(self, config: Config) -> None:
        """Read what images are resized and cut to; all have the size that the graph reads."""
        square = _square(224)
        default = self.defaults.get("size", square)
        size, crop = config.raw("size", default), config.raw("crop_size", square)
        name = "default_to_square"
        whole = config.take(name, bool, self.defaults.get(name, True))
        if type(size) is int:
            size = _square(size) if whole else {"shortest_edge": size}
        crop = _square(crop) if type(crop) is int else crop
        cut = config.take("do_center_crop", bool, self.defaults.get("do_center_crop", False))
        if cut and not _sizes(size, "height", "width") and not _sizes(size, "shortest_edge"):
            config.refuse("size", size, "the shortest_edge, or height and width")
        if self.shrinks:
            config.expect("do_resize", True)  # it also cuts
            if not _sizes(size, "shortest_edge") or cut:
                name = "do_center_crop" if cut else "size"
                config.refuse(name, cut or size, "absent" if cut else "the shortest_edge alone")
            # Small images are cut to the middle of larger ones, large ones lose their proportions.
            edge = size["shortest_edge"]
            cut, crop = edge < _WARPED, _square(edge)
            size = {"shortest_edge": int(edge / self.share)} if cut else crop
        last, free = crop if cut else size, self.dims[1:]
        fits = _sizes(last, "height", "width") and all(
            isinstance(own, str) or own == last[name]
            for own, name in zip(free, ("height", "width"), strict=True)
        )
        if not fits:
            wanted = f"height and width of the graph's images, {free}"
            config.refuse("crop_size" if cut else "size", last, wanted)
        self.dims = (self.dims[0], last["height"], last["width"])
        self.cut, self.size = cut, size

    def _channels(self, config: Config, name: str) -> Array:
        """A number for each channel, (C, 1, 1)."""
        given = config.raw(name, self.defaults.get(name, [0.5] * self.dims[0]))
        given = given if isinstance(given, list) else [given] * self.dims[0]
        numbers = all(type(x) in (int, float) and np.isfinite(x) for x in given)
        if not numbers or len(given) != self.dims[0] or (name == "image_std" and 0 in given):
            config.refuse(name, given, f"{self.dims[0]} numbers, and no deviation 0")
        return np.array(given, np.float32)[:, None, None]

    def look(self, row: dict[str, Any], where: str) -> Image:
        """The image of a row; only the header of its file is read. Raises GraphgenError."""
        path, pixels = row.get("image"), row.get(PIXELS)
        if path is not None and pixels is not None:
            raise GraphgenError(f"{where} has `image` and `{PIXELS}`; give one of them")
        data: Any = None
        if isinstance(path, dict):
            data, path = path.get("bytes"), path.get("path")
        elif isinstance(path, bytes):
            data, path = path, None
        if isinstance(path, str) or isinstance(data, bytes):
            if self.missing:
                raise GraphgenError(f"{where}: {self.missing}")
            image = Image(where, self.base / (path or "image"), None, data=data)
            with _open(image) as opened:
                if opened.mode.startswith(_WIDE):
                    raise GraphgenError(
                        f"{where}: {image.file} has more than 8 bits a channel, which would be cut "
                        "off at 255; convert it to 8 bits"
                    )
                given = opened.size
            size = self._resized(given) if self.resize else (1, 1)
            if math.prod(size) > _MOST:
                raise GraphgenError(
                    f"{where}: {image.file}, {given[0]:,} x {given[1]:,} pixels, would be resized "
                    f"to {size[0]:,} x {size[1]:,}; give at most {_MOST:,} pixels"
                )
            return image
        try:
            with np.errstate(over="ignore"):
                array: Array = np.array(pixels, np.float32)
        except (TypeError, ValueError):
            array = np.zeros(0)
        if array.shape != self.dims:
            raise GraphgenError(
                f"{where} has neither `image`, a path, nor `{PIXELS}`, lists of {self.dims} numbers"
            )
        if not np.isfinite(array).all():
            raise GraphgenError(f"{where}: a number of `{PIXELS}` is not finite; give others")
        return Image(where, None, array)

    def feeds(self, images: Sequence[Image]) -> dict[str, Array]:
        """Arrays (B, C, H, W)."""
        return {PIXELS: np.stack([self._read(image) for image in images])}

    def _read(self, image: Image) -> Array:
        if image.pixels is not None:
            return image.pixels
        with _open(image) as opened, warnings.catch_warnings(action="ignore"):
            try:
                upright = _pillow("PIL.ImageOps").exif_transpose(opened)
                found = upright.convert(_MODES[self.dims[0]])
            except (OSError, ValueError, SyntaxError, MemoryError) as error:
                raise GraphgenError(f"{image.where}: {image.file} is damaged: {error}") from error
        if self.resize:
            found = found.resize(self._resized(found.size), self.filter)
        if self.cut:
            rows, columns = self.dims[1:]
            left, top = (found.width - columns) // 2, (found.height - rows) // 2
            found = found.crop((left, top, left + columns, top + rows))
        array = np.array(found, np.float32).reshape(*found.size[::-1], -1).transpose(2, 0, 1)
        if array.shape != self.dims:
            raise GraphgenError(
                f"{image.where}: {image.file} is {array.shape}, but the graph reads {self.dims} "
                "and do_resize is false; resize the image"
            )
        return np.asarray((array * np.float32(self.scale) - self.mean) / self.deviation, np.float32)

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """The width and height that an image of this width and height gets."""
        if "width" in self.size:
            return self.size["width"], self.size["height"]
        short = self.size["shortest_edge"]
        long = int(short * max(size) / min(size))
        return (short, long) if size[0] <= size[1] else (long, short)


def _square(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def _sizes(given: Any, *names: str) -> bool:
    """Whether a field is an object of sizes with these names."""
    named = isinstance(given, dict) and {*given} == {*names}
    return named and all(type(size) is int and 0 < size < 1 << 16 for size in given.values())


def _open(image: Image) -> Any:
    """Open the file; Pillow reads its header."""
    pillow = _pillow("PIL.Image")
    assert image.file is not None
    pillow.init()
    known = [name for name in pillow.ID if name != "EPS"]  # a program, which Ghostscript would run
    try:
        with warnings.catch_warnings(action="ignore"):  # of what it reads nevertheless
            source = regular(image.file) if image.data is None else io.BytesIO(image.data)
            return pillow.open(source, formats=known)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or "not an image that Pillow knows"
        raise GraphgenError(f"{image.where}: {image.file}: {reason}") from error


def _pillow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GraphgenError(
            f"images need Pillow, which does not import ({error}); run `pip install "
            '"graphgen-onnx[image]"`'
        ) from error
