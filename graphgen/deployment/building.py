"""How a folder is made of a checkpoint or an export, step by step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from rich.console import Console

from graphgen.deployment.genai import search_of
from graphgen.deployment.options import Options
from graphgen.deployment.sources import is_gguf
from graphgen.deployment.tuning import TUNING, Decoding, Tuning
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL, PROMPTS, PROMPTS_KEY, write_folder, write_genai
from graphgen.export.like import decoder_like
from graphgen.export.precision import DTYPES
from graphgen.files import read_json
from graphgen.generation.caches import PRESENT
from graphgen.generation.config import read_fields, unreached
from graphgen.generation.options import Options as Choices, UnmetError, read_options
from graphgen.generation.quality import Quality
from graphgen.graph import count_nodes, parameters
from graphgen.models.published import from_folder
from graphgen.models.published.folder import context
from graphgen.models.published.forms import FIELDS as FEW
from graphgen.models.published.fresh import Head
from graphgen.models.published.gguf import open_gguf
from graphgen.models.published.gguf_like import differences
from graphgen.models.published.language_model import PART_OF
from graphgen.models.published.tokenizer_classes import class_remarks
from graphgen.models.published.tokenizer_files import check_tokenizer, unread
from graphgen.models.published.wav2vec2 import SAMPLES
from graphgen.models.published.windows import windows
from graphgen.nn import count_parameters
from graphgen.passes import optimize
from graphgen.quantize.folder import Quantized, quantized, reports
from graphgen.quantize.kept import keep_bits
from graphgen.quantize.prompts import LEAST
from graphgen.runtime import OPTIONS_KEY
from graphgen.subnormals import FLUSH
from graphgen.version import VERSION

if TYPE_CHECKING:
    from rich.table import Table

_TUNED = (512, 1)


@dataclass
class Built:
    """What a folder was built of, and what there is to tell of it."""

    output: Path
    kind: str
    """The model_type, or the name of an export."""
    parameters: int
    nodes: int
    """Of all graphs but that for prompts."""
    remarks: list[str]
    quantized: dict[str, Quantized] = field(repr=False)
    """By graph: its layers in few bits, and what they cost."""
    costs: dict[str, Quality] = field(repr=False)
    """By graph and change: the cost on a third of the text, or on random tokens."""
    tuning: Tuning | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for docs/build.schema.json."""
        return {
            "output": str(self.output),
            "kind": self.kind,
            "nodes": self.nodes,
            "graphgen": VERSION,
            "parameters": self.parameters,
            "remarks": self.remarks,
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "tuning": self.tuning.to_json() if self.tuning else None,
        }

    def told(self) -> "Iterator[Table | str]":
        """The same for people, as tables and lines."""
        for name, one in self.quantized.items():
            if name != PROMPTS:  # a line says enough of the same layers in more bits
                yield one.report.table()
                yield from one.remarks(name)
        yield from (f"{name}: {cost}" for name, cost in self.costs.items())
        if self.tuning is not None:
            yield from self.tuning.told()
        yield from self.remarks
        yield f"{self.output}: {self.kind}, {self.parameters:,} parameters, {self.nodes} nodes"


class Building:
    """One folder as it is built: each step changes its graphs, or adds to what is told of them.

    `source` has the weights, or is an export. `folder` has the configuration and the tokenizer;
    with `like`, it is another's.
    """

    def __init__(
        self, options: Options, source: Path, output: Path, folder: Path, *, like: bool
    ) -> None:
        self._like, self._gguf = like, source if is_gguf(str(source)) else None
        self._export = like and self._gguf is None
        options.check(source, export=self._export)
        self._options, self._path, self._output, self._folder = options, source, output, folder
        self._head = None if options.head is None else Head.read(options.head)
        self._source = _of_export(source, folder) if self._export else self._of_checkpoint()
        self._search: dict[str, Any] = {}  # how onnxruntime-genai chooses tokens
        self._examine()
        self._tokens = windows(folder, options.text)  # (N, T); none without a text
        self._context = context(folder)
        self._tuning = Tuning(options.tune_for or _TUNED, self._context) if options.tune else None
        self._graphs: dict[str, ir.Model] = {}
        self._quantized: dict[str, Quantized] = {}
        self._costs: dict[str, Quality] = {}

    def run(self) -> Built:
        """Build the folder, and report on it."""
        self._optimize()
        self._quantize()
        self._keep_bits()
        self._make_cache()
        measured = self._costs or any(
            one.effect and not one.effect.random for one in self._quantized.values()
        )
        self._make_prompts()
        if len(self._tokens) and not measured:
            raise GraphgenError(f"build: {self._source.kind} reads more than text; omit --text")
        self._write()
        graphs = [model for name, model in self._graphs.items() if name != PROMPTS]
        return Built(
            output=self._output,
            kind=self._source.kind,
            parameters=self._source.parameters,
            nodes=sum(map(count_nodes, graphs)),
            remarks=self._source.remarks,
            quantized=self._quantized,
            costs=self._costs,
            tuning=self._tuning,
        )

    def _of_checkpoint(self) -> "_Source":
        options = self._options
        found = from_folder(
            self._folder,
            options.task,
            dtype=DTYPES[options.dtype] or ir.DataType.FLOAT,
            attentions=options.attentions,
            head=self._head,
            seed=options.seed,
            gguf=self._gguf,
        )
        changed = options.quantize is not None or options.dtype != "fp32"
        if found.few_bits and changed and not found.again:
            name = "--dtype" if options.quantize is None else "--quantize"
            problem = f"weights of the checkpoint are in few bits ({found.few_bits})"
            raise GraphgenError(f"build {self._path}: {problem}: leave out {name}")
        kept = "" if changed else found.few_bits
        remarks = [*found.remarks]
        if ignored := found.config.ignored:
            fields = ", ".join(ignored)
            remarks.append(f"{found.config.where}: {fields} without effect on the results: ignored")
        if self._gguf is not None and self._like:
            remarks += differences(open_gguf(self._gguf), self._folder)
        if found.fresh is not None:
            remarks.append(found.fresh.line())
        own = found.config.fields
        own = own if own.pop(PART_OF, None) else {}
        count = count_parameters(found.module)
        return _Source(found.config.model_type, found.models, count, remarks, kept, own)

    def _examine(self) -> None:
        """Look at what stands beside the weights: refuse it, or add remarks."""
        source, folder = self._source, self._folder
        if self._options.layout == "genai" and len(source.models) > 1:
            parts = " and ".join(source.models)
            raise GraphgenError(
                f"{folder}: --layout genai is for decoders only, and {source.kind} has {parts}; "
                "choose --layout plain"
            )
        inputs = [x.name for model in source.models.values() for x in model.graph.inputs]
        if SAMPLES not in inputs:  # what is made of sound is spelled by vocab.json
            check_tokenizer(folder)
            source.remarks.extend([*unread(folder), *class_remarks(folder)])
        outputs = [y.name for model in source.models.values() for y in model.graph.outputs]
        if any(str(name).startswith(PRESENT) for name in outputs):
            try:
                asked = read_options(folder)
                asked.fit(asked.vocabulary)
                source.remarks.extend(filter(None, [unreached(folder)]))
                if self._options.layout == "genai":
                    self._search, lacking = search_of(asked)
                    source.remarks.extend(_lacking(asked, lacking))
            except UnmetError as error:
                source.remarks.append(f"graphgen generate refuses the folder as it stands: {error}")
            except GraphgenError as error:
                raise GraphgenError(f"{folder}: {error}") from error

    def _optimize(self) -> None:
        # A cache goes in place in an operator that WebGPU lacks: what follows is made for WebGPU.
        later = self._options.layout == "genai" and self._options.target == "webgpu"
        target: Any = "cpu" if later else self._options.target
        for name, model in self._source.models.items():
            path = str(Path(MODEL).with_name(name))
            self._graphs[path] = optimize(model, target=target).model
            if not self._export and (target, self._options.dtype) == ("cpu", "fp32"):
                # No result of a family depends on numbers below 2⁻¹²⁶; a foreign graph's may.
                self._graphs[path].metadata_props[OPTIONS_KEY] = json.dumps({FLUSH: "1"})

    def _quantize(self) -> None:
        options = self._options
        if self._tuning is not None:
            self._decoding("build --tune")  # or an error, before all work
            self._tuning.blocks(options, self._graphs[MODEL])
        if options.quantize is None:
            return
        how: dict[str, Any] = {
            "target": options.target,
            "block_size": options.block_size,
            "full_range": options.full_range,
            "run": options.run,
            "verify": options.verify,
            "stop_after": options.stop_after,
            "progress": Console(stderr=True).is_terminal,
        }
        if options.accuracy_level is not None:
            how["accuracy_level"] = options.accuracy_level
        for name, model in self._graphs.items():
            self._quantized[name] = quantized(model, options.quantize, self._tokens, **how)
            self._graphs[name] = self._quantized[name].model

    def _keep_bits(self) -> None:
        """Let a checkpoint of few bits keep them."""
        if not self._source.packed:
            return
        how: dict[str, Any] = {"target": self._options.target, "method": self._source.packed}
        for name, model in self._graphs.items():
            self._quantized[name] = Quantized(*keep_bits(model, **how))
            self._graphs[name] = self._quantized[name].model

    def _decoding(self, who: str) -> Decoding:
        return Decoding(who, self._source.kind, self._graphs, self._tokens, self._context)

    def _make_cache(self) -> None:
        """Let the cache hold int8, if that is asked for or measured to pay."""
        asked, tuning = self._options.kv, self._tuning
        if asked != "int8" and (tuning is None or asked is not None):
            return
        decoding = self._decoding("build --tune" if tuning else f"build --kv {asked}")
        made = decoding.int8_cache() if tuning is None or asked else tuning.cache(decoding)
        if made is not None:
            self._graphs = {MODEL: made}
            self._costs[f"{MODEL}: int8 cache"] = decoding.cost(made)

    def _make_prompts(self) -> None:
        """Add a second graph that reads prompts in int8, if asked for or measured to pay."""
        asked, tuning = self._options.prompts, self._tuning
        if asked != "int8" and (tuning is None or asked is not None):
            return
        who = "build --tune" if asked is None else f"build --prompts {asked}"
        decoding = self._decoding(who)
        second, report, least = (
            tuning.prompts(decoding) if tuning else (*decoding.int8_prompts(), LEAST)
        )
        if asked and least is None:  # although it does not pay here
            least = LEAST
            second, report = (second, report) if second else decoding.int8_prompts()
        if least is not None:
            second.metadata_props[PROMPTS_KEY] = str(least)
            self._graphs[PROMPTS], self._quantized[PROMPTS] = second, Quantized(second, report)
            self._costs[f"{PROMPTS}: int8 prompts"] = decoding.cost(decoding.model, second)

    def _texts(self) -> dict[str, str]:
        """The files of text that the checkpoint's own folder does not have as they are here."""
        texts = reports(self._quantized)
        if self._tuning is not None:
            texts[TUNING] = json.dumps(self._tuning.to_json(), indent=2) + "\n"
        fields = self._source.fields or read_json(self._folder / "config.json")
        # By these, clients would look for tensors that the folder does not have.
        packed = [name for name in FEW if fields.pop(name, None) is not None]
        if self._head is not None:
            fields |= self._head.fields()
            for name in ("architectures", *(["num_labels"] if self._head.labels else [])):
                fields.pop(name, None)
        if packed or self._head is not None or self._source.fields:
            texts["config.json"] = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        return texts

    def _write(self) -> None:
        folder, output, texts = self._folder, self._output, self._texts()
        if self._options.layout == "genai":
            [only] = self._graphs.values()
            target = self._options.target
            fields, search = read_fields(folder), self._search
            write_genai(folder, output, only, fields, texts, target=target, search=search)
        else:
            write_folder(folder, output, self._graphs, texts)


@dataclass
class _Source:
    """Graphs by their names in a folder, and what to say about them."""

    kind: str
    models: Mapping[str, ir.Model]
    parameters: int
    remarks: list[str]
    packed: str = ""  # the method of a checkpoint of few bits, such as gptq
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json, if they are others


def _lacking(asked: Choices, names: Sequence[str]) -> Iterator[str]:
    """Lines on what onnxruntime-genai does otherwise than the folder says."""
    if names:
        yield (
            f"onnxruntime-genai generates without {', '.join(names)}: genai_config.json has no "
            "place for that"
        )
    if not asked.eos:
        yield (
            "the checkpoint names no token that ends a row: onnxruntime-genai ends rows at the "
            "padding token, or at token 0"
        )


def _of_export(path: Path, like: Path) -> _Source:
    found = decoder_like(path, like)
    weights = parameters(found.model.graph).values()
    count = sum(prod(value.shape.numpy()) for value in weights if value.shape is not None)
    remark = f"{path.name}: {found.line()}"
    return _Source(path.name, {"model.onnx": found.model}, count, [remark])
