"""What may be asked of a folder, and what contradicts itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from graphgen.bits import BlockSize
from graphgen.errors import GraphgenError, one_of, refuse, user_line
from graphgen.export.folders import Layout
from graphgen.export.precision import Precision
from graphgen.quantize import Scheme
from graphgen.quantize.sites import AccuracyLevel
from graphgen.targets import TargetName

Cache: TypeAlias = Literal["int8", "float32"]
Prompts: TypeAlias = Literal["int8", "int4"]

_OF_INT8 = ("plain", "cpu", "fp32")


@dataclass(kw_only=True)
class Options:
    """The options of `graphgen build` for a checkpoint; tuning fills in what is left open."""

    task: str | None
    head: str | None
    seed: int
    attentions: bool
    target: TargetName
    dtype: Precision
    layout: Layout
    quantize: Scheme | None
    block_size: BlockSize | None
    accuracy_level: AccuracyLevel | None
    full_range: bool
    kv: Cache | None
    prompts: Prompts | None
    tune: bool
    tune_for: tuple[int, int] | None
    text: Path | None
    run: bool
    verify: bool
    stop_after: int | None

    def check(self, source: Path, *, export: bool) -> None:
        """Raise GraphgenError where an option lacks another one, or contradicts it.

        `export` says that the graph of `source` is there already: nothing about it can be chosen.
        """
        who = "build_folder"
        one_of(who, Precision, dtype=self.dtype)
        one_of(who, Layout, layout=self.layout)
        one_of(who, Scheme | None, quantize=self.quantize)
        one_of(who, BlockSize | None, block_size=self.block_size)
        one_of(who, AccuracyLevel | None, accuracy_level=self.accuracy_level)
        one_of(who, Cache | None, kv=self.kv)
        one_of(who, Prompts | None, prompts=self.prompts)
        if self.tune_for is not None and min(self.tune_for) < 1:
            problem = f"tune_for is {self.tune_for}; it must be (tokens, rows), both at least 1"
            raise GraphgenError(f"{who}: {problem}{user_line()}")
        chosen = {
            "seed": self.seed != 0 and self.head is None,
            "task": export and self.task is not None,
            "head": export and self.head is not None,
            "attentions": export and self.attentions,
            "dtype": export and self.dtype != "fp32",
        }
        kind = "an export" if export else "a checkpoint"
        without = f"has no effect when building from {kind}; leave it out"
        refuse(
            f"build {source}", {f"--{name} {without}": is_set for name, is_set in chosen.items()}
        )
        scheme, no_run = self.quantize, not self.run
        layout, target, dtype = _OF_INT8
        plain = (self.layout, self.target, self.dtype) == _OF_INT8
        only = f"is for --layout {layout}, --target {target} and --dtype {dtype} only"
        of_int8 = {
            f"--kv {self.kv}": self.kv,
            f"--prompts {self.prompts}": self.prompts,
            "--tune": self.tune,
        }
        refuse(
            "build",
            {
                "--text needs --quantize or --kv int8; add that option": self.text is not None
                and not (scheme or self.kv == "int8" or self.tune),
                **{
                    f"{name} {only}; leave out other options": bool(value) and not plain
                    for name, value in of_int8.items()
                },
                "--tune-for needs --tune; add that option": self.tune_for is not None
                and not self.tune,
                "--block-size needs --quantize int4 or weights8; add that option": scheme
                not in ("int4", "weights8")
                and self.block_size is not None,
                "--accuracy-level needs --quantize int4; add that option": scheme != "int4"
                and self.accuracy_level is not None,
                f"--prompts {self.prompts} is for weights of four bits, and --quantize is {scheme};"
                " choose int4": self.prompts == "int8" and scheme not in (None, "int4"),
                "--full-range needs --quantize int8; add that option": self.full_range
                and scheme != "int8",
                "--no-run needs --quantize int8 or weights8; add that option": no_run
                and scheme not in ("int8", "weights8"),
                "--verify needs --quantize; add that option": self.verify and scheme is None,
                "--stop-after needs --quantize; add that option": self.stop_after is not None
                and scheme is None,
                "--text runs the model; leave out --no-run": no_run and self.text is not None,
            },
        )
        with_dtype = f"build {source} --dtype {self.dtype}"
        refuse(
            f"{with_dtype} --target {self.target}",
            {
                "onnxruntime on the CPU has no bf16 kernels: choose fp16 or fp32, or --target "
                "cuda": self.dtype == "bf16" and self.target != "cuda"
            },
        )
        problem = f"--quantize {scheme} reads float32 weights: leave out --dtype"
        refuse(with_dtype, {problem: scheme is not None and self.dtype != "fp32"})
