"""Work spread over processes: compilers hold the interpreter's lock."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any


def in_processes(function: Callable, items: Sequence[Any], workers: int, ordered: bool = False) -> Iterator[Any]:
    """Results of a module's function for each item, as they get ready or in the items' order.

    What was not begun when the caller stops listening, or when one fails, is not done.
    """
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        pending = [pool.submit(function, item) for item in items]
        try:
            for done in pending if ordered else as_completed(pending):
                yield done.result()
        finally:
            for one in pending:
                one.cancel()
