"""Damaged and malicious files, made from good ones by their structure and by their bytes."""

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]


def mutate(path: Path, random: Random) -> str:
    """Change one file, most often by its structure; return what was done to it."""
    draw = random.random()
    if draw < 0.04:
        return _elsewhere(path, random)
    structured = next((how for names, how in KINDS.items() if path.match(names)), None)
    if structured is None or draw < 0.3:
        return "bytes: " + _bytes(path, random)
    return structured(path, random)


def _elsewhere(path: Path, random: Random) -> str:
    """Something that is no regular file, or not there."""
    path.unlink()
    kind = random.choice(["missing", "pipe", "folder", "link to itself", "endless", "link out"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        out = {"link to itself": path.name, "endless": "/dev/zero", "link out": "/etc/passwd"}
        path.symlink_to(out[kind])
    return kind


def _bytes(path: Path, random: Random) -> str:
    data, told = bytearray(path.read_bytes()), []
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randrange(len(data) + 1)
        if random.random() < 0.5:
            at = min(at, random.choice([8, 64, 256]))  # headers are in front
        size = random.choice([1, 1, 2, 8, 64, 4096])
        kind = random.choice(
            ["flip", "flip", "set", "cut", "insert", "repeat", "zero", "remove", "empty", "append"]
        )
        part = data[at : at + size]
        new = {
            "flip": bytes(b ^ 1 << random.randrange(8) for b in part[:1]) + part[1:],
            "set": bytes(random.choice([0, 1, 127, 128, 255]) for _ in part),
            "insert": random.randbytes(size) + part,
            "repeat": part * random.choice([2, 2, 50]),
            "zero": bytes(len(part)),
            "append": part,
        }.get(kind, b"")
        data[at : at + size] = new
        if kind == "cut":
            del data[at:]
        elif kind == "append":
            data += random.randbytes(size)
        elif kind == "empty" and random.random() < 0.3:
            data.clear()
        told.append(f"{kind} {size} at {at}")
    path.write_bytes(data)
    return ", ".join(told)


HUGE = [0, -1, 1, 2, 3, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)]
WORDS = ["", "x", "a" * 100_000, "\x1b[31m\u202e\0\n", "../../etc/passwd", "/etc/passwd", "-1",
         "9" * 40, "9**9**9**9", "n/0", "ai.onnx", "com.microsoft", "\ufffd" * 9, "%s{0}", "1e999",
         "Identity", "If", "Constant", "batch", "mine", "F"]  # fmt: skip
NUMBERS = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e38, 1e-45]


def _model(path: Path, random: Random) -> str:
    """An ONNX file, changed where protobuf's descriptors say that something can be."""
    proto, told = onnx.load(path, load_external_data=False), []
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        with contextlib.suppress(DecodeError):  # too deep for protobuf to copy
            told.append(_large(proto, random) if random.random() < 0.06 else _field(proto, random))
    path.write_bytes(proto.SerializeToString())
    return ", ".join(told)


def _messages(message: Any, into: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """All messages in one, by their types."""
    into.setdefault(message.DESCRIPTOR.name, []).append(message)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                _messages(part, into)
    return into


def _field(proto: Any, random: Random) -> str:
    found = _messages(proto, {})
    kind = random.choice([*found, "NodeProto", "NodeProto", "AttributeProto", "AttributeProto"])
    message = random.choice(found.get(kind) or [proto])
    given = [field for field, _ in message.ListFields()]
    field = random.choice(given if given and random.random() < 0.8 else message.DESCRIPTOR.fields)
    where = f"{message.DESCRIPTOR.name}.{field.name}"

    def other() -> Any:
        """Something for this field: of another message, or malicious."""
        if field.message_type is not None:
            pool = found.get(field.message_type.name)
            return random.choice(pool) if pool else field.message_type._concrete_class()
        if random.random() < 0.5:
            pool = [getattr(m, field.name) for m in found[message.DESCRIPTOR.name]]
            pool = [one for x in pool for one in (x if field.is_repeated else [x])]
            if pool:
                return random.choice(pool)
        if field.enum_type is not None:
            return random.choice(field.enum_type.values).number
        if field.type == field.TYPE_BYTES:
            return random.randbytes(random.choice([0, 1, 3, 16, 5000]))
        if field.type == field.TYPE_STRING:
            return random.choice(WORDS)
        if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            return random.choice(NUMBERS)
        numbers = [*HUGE, *range(30)] if field.name in ("data_type", "elem_type") else HUGE
        limits = {field.TYPE_INT32: (-(2**31), 2**31), field.TYPE_UINT64: (0, 2**64)}
        low, high = limits.get(field.type, (-(2**63), 2**63))
        return random.choice([n for n in numbers if low <= n < high])

    if not field.is_repeated:
        if random.random() < 0.2:
            message.ClearField(field.name)
            return f"{where} removed"
        value = other()
        if field.message_type is None:
            setattr(message, field.name, value)
            return f"{where} = {str(value)[:40]!r}"
        getattr(message, field.name).CopyFrom(_copy(value))
        return f"{where} = another"
    items = getattr(message, field.name)
    size = len(items)
    if not size or (draw := random.random()) < 0.25:
        value = other()
        items.append(value if field.message_type is None else _copy(value))
        return f"{where} + {str(value)[:40]!r}"
    i, j = random.randrange(size), random.randrange(size)
    if draw < 0.45:
        del items[i]
        return f"{where}[{i}] removed"
    if draw < 0.55:
        items.append(items[i] if field.message_type is None else _copy(items[i]))
        return f"{where}[{i}] twice"
    if draw < 0.7:
        parts = list(items)
        parts[i], parts[j] = parts[j], parts[i]
        parts = [part if field.message_type is None else _copy(part) for part in parts]
        del items[:]
        items.extend(parts)
        return f"{where}[{i}] and [{j}] change places"
    if field.message_type is not None:
        items[i].CopyFrom(_copy(other()))
    else:
        items[i] = other()
    return f"{where}[{i}] = {str(items[i])[:40]!r}"


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _large(proto: onnx.ModelProto, random: Random) -> str:
    """A part of the model many times."""
    graph, count = proto.graph, random.choice([20, 200, 1000])
    nodes = [node for node in graph.node if node.input and node.output]
    if not nodes:
        return "no nodes"
    node = random.choice(nodes)
    kind = random.choice(["chain", "sizes", "attributes", "nested", "inputs", "unused", "fan"])
    if kind == "chain":  # each reads what the one before makes
        last = node.output[0]
        for i in range(count):
            made = graph.node.add(op_type=random.choice(["Identity", "Add", "Neg"]))
            made.input.extend([last] * (2 if made.op_type == "Add" else 1))
            made.output.append(last := f"chain_{i}")
        graph.output.add(name=last)
    elif kind == "sizes":
        first = graph.input[0] if graph.input else graph.input.add(name="none")
        tensor = first.type.tensor_type
        for i in range(count):
            tensor.shape.dim.add(**random.choice([{"dim_value": 1}, {"dim_param": f"d{i}"}]))
    elif kind == "attributes":
        for i in range(count):
            node.attribute.add(name=f"a{i}", type=onnx.AttributeProto.INT, i=i)
    elif kind == "nested":
        for i in range(min(count, 32)):
            body = onnx.GraphProto(name=f"g{i}", node=[node])
            body.output.add(name=node.output[0])
            outer = onnx.NodeProto(op_type="If", input=[node.input[0]], output=node.output)
            for name in ("then_branch", "else_branch")[: 1 if i > 5 else 2]:
                outer.attribute.add(name=name, type=onnx.AttributeProto.GRAPH, g=body)
            node.CopyFrom(outer)
    elif kind == "inputs":
        node.input.extend([node.input[0]] * count)
    elif kind == "unused":
        for i in range(count):
            graph.initializer.add(name=f"w{i}", data_type=1, dims=[1], float_data=[i])
    else:  # many that read the same
        for i in range(count):
            made = graph.node.add(op_type=node.op_type, input=node.input, domain=node.domain)
            made.attribute.extend(node.attribute)
            made.output.extend(f"fan_{i}_{k}" for k in range(len(node.output)))
            graph.output.add(name=made.output[0])
    return f"{kind} of {count} at {node.op_type}"


DEEP = "\ue000"  # replaced in the text
VALUES = [None, True, -1, 0, 1, 7, 2**31, 2**63, 10**400, 0.5, -1e308, math.nan, math.inf, "", "0",
          "x" * 100_000, "\x1b[31m\u202e\n", "\ud800", "../../etc/passwd", [], {}, [[]], [1, "a"],
          {"a": 1}, DEEP]  # fmt: skip


def _json(path: Path, random: Random) -> str:
    text, told = _tree(json.loads(path.read_text()), random)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return told


def _lines(path: Path, random: Random) -> str:
    """One line of a file of JSON lines."""
    lines = path.read_text().splitlines()
    i = random.randrange(len(lines))
    if random.random() < 0.1:
        lines[i] = random.choice(["", " ", "null", "[" * 100_000, "\x0c", "{}", lines[i] * 2])
        told = lines[i][:20]
    else:
        lines[i], told = _tree(json.loads(lines[i]), random)
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    return f"line {i}: {told}"


def _tree(tree: Any, random: Random) -> tuple[str, str]:
    """The text of a changed JSON document, and what was changed."""
    told = []
    for _ in range(random.choice([1, 1, 2, 4])):
        places = [(tree, key) for key in ([*tree] if isinstance(tree, dict) else range(len(tree)))]
        for holder, key in places:  # which grows
            inner = holder[key]
            if isinstance(inner, dict | list):
                keys = [*inner] if isinstance(inner, dict) else range(len(inner))
                places += [(inner, key) for key in keys]
        if not places:
            break
        holder, key = random.choice(places)
        kind = random.choice(["value", "value", "value", "remove", "rename", "swap", "number"])
        if kind == "remove":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[random.choice(["", "x", "__class__", str(key) + " ", "a" * 5000])] = holder[key]
        elif kind == "swap":
            other, place = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                holder[key] = json.loads(json.dumps(other[place]))
        elif kind == "number" and type(holder[key]) is int:
            holder[key] += random.choice([-1, 1, -holder[key], 4096, 2**20])
        else:
            holder[key] = deepcopy(random.choice(VALUES))  # which may be changed in turn
        told.append(f"{kind} at {key!r}"[:60])
    text = json.dumps(tree)
    deep = random.choice([("[", "]"), ('{"a":', "}")]), random.choice([30, 900, 100_000])
    (opening, closing), depth = deep
    text = text.replace(json.dumps(DEEP), opening * depth + "1" + closing * depth)
    if random.random() < 0.1 and text.startswith("{") and isinstance(tree, dict) and tree:
        twice = {random.choice([*tree]): random.choice(VALUES[:-1])}
        text = json.dumps(twice)[:-1] + ", " + text[1:]
        told.append("a key twice")
    return text, ", ".join(told)


def _safetensors(path: Path, random: Random) -> str:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text, told = _tree(json.loads(data[8 : 8 + length]), random)
    header = text.encode(errors="surrogatepass")
    size = random.choice([*[len(header)] * 9, len(header) + 1, 2**63, 2**64 - 1, 2**32])
    path.write_bytes(size.to_bytes(8, "little") + header + data[8 + length :])
    return told


def _arrays(path: Path, random: Random) -> str:
    """The arrays of an .npz file."""
    arrays: dict[str, Any] = dict(np.load(path))
    name = random.choice([*arrays])
    array = arrays[name]
    changes: list[Callable[[], Any]] = [
        lambda: array.astype(random.choice(["f8", "f2", "i8", "u1", "?", "c8", "S3", "M8[s]"])),
        lambda: array.reshape(-1),
        lambda: array.reshape(-1)[:0],
        lambda: np.atleast_1d(array)[..., :0],
        lambda: array * random.choice(NUMBERS),
        lambda: array.T,
        lambda: np.float32(3),
        lambda: array.astype(">f4"),
        lambda: np.zeros(array.size, [("a", "f4"), ("b", "i4")]),
        lambda: np.zeros([1] * 32, "f4"),
    ]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arrays[name] = random.choice(changes)()
    if random.random() < 0.2:
        arrays[random.choice(["", "y", "../a", "x" * 200])] = arrays.pop(name)
    np.savez(path, **arrays)
    return f"{name} is {arrays.get(name, array).dtype}{arrays.get(name, array).shape}"


KINDS: dict[str, Callable[[Path, Random], str]] = {
    "*.onnx": _model,
    "*.json": _json,
    "*.jsonl": _lines,
    "*.safetensors": _safetensors,
    "*.npz": _arrays,
}
