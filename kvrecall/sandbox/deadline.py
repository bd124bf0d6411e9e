"""Time limit of Python code that cannot be asked to stop, such as a chat template's loops."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeadlinePassed(Exception):
    """The code took longer than it may."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise DeadlinePassed within the block, in its thread, once it has taken so many seconds.

    It comes between two steps of Python: one call into C, such as encoding a text, is not cut short.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    running = True

    def interrupt() -> None:
        with lock:
            if running:
                error = ctypes.py_object(DeadlinePassed)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            running = False
        timer.cancel()
