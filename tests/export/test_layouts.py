"""Folders of checkpoints become folders that clients load, without holding the model."""

import json
import math
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from graphgen.errors import GraphgenError
from graphgen.export import partial
from graphgen.export.folders import MODEL, replacing_folder

FEATURES, HIDDEN, VOCABULARY, LAYERS = 1536, 5120, 16000, 4
MIB = 1 << 20


def large_checkpoint(folder: Path) -> int:
    """A Llama of zeros that take no place on the disk: 0.7 GB; the bytes of its largest tensor."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": FEATURES,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    }
    shapes = dict.fromkeys(("model.embed_tokens", "lm_head"), (VOCABULARY, FEATURES))
    shapes |= {"model.norm": (FEATURES,)}  # type: ignore[dict-item]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part, rows in {
            "q": FEATURES,
            "k": FEATURES // 3,
            "v": FEATURES // 3,
            "o": FEATURES,
        }.items():
            shapes[f"{layer}.self_attn.{part}_proj"] = (rows, FEATURES)
        for part in ("gate", "up"):
            shapes[f"{layer}.mlp.{part}_proj"] = (HIDDEN, FEATURES)
        shapes[f"{layer}.mlp.down_proj"] = (FEATURES, HIDDEN)
        for part in ("input", "post_attention"):
            shapes[f"{layer}.{part}_layernorm"] = (FEATURES,)  # type: ignore[assignment]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[f"{name}.weight"] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    assert end > 6.5e8
    return 4 * VOCABULARY * FEATURES


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_building_never_holds_the_model(tmp_path: Path) -> None:
    largest = large_checkpoint(tmp_path / "checkpoint")
    code = (
        "import re, sys; from pathlib import Path; from graphgen.commands import main; "
        "main(['build', sys.argv[1], '-o', sys.argv[2]]); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    command = [sys.executable, "-c", code, tmp_path / "checkpoint", tmp_path / "out"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(done.stdout.split()[-1]) * 1024
    data = tmp_path / "out" / "onnx" / "model.onnx_data"
    assert data.stat().st_size > 6.5e8  # of which it may hold 450 MB
    data.unlink()
    assert peak < largest + 350 * MIB, f"{peak / MIB:.0f} MiB"


def test_a_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), replacing_folder("build", out) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for content in ("first.json", "second.json"):  # an older build is replaced, whole
        with replacing_folder("build", out) as folder:
            (folder / MODEL).parent.mkdir()
            onnx.save(onnx.ModelProto(), folder / MODEL)
            (folder / content).touch()
    assert {path.name for path in out.iterdir()} == {"onnx", "second.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_older_build_stays_where_the_new_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    (out / MODEL).parent.mkdir(parents=True)
    (out / MODEL).touch()

    def fail(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    if sys.platform == "linux":  # the two are exchanged at once, so no kill leaves neither
        with replacing_folder("build", out) as folder:
            (folder / MODEL).parent.mkdir()
            (folder / MODEL).touch()
    monkeypatch.setattr(partial, "_exchange", lambda one, other: False)
    told = "build: .*out cannot be written: No space left"
    with pytest.raises(GraphgenError, match=told), replacing_folder("build", out):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / MODEL).is_file()


def test_what_is_no_build_is_not_replaced(tmp_path: Path) -> None:
    for name, told in (("a.json", "no graph"), ("m.onnx", None), ("thesis.txt", "thesis.txt")):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()
        if told is None:  # what a build wrote
            continue
        with (
            pytest.raises(
                GraphgenError, match=rf"exists and is not a folder of a model: .* {told}"
            ),
            replacing_folder("build", tmp_path / "out"),
        ):
            pass
        assert (tmp_path / "out" / name).exists()
