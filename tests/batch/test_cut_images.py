"""Images that are resized by their shortest edge and cut to their middle, as for CLIP."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphgen.batch.images import Images
from graphgen.errors import GraphgenError

PIL = pytest.importorskip("PIL.Image", reason="needs Pillow")
PLAIN = {"do_rescale": False, "do_normalize": False}


def prepared(folder: Path, dims: list[Any], array: np.ndarray, **fields: Any) -> np.ndarray:
    """What the graph reads of an image with these numbers, (H, W, 3), in the order (H, W, 3)."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PLAIN | fields))
    PIL.fromarray(array).save(folder / "a.png")
    images = Images(folder, ["batch", 3, *dims], folder)
    [found] = images.feeds([images.look({"image": "a.png"}, "row 1")])["pixel_values"]
    return found.transpose(1, 2, 0)


@pytest.mark.parametrize("dims", [[4, 6], ["height", "width"]])
def test_the_middle_is_cut(dims: list[Any], tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(1, 256, (9, 11, 3), np.uint8)
    crop = {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 4, "width": 6}}
    found = prepared(tmp_path, dims, array, image_processor_type="BitImageProcessor", **crop)
    np.testing.assert_array_equal(found, array[2:6, 2:8])
    found = prepared(tmp_path, dims, array[:3, :5], **crop)  # too small: black around it
    wanted = np.zeros((4, 6, 3))
    wanted[1:, 1:] = array[:3, :5]
    np.testing.assert_array_equal(found, wanted)


def test_fields_as_transformers_5_saves_them(tmp_path: Path) -> None:
    """They are a part of processor_config.json, which counts before preprocessor_config.json."""
    array = np.random.default_rng(0).integers(1, 256, (9, 11, 3), np.uint8)
    fields = {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 4, "width": 6}}
    saved = {"image_processor": PLAIN | fields, "processor_class": "CLIPProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    found = prepared(tmp_path, [4, 6], array, do_reduce_labels=True)
    np.testing.assert_array_equal(found, array[2:6, 2:8])


def test_small_images_of_convnext_are_cut_and_large_ones_are_not(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    named: dict[str, Any] = {"image_processor_type": "ConvNextImageProcessor", "resample": 2}
    small = named | {"size": {"shortest_edge": 8}, "crop_pct": 0.75}
    found = prepared(tmp_path, ["height", "width"], array, **small)
    whole = np.array(PIL.fromarray(array).resize((15, 10), 2))
    np.testing.assert_array_equal(found, whole[1:9, 3:11])
    found = prepared(tmp_path, ["height", "width"], array, **named, size={"shortest_edge": 384})
    np.testing.assert_array_equal(found, np.array(PIL.fromarray(array).resize((384, 384), 2)))
    for own, told in (
        ({"do_resize": False}, "do_resize is False; it must be True"),
        ({"do_center_crop": True}, "do_center_crop is True; it must be absent"),
        ({"size": {"height": 8, "width": 8}}, "size is .* the shortest_edge alone"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0; it must be from 0.01 to 1"),
    ):
        with pytest.raises(GraphgenError, match=told):
            prepared(tmp_path, ["height", "width"], array, **small | own)


@pytest.mark.parametrize(("size", "resized"), [((20, 31), (12, 8)), ((31, 20), (8, 12))])
def test_the_shortest_edge_is_resized(
    size: tuple[int, int], resized: tuple[int, int], tmp_path: Path
) -> None:
    array = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    fields = {"size": {"shortest_edge": 8}, "crop_size": 8, "resample": 2}
    found = prepared(tmp_path, [8, 8], array, image_processor_type="CLIPImageProcessor", **fields)
    whole = np.array(PIL.fromarray(array).resize(resized, 2))
    top, left = (whole.shape[0] - 8) // 2, (whole.shape[1] - 8) // 2
    np.testing.assert_array_equal(found, whole[top : top + 8, left : left + 8])


@pytest.mark.parametrize(
    ("kind", "fields", "square"),
    [
        ("vit", {}, True),
        ("deit", {}, True),
        ("clip", {}, False),
        ("clip_vision_model", {}, False),
        ("dinov2", {}, False),
        ("dinov2", {"default_to_square": True}, True),
        ("clip", {"image_processor_type": "ViTImageProcessor"}, True),
        ("vit", {"image_processor_type": "ViTImageProcessor", "default_to_square": False}, False),
    ],
)
def test_whether_one_size_is_that_of_the_shortest_edge(
    kind: str, fields: dict[str, Any], square: bool, tmp_path: Path
) -> None:
    """The class says it, which belongs to the model type if no field names one."""
    array = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    given = {"size": 10, "crop_size": 8, "resample": 2, "do_center_crop": True, **fields}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    found = prepared(tmp_path, [8, 8], array, **given)
    whole = np.array(PIL.fromarray(array).resize((10, 10) if square else (15, 10), 2))
    left = (whole.shape[1] - 8) // 2
    np.testing.assert_array_equal(found, whole[1:9, left : left + 8])


def test_one_size_of_siglip_is_refused(tmp_path: Path) -> None:
    """It is that of the shortest edge, and nothing is cut."""
    fields = {"size": 8, "image_processor_type": "SiglipImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(GraphgenError, match="must be height and width of the graph's images"):
        Images(tmp_path, ["batch", 3, 8, 8], tmp_path)


def test_files_have_one_channel_or_three(tmp_path: Path) -> None:
    images = Images(tmp_path, ["batch", 2, 4, 4], tmp_path)
    with pytest.raises(GraphgenError, match="images of 2 channels; give pixel_values"):
        images.look({"image": "a.png"}, "row 1")
    assert images.look({"pixel_values": np.zeros((2, 4, 4)).tolist()}, "row 1").file is None


@pytest.mark.filterwarnings("error")
def test_damaged_exif_data_gives_no_warning(tmp_path: Path) -> None:
    """Pillow warns about it, and the image is as it is."""
    array = np.full((4, 4, 3), 200, np.uint8)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(PLAIN | {"do_resize": False} | {"size": {"height": 4, "width": 4}})
    )
    PIL.fromarray(array).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    images = Images(tmp_path, ["batch", 3, 4, 4], tmp_path)
    [found] = images.feeds([images.look({"image": "a.jpg"}, "row 1")])["pixel_values"]
    assert np.abs(found - 200).max() <= 1


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_8_bits_are_refused(dtype: type, tmp_path: Path) -> None:
    """Pillow would cut them off at 255: nearly all of a 16-bit image would be white."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PLAIN))
    images = Images(tmp_path, ["batch", 3, 224, 224], tmp_path)
    PIL.fromarray(np.full((4, 4), 3000, dtype)).save(tmp_path / "a.tif")
    with pytest.raises(GraphgenError, match=r"row 1: .*a.tif has more than 8 bits a channel"):
        images.look({"image": "a.tif"}, "row 1")


def test_a_thin_image_does_not_fill_the_memory(tmp_path: Path) -> None:
    fields = {"image_processor_type": "CLIPImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PLAIN | fields))
    images = Images(tmp_path, ["batch", 3, 224, 224], tmp_path)
    PIL.new("L", (65000, 1)).save(tmp_path / "a.png")
    with pytest.raises(GraphgenError, match="65,000 x 1 pixels, would be resized to 14,560,000 x"):
        images.look({"image": "a.png"}, "row 1")
