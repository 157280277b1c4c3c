"""What a line of a random program may be: each function draws one, and tries it.

They draw what is defined everywhere: see random_programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from random_programs import Program


def arithmetic(p: Program) -> None:
    """x + y and the like, arrays, numbers and sizes on either side."""
    symbol = p.one("+", "-", "*", "/", "//", "%", "**")
    jumps = symbol in ("//", "%")
    name = p.tensor(exact=jumps) or "x0"
    other = p.operand(name, exact=jumps, safe=jumps)
    pair = [name, other]
    if symbol == "**":
        pair = [name, p.one("2", "3", "1", "0", "2.0", "0.5", "-1", other)]
    elif not jumps and p.chance(2):
        pair.reverse()
    p.attempt(f"{pair[0]} {symbol} {pair[1]}", rounded=symbol in ("/", "**"))


def comparison(p: Program) -> None:
    if name := p.tensor(exact=True):
        pair = [name, p.operand(name, exact=True)]
        if p.chance(2):
            pair.reverse()
        p.attempt(f"{pair[0]} {p.one('==', '!=', '<', '<=', '>', '>=')} {pair[1]}")


def bits(p: Program) -> None:
    if name := p.tensor("biu"):
        if p.chance(4):
            p.attempt(f"~{name}")
            return
        pair = [name, p.operand(name, exact=True)]
        if p.chance(2):
            pair.reverse()
        p.attempt(f"{pair[0]} {p.one('&', '|', '^')} {pair[1]}")


SMOOTH = ("exp", "tanh", "sin", "cos", "sqrt", "log")
NUMPY_ONLY = ("np.log1p", "np.arctan2", "np.cbrt")


def unary(p: Program) -> None:
    kind = p.one("neg", "abs", "numpy", "ops", "jump", "other")
    if kind in ("neg", "abs"):
        if name := p.tensor():
            p.attempt(p.one(f"-{name}", f"ops.neg({name})") if kind == "neg" else f"abs({name})")
    elif kind == "numpy" and (name := p.tensor("fffi")):
        p.attempt(f"{p.one('np', 'ops')}.{p.one(*SMOOTH)}({name})", rounded=True)
    elif kind == "ops" and (name := p.tensor("f")):
        called = p.one("sigmoid", "erf", "relu", "gelu", "silu", "elu", "softplus", "leaky_relu")
        p.attempt(f"ops.{called}({name})", rounded=True)
    elif kind == "jump" and (name := p.tensor("f", exact=True)):
        p.attempt(
            p.one(
                f"np.floor({name})",
                f"np.ceil({name})",
                f"np.rint({name})",
                f"np.sign({name})",
                f"ops.round({name})",
                f"np.isnan({name})",
            )
        )
    elif name := p.tensor("f"):
        p.attempt(f"{p.one('np.square', 'np.positive', *NUMPY_ONLY[::2])}({name})", rounded=True)


def cast(p: Program) -> None:
    to = p.one("float32", "int64", "float16", "int32", "uint8", "bool", "float64")
    whole = to in ("int64", "int32", "uint8", "bool")
    if name := p.tensor(exact=whole, finite=whole):
        if to == "uint8" and p.array(name).min(initial=0) < 0:
            return  # undefined
        spelled = p.one(
            f"'{to}'",
            f"np.dtype('{to}')",
            *([] if to == "uint8" else [f"gg.{to}".replace("bool", "bool_")]),
        )
        code = p.one(f"{name}.astype({spelled})", f"ops.cast({name}, to={spelled})")
        p.attempt(code, rounded=to == "float16" and name in p.inexact)


def sizes(p: Program) -> None:
    p.attempt(p.size())


def index(p: Program) -> None:
    """Every kind of key that numpy has."""
    if not (name := p.tensor(rank=1) or p.tensor()):
        return
    shape, keys, used = p.array(name).shape, list[str](), False
    if p.chance(8) and name not in p.inexact and p.array(name).dtype.kind != "b":
        p.attempt(f"{name}[{name} > {p.one('0', '1', '-1')}]")
        return
    axis = 0
    while axis < len(shape) and (not keys or not p.chance(3)):
        n = shape[axis]
        kind = p.one(
            "slice", "int", "slice", "none", "dots", "ints", "bools", "value", "size", "odd"
        )
        if kind == "slice":
            bound = [p.one("", str(p.number(-n - 1, n + 1))) for _ in range(2)]
            step = p.one("", "", ":-1", ":2", ":-2", ":1")
            keys.append(":".join(bound) + step)
        elif kind == "int":
            plain = p.number(-n, max(n - 1, 0))
            keys.append(p.one(str(plain), f"np.int64({plain})"))
        elif kind == "none":
            keys.append("None")
            axis -= 1
            if len(keys) > 5:
                break
        elif kind == "dots" and not used:
            used = True
            keys.append("...")
            axis = max(axis, len(shape) - p.number(1, 2)) - 1
        elif kind == "ints" and n:
            listed = [p.number(-n, n - 1) for _ in range(p.number(1, 3))]
            shaped = p.one("", "", "[:, None]")
            keys.append(p.one(str(listed), f"np.array({listed}){shaped}"))
        elif kind == "bools":
            listed = [p.chance(2) for _ in range(n)]
            keys.append(f"np.array({listed}, bool)")
        elif kind == "value" and (i := p.tensor("iub")):
            keys.append(p.one(i, f"{i} % {n}") if n and p.array(i).dtype.kind != "b" else i)
        elif kind == "size":
            size = p.size()
            keys.append(p.one(f":{size}", f"{size}:", size, f"{size}::-1"))
        elif kind == "odd" and p.chance(3):
            keys.append(p.one("1.0", "'a'", str(n), str(-n - 1), "True", "..., ...", "::0"))
        axis += 1
    if keys:
        p.attempt(f"{name}[{', '.join(keys)}]")


def reduction(p: Program) -> None:
    called = p.one("sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum_exp")
    finite = called in ("max", "min")  # the runtime may pass over NaN
    kinds = "f" if called in ("mean", "l2", "log_sum_exp") else "fffi"
    if name := p.tensor(kinds, rank=1, finite=finite):
        n = p.array(name).ndim
        axes = p.axes(n)
        axes = [*axes, axes[0] - n if axes and axes[0] >= 0 else 0] if p.chance(12) else axes
        plain = f", {axes[0]}" if axes else ""
        axis = p.one("", plain, f", {axes}", f", {axes}", f", {axes}, noop_with_empty_axes=1")
        keep = p.one("", ", keepdims=0", ", keepdims=False")
        exact = called in ("sum", "max", "min", "l1", "sum_square")
        p.attempt(f"ops.reduce_{called}({name}{axis}{keep})", rounded=not exact)


def position(p: Program) -> None:
    """Where the largest is, running sums, and the k largest."""
    if not (name := p.tensor("fi", exact=True, rank=1, finite=True, filled=True)):
        return
    axis = p.axis(name)
    k = p.number(1, p.array(name).shape[axis])
    p.attempt(
        p.one(
            f"ops.argmax({name}, axis={axis})",
            f"ops.argmax({name}, axis={axis}, keepdims=0, select_last_index=1)",
            f"ops.cumsum({name}, {axis})",
            f"ops.cumsum({name}, {axis}, reverse=1, exclusive=1)",
            f"ops.top_k({name}, {k}, axis={axis})",
            f"ops.top_k({name}, {name}.shape[{axis}], axis={axis}, largest=0)",
        )
    )


def layout(p: Program) -> None:
    if not (name := p.tensor(rank=1)):
        return
    x = p.array(name)
    n = x.ndim
    axis = p.number(-n, n - 1)
    other = p.alike(name)
    sizes_ = [f"{name}.shape[{i}]" for i in range(n)]
    perm = list(np.random.default_rng(p.number(0, 255)).permutation(n).tolist())
    half = f"{sizes_[axis]} // 2"
    p.attempt(
        p.one(
            f"ops.concat([{name}, {other}], axis={axis})",
            f"ops.concat({name}, {name}, axis={axis})",
            f"ops.stack([{name}, {other}], axis={axis})",
            f"ops.transpose({name}, perm={perm})",
            f"ops.reshape({name}, [-1])",
            f"ops.reshape({name}, [{', '.join([*sizes_[:-1], '1', sizes_[-1]])}])",
            f"ops.reshape({name}, [{' * '.join(sizes_)}])",
            f"ops.unsqueeze({name}, [{axis}])",
            f"ops.squeeze({name}, [{axis}])",
            f"ops.expand({name}, [2, {', '.join(sizes_)}])",
            f"ops.split({name}, axis={axis}, num_outputs={p.number(1, 2)})",
            f"ops.split({name}, [{half}, {sizes_[axis]} - {half}], axis={axis}, num_outputs=2)",
        )
    )


def choice(p: Program) -> None:
    if not (name := p.tensor()):
        return
    c, other = p.tensor("b") or "True", p.operand(name)
    low, high = p.literal(p.array(name).dtype), p.literal(p.array(name).dtype)
    p.attempt(
        p.one(
            f"ops.where({c}, {name}, {other})",
            f"ops.where({c}, {other}, {name})",
            f"ops.clip({name}, {low}, {high})",
            f"ops.clip({name}, {low})",
            f"np.maximum({name}, {other})",
            f"np.minimum({other}, {name})",
            f"ops.maximum({name}, {other})",
            f"ops.where({name} == {name}, {name}, {low})"
            if name not in p.inexact
            else name + "[...]",
        )
    )


def lookup(p: Program) -> None:
    name, i = p.tensor(rank=1), p.tensor("i")
    if name and i:
        n = p.array(name).ndim
        axis = p.number(-n, n - 1)
        size = p.one(f"{name}.shape[{axis}]", str(p.array(name).shape[axis] or 1))
        if p.array(name).shape[axis]:
            p.attempt(f"ops.gather({name}, {i} % {size}, axis={axis})")


def product(p: Program) -> None:
    """Matrix products, softmax and norms."""
    if not (name := p.tensor("f", rank=1, filled=True)):
        return
    x = p.array(name)
    others = [
        o
        for o in p.names
        if p.array(o).dtype == x.dtype and p.array(o).ndim and p.array(o).shape[-1] == x.shape[-1]
    ]
    other = p.one(*others)
    m = p.array(other).ndim
    turned = f"ops.transpose({other}, perm={[*range(m - 2), m - 1, m - 2]})"
    axis = p.number(-x.ndim, x.ndim - 1)
    p.attempt(
        p.one(
            f"{name} @ {turned}" if m > 1 else f"{name} @ {other}",
            f"{name} @ {other}",
            f"np.matmul({name}, {other})",
            f"ops.softmax({name}, axis={axis})",
            f"ops.log_softmax({name}, axis={axis})",
            f"ops.layer_norm({name})",
            f"ops.rms_norm({name})",
        ),
        rounded=True,
    )


def constant(p: Program, *shape: int) -> str:
    """Source of an array of small whole numbers."""
    count, shift = int(np.prod(shape)), p.number(0, 5)
    made = f"(np.arange({count}) * 3 + {shift}) % 5 - 2"
    return f"np.array({made}, 'float32').reshape({shape})"


def convolution(p: Program) -> None:
    """Convolutions and pooling of (N, C, ...)."""
    # Of infinities, the runtime's MaxPool gives the largest finite number.
    if not (name := p.tensor("f", rank=3, filled=True, finite=True)):
        return
    x = p.array(name)
    channels, n = x.shape[1], x.ndim - 2
    kernel = [p.number(1, 3) for _ in range(n)]
    options = [
        p.one("", f", strides={[p.number(1, 2) for _ in range(n)]}"),
        p.one("", f", dilations={[p.number(1, 2) for _ in range(n)]}"),
    ]
    inside = [p.number(0, k - 1) for k in [*kernel, *kernel]]
    pads = p.one("", f", pads={inside}")
    auto = p.one(pads, pads, ", auto_pad='SAME_UPPER'", ", auto_pad='SAME_LOWER'")
    group = p.one(1, channels, 1)
    window = f"({name}, kernel_shape={kernel}{''.join(options[:1])}"
    ceil = p.one("", "", ", ceil_mode=1")
    typed = f".astype('{x.dtype}')"
    before = constant(p, 2 * group, channels // group, *kernel) + typed
    behind = constant(p, channels, 2, *kernel) + typed
    b = p.one("", ", " + constant(p, 2 * group) + typed)
    p.attempt(
        p.one(
            f"ops.conv({name}, {before}{b}{''.join(options)}{auto}, group={group})",
            f"ops.max_pool{window}{options[1]}{auto or ceil})",
            f"ops.average_pool{window}{auto})",
            f"ops.average_pool{window}{pads}, count_include_pad=1)",
            f"ops.conv_transpose({name}, {behind}{''.join(options)}{pads}, group={group})",
            f"ops.global_average_pool({name})",
            f"ops.global_max_pool({name})",
        ),
        rounded=True,
    )


def condition(p: Program) -> None:
    """One of two programs; each may use what is around it."""
    name, asked = p.tensor(), p.tensor("f", exact=True, rank=1, filled=True, finite=True)
    if not name or not asked:
        return
    at = ", ".join("0" for _ in p.array(asked).shape)
    test = p.one(
        f"{asked}[{at}] > {p.one('0', '1', '-1')}",
        f"ops.reduce_max({asked}, keepdims=0) < {p.one('2', '0')}",
        f"{asked}.shape[0] > {p.one('2', '1', '3')}",
        p.one("True", f"({asked} == {asked})[{at}]"),
    )
    ways = [f"{name} + {name}", f"ops.concat({name}, {name}, axis=0)", name, f"{name}[:1]"]
    ways = ways if p.array(name).ndim else [f"{name} + {name}", f"{name} * {name}", name]
    one, other = p.one(*ways), p.one(*ways[::-1])
    more = p.one("", "", f", {asked}")
    p.attempt(f"ops.cond({test}, lambda: ({one}{more or ','}), lambda: ({other}{more or ','}))")


def steps(p: Program) -> None:
    """A loop along an axis, with one state."""
    if not (name := p.tensor("fi", rank=1, filled=True)):
        return
    axis, x = p.axis(name), p.array(name)
    small = [n for n in p.names if p.array(n).dtype == x.dtype and not p.array(n).ndim]
    outer = p.one("t", *small)
    after = p.one("s + t", "t - s", "np.maximum(s, t)", f"s + {outer}", "t")
    y = p.one("s * t", "s", f"t + {outer}", "s - t", "ops.where(t > s, s, t)")
    if ">" in y and name in p.inexact:
        y = "s + t"
    way = p.one("", f", axis={axis}, reverse=True", f", axis={axis}")
    first = f"ops.gather({name}, {p.one(0, -1)}, axis={axis if way else 0})"
    code = f"ops.scan(lambda s, t: (({after},), ({y},)), [{first}], [{name}]{way})"
    p.attempt(f"{code}[{p.one(0, 1)}]")


def rows(p: Program) -> None:
    """Padding, repeating, triangles, one-hot rows, elements by place."""
    if not (name := p.tensor("fi", rank=1)):
        return
    x = p.array(name)
    n, axis = x.ndim, p.axis(name)
    pads = [p.number(-1 if size > 2 else 0, 2) for size in [*x.shape, *x.shape]]
    inside = [p.number(0, max(size - 1, 0)) for size in [*x.shape, *x.shape]]
    size = x.shape[axis]
    numbers = p.tensor("i", finite=True)
    choices = [
        f"ops.pad({name}, {pads}{p.one('', ', 3')})",
        f"ops.tile({name}, {[p.one(1, 2, 1, 0) for _ in range(n)]})",
        f"ops.flatten({name}, axis={axis})",
        f"ops.arange({name}.shape[{axis}])",
        f"ops.zeros_like({name})",
        f"ops.non_zero({name})" if name not in p.inexact else f"ops.abs({name})",
    ]
    if size:
        choices.append(f"ops.pad({name}, {inside}, mode='{p.one('edge', 'reflect')}')")
        choices.append(f"ops.gather_elements({name}, ops.zeros_like({name}).astype('int64'))")
        updates = f"ops.scatter_elements({name}, ops.zeros_like({name}).astype('int64'), {name}"
        if size == 1:  # else the order of equal places is not defined
            choices.append(f"{updates}, axis={axis})")
        if name not in p.inexact:
            choices.append(f"{updates}, axis={axis}, reduction='{p.one('add', 'max', 'min')}')")
    if numbers:
        choices.append(f"ops.one_hot({numbers} % 3, {p.one(3, 5)})")
    if n > 1:
        choices.append(f"ops.trilu({name}, {p.number(-1, 1)}, upper={p.number(0, 1)})")
        letters = "abcdefgh"[:n]
        choices.append(
            f"ops.einsum({name}, {name}, equation='{letters},{letters}->{letters[:-1]}')"
        )
        choices.append(f"ops.einsum({name}, equation='{letters}->{letters[::-1]}')")
    p.attempt(p.one(*choices))


def module(p: Program) -> None:
    """A module of nn."""
    if not (name := p.tensor("f", rank=1, filled=True, single=not p.chance(6))):
        return
    d, me, n = p.values[name].shape[-1], f"self.part{len(p.parts)}", p.array(name).ndim
    if not isinstance(d, int):
        return
    heads = 2 if d % 2 == 0 else 1
    kind, groups = p.one("gru", "lstm", "rnn"), p.one(1, d)
    placed = f"placement='{p.one('pre', 'post', 'sandwich')}', norm='{p.one('layer', 'rms')}'"
    flag = p.one("False", "True")
    rest = f", padding={p.number(0, 1)}" if p.chance(2) else f", causal={flag}"
    made = [
        f"nn.Linear({d}, 3, bias={flag})",
        f"nn.LayerNorm({d}, bias={flag})",
        f"nn.RMSNorm({d}, unit_offset={flag})",
        f"nn.FeedForward({d}, 5, activation='{p.one('gelu', 'relu', 'silu')}', gated={flag})",
    ]
    if n == 3:
        sides = f"stride={p.number(1, 2)}, dilation={p.number(1, 2)}, groups={groups}"
        made += [
            f"nn.Attention({d}, num_heads={heads}, causal={flag}, kv_heads=1)",
            f"nn.Attention({d}, num_heads={heads}, softcap={p.one(0.0, 2.0)})",
            f"nn.EncoderLayer({d}, num_heads={heads}, hidden=5, {placed})",
            f"nn.Encoder({d}, layers=2, num_heads={heads}, hidden=5, {placed}, causal={flag})",
            f"nn.Convolution({d}, {2 * d}, kernel={p.number(1, 3)}, {sides}{rest})",
            f"nn.Recurrent({d}, 3, kind='{kind}', bidirectional={flag})",
            f"nn.LearnedPositions(5, {d})",
        ]
        if name not in p.inexact:  # where scores are equal but for rounding, any expert may be
            made.append(f"nn.MixtureOfExperts({d}, 5, experts=3, k={p.number(1, 2)})")
        if d % 2 == 0:
            made += [f"nn.SinusoidalPositions({d})", "nn.GatedLinearUnit()"]
    if n == 2:
        made.append(f"nn.Modulation({d}, 3, count={p.number(1, 2)})")
    drawn = p.one(*made)
    called = f"{me}({name})"
    if "Recurrent" in drawn:
        called = f"{me}({name})[0]"
    p.attempt(called, rounded=True, part=f"{me} = {drawn}")


def between(p: Program) -> None:
    """A module of two tensors, and a table of rows."""
    if not (name := p.tensor("f", rank=3, filled=True, single=True)):
        if i := p.tensor("i"):
            me = f"self.part{len(p.parts)}"
            p.attempt(f"{me}({i} % 5)", part=f"{me} = nn.Embedding(5, 3)", rounded=True)
        return
    d, me = p.values[name].shape[-1], f"self.part{len(p.parts)}"
    others = [o for o in p.names if (y := p.array(o)).ndim == 3 and y.dtype == np.float32]
    other = p.one(*(o for o in others if p.array(o).size), name)
    m = p.values[other].shape[-1]
    if not isinstance(d, int) or not isinstance(m, int):
        return
    kind = p.one("CrossAttentionLayer", "DecoderLayer")
    options = f"memory_features={m}, num_heads=1, hidden=4"
    p.attempt(f"{me}({name}, {other})", rounded=True, part=f"{me} = nn.{kind}({d}, {options})")


LINES = (
    arithmetic,
    index,
    arithmetic,
    index,
    comparison,
    bits,
    unary,
    cast,
    sizes,
    reduction,
    position,
    layout,
    layout,
    choice,
    lookup,
    product,
    module,
    module,
    between,
    convolution,
    convolution,
    condition,
    steps,
    rows,
    rows,
)
"""What a line may be."""
