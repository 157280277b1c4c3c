"""Models by their names on the hub, of which a server on this machine is one."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from graphgen.commands import main
from graphgen.export.folders import MODEL

constants = pytest.importorskip("huggingface_hub.constants", reason="comes with tokenizers")
FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMIT = "0123456789" * 4
TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for: a model's commit, its files, and one of them."""

    root: Path
    sent: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", owner, model, what, revision]:
                folder = self.root / owner / model
                if owner == "gated":
                    self._reply(403, {}, {"X-Error-Code": "GatedRepo"})
                elif not folder.is_dir():
                    self._reply(401, {}, {"X-Error-Code": "RepoNotFound"})
                elif revision not in ("main", COMMIT):
                    self._reply(404, {}, {"X-Error-Code": "RevisionNotFound"})
                elif what == "tree":
                    self._reply(200, [*_listed(folder)])
                else:
                    self._reply(200, {"id": f"{owner}/{model}", "sha": COMMIT})
            case [owner, model, "resolve", _, *name] if owner != "api":
                file = self.root.joinpath(owner, model, *name)
                data = file.read_bytes()
                etag = hashlib.sha1(data).hexdigest()
                self._send(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})
                if self.command == "GET":
                    self.sent.append("/".join(name))
            case _:
                self._reply(404, {}, {})

    def _reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(body).encode(), kind | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _listed(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.rglob("*"):
        if path.is_file():
            name, data = path.relative_to(folder).as_posix(), path.read_bytes()
            oid = hashlib.sha1(data).hexdigest()
            yield {"type": "file", "path": name, "size": len(data), "oid": oid}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Mine(Hub):
        root, sent = tmp_path / "hub", []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + TEMPLATE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "gpt2_checkpoint", Mine.root / "tiny/gpt2")
    yield Mine
    server.shutdown()
    server.server_close()


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*words]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line


def test_a_model_is_downloaded_once_without_what_others_read(hub: type[Hub]) -> None:
    model = hub.root / "tiny/gpt2"
    for other in ("pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"):
        (model / other).parent.mkdir(exist_ok=True)
        (model / other).write_text("for others")
    assert main(["build", "tiny/gpt2", "-o", "of_hub"]) == 0
    assert sorted(hub.sent) == ["config.json", "model.safetensors"]
    assert main(["build", "tiny/gpt2@main", "-o", "again"]) == 0
    assert len(hub.sent) == 2
    assert main(["build", str(model), "-o", "of_folder"]) == 0
    for name in (MODEL, "config.json"):
        assert Path("of_hub", name).read_bytes() == Path("of_folder", name).read_bytes()


def test_a_folder_here_comes_before_the_hub(hub: type[Hub]) -> None:
    shutil.copytree(FIXTURES / "bert_checkpoint", "tiny/gpt2")
    assert main(["build", "tiny/gpt2", "-o", "out"]) == 0
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "bert"
    assert not hub.sent


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny/bert", "is neither a folder here nor a public model of that name on the hub"),
        ("gated/llama", "its owner grants access"),
        ("tiny/gpt2@v9", "tiny/gpt2 has no revision 'v9'"),
        ("tiny/gpt2/model-Q4_0.gguf", "tiny/gpt2 has no file model-Q4_0.gguf"),
        ("tiny", "tiny is neither here nor an architecture of --list"),
        ("decodr", "did you mean 'decoder'?"),
    ],
)
def test_names_that_are_nowhere(
    hub: type[Hub], name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal("build", name, "-o", "out", capsys=capsys)
    assert not hub.sent and not Path("out").exists()


def test_options_are_checked_before_anything_is_downloaded(
    hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal("build", "tiny/gpt2", "-o", "out", "--layers", "3", capsys=capsys)
    assert "--layers has no effect" in told and not hub.sent


def test_without_a_connection_the_cache_serves(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "tiny/gpt2", "-o", "out"]) == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["build", "tiny/gpt2", "-o", "again"]) == 0
    told = refusal("build", "tiny/other", "-o", "more", capsys=capsys)
    assert "tiny/other is no folder here, and cannot be downloaded" in told
