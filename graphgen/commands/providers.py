"""The command `providers`."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import graphgen as gg
from graphgen.commands.options import FLAG, print_json

EXAMPLE = "--json"


def run(options: argparse.Namespace) -> None:
    """List execution providers, their devices, and what is missing."""
    from graphgen.providers import providers
    from graphgen.runtime import import_runtime

    found = providers(import_runtime())
    if options.json:
        print_json({"graphgen": gg.__version__, "providers": [asdict(row) for row in found]})
        return
    wide = max(len(row.name) for row in found)
    for row in found:
        devices = ", ".join(row.devices) or "built in"
        print(f"{row.name:<{wide}}  {row.problem or f'{devices}: {row.source}'}")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `providers`."""
    add("--json", help="print what docs/providers.schema.json describes", **FLAG)
