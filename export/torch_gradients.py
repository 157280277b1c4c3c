"""Whether what torch exports of a module has the gradients of the module."""

import contextlib
from typing import Any

from graphgen.errors import GraphgenError, user_line
from graphgen.export.torch_results import Call, is_random, tensors_in, unchanged
from graphgen.export.uses import listed

_APART = 1e-3  # of the norm of a gradient: the program has torch's own operators


def expect_plain(module: Any) -> None:
    """Raise GraphgenError for a module whose graph would say less than it does."""
    who = f"from_torch: {type(module).__name__}"
    for name, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None:
            raise GraphgenError(
                f"{who}: {name or 'it'} has max_norm={part.max_norm}, and so changes its rows when "
                f"they are read: make it without{user_line()}"
            )
        if projected := getattr(part, "proj_size", 0):
            raise GraphgenError(
                f"{who}: {name or 'it'} has proj_size={projected}, and torch's exporter writes an "
                f"LSTM without its projection: make it without, or as a loop of LSTMCells"
                f"{user_line()}"
            )
        moves = part.training and getattr(part, "running_mean", None) is not None
        if moves and getattr(part, "momentum", 0) is None:
            raise GraphgenError(
                f"{who}: {name or 'it'} has momentum=None, and torch cannot export a mean over all "
                "batches: make it with a number, such as momentum=0.1, or call its "
                f"eval(){user_line()}"
            )
        if moves and type(part).__name__.startswith("InstanceNorm"):
            raise GraphgenError(
                f"{who}: {name or 'it'} has track_running_stats=True, and each call in training "
                "mode changes them, for which torch's exporter has no place: make it without, or "
                f"call its eval(){user_line()}"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter._backward_hooks:
            raise GraphgenError(
                f"{who}: a hook changes the gradient of {name}, and no graph has it: remove "
                f"it{user_line()}"
            )


def held_apart(program: Any, module: Any) -> dict[str, str]:
    """The names of parameters that a module also reads otherwise than by its attributes.

    That is from a list, a closure or, as Keras does, an object of its own. Torch's exporter takes
    them for constants, by whose names they are here.
    """

    def place(tensor: Any) -> tuple[Any, ...]:
        storage = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        return *storage, tensor.dtype, tensor.shape, tensor.stride()

    found = dict[str, str]()
    with contextlib.suppress(Exception):  # as of tensors without a storage
        names = {place(x): n for n, x in reversed([*module.named_parameters()]) if x.numel()}
        for name, constant in program.exported_program.constants.items():
            if hasattr(constant, "stride") and place(constant) in names:
                found[name] = names[place(constant)]
    return found


def expect_same_gradients(program: Any, call: Call) -> None:
    """Raise GraphgenError unless the exported program has the gradients of its module.

    It has not where the module has a backward pass or a hook of its own, or calculates under
    torch.no_grad() what depends on parameters. Not compared are modules whose dropouts or
    norms are in training mode, and what torch cannot differentiate.
    """
    import torch

    given = call.positional, call.keyword
    trained = [name for name, x in call.module.named_parameters() if x.requires_grad]

    def gradients(called: Any, own: dict[str, Any] | None = None) -> list[Any]:
        named = own or dict(called.named_parameters(remove_duplicate=False))
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            leaves = [x for x in tensors_in(called(*given[0], **given[1])) if x.requires_grad]
            total = sum((x * torch.rand_like(x)).real.sum() for x in leaves)
            weights = [named[name] for name in trained if name in named]
            found = iter(torch.autograd.grad(total, weights, allow_unused=True))
            return [next(found) if name in named else None for name in trained]

    if not trained or any(part.training and is_random(part) for part in call.module.modules()):
        return
    apart = list[str]()
    with contextlib.suppress(Exception), unchanged(call.module):
        exported = program.exported_program.module()
        own = dict(exported.named_parameters(remove_duplicate=False))
        for constant, name in held_apart(program, call.module).items():
            if name not in own:
                own[name] = torch.nn.Parameter(program.exported_program.constants[constant].clone())
            setattr(exported, constant, own[name])
        wanted, found = gradients(call.module), gradients(exported, own)
        triples = zip(trained, wanted, found, strict=True)
        apart = [name for name, one, other in triples if _differ(one, other)]
    if apart:
        raise GraphgenError(
            f"from_torch: {type(call.module).__name__}: what torch exports has other gradients "
            f"than the module, of {listed(apart)}: it leaves out torch.no_grad(), and backward "
            "passes and hooks of your own; detach what shall have no gradient, and freeze what "
            f"shall not be trained{user_line()}"
        )


def _differ(wanted: Any, found: Any) -> bool:
    """Whether two gradients differ, of which None is 0."""
    if wanted is None or found is None:
        only = found if wanted is None else wanted
        return only is not None and bool(only.abs().max() > 0)
    error, norm = (wanted - found).norm(), wanted.norm()
    return bool(error > _APART * norm + 1e-6)  # False where one is not finite
