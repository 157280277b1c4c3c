"""Who runs the spans of a file of rows: threads of this process, or actors of Ray.

A `stage` is made from the file's lines and settings, and returns the table of a span's results.
"""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from graphgen.errors import GraphgenError, needed
from graphgen.export.rows import Lines
from graphgen.export.tables import Slices


def local(lines: Lines | Slices, workers: int, settings: Any, *, stage: Any) -> Iterator[Any]:
    """The tables of all spans, from threads of this process that share a session, or its file."""
    run, table = stage(lines, **settings), needed("pyarrow").Table
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda span: run(table.from_pylist([span])), lines.spans)


def on_ray(lines: Lines | Slices, workers: int, settings: Any, *, stage: Any) -> Iterator[Any]:
    """The tables of all spans, from actors of Ray: RAY_ADDRESS's, this machine's or a new cluster.

    Each actor has a session. If one dies, Ray starts it again, and gives it its spans again.
    """
    ray, threads, mine = needed("ray"), settings.get("threads", 1), False
    try:
        if mine := not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
            logging.getLogger("ray.data").setLevel(logging.ERROR)
        if workers * threads > (cpus := int(ray.cluster_resources().get("CPU", 0))):
            raise GraphgenError(
                f"{workers} workers of {threads} threads need {workers * threads} CPUs, and Ray "
                f"has {cpus}; give fewer --workers"
            )
        dataset = ray.data.from_items(lines.spans, override_num_blocks=len(lines.spans))
        dataset = dataset.map_batches(
            stage,
            fn_constructor_args=[lines._replace(spans=[])],
            fn_constructor_kwargs=settings,
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=threads,
        )
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        found = re.findall(r"GraphgenError: (.+)", str(error)) or str(error).splitlines()[-1:]
        raise GraphgenError(f"ray: {found[-1]}") from error
    finally:
        if mine:
            ray.shutdown()
