"""The arguments of a call that summarises keys."""

import ctypes
from typing import ClassVar


class Summarise(ctypes.Structure):
    """Structure `Summarise` of attend.cpp, which says what each field is."""

    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        ("keys", ctypes.c_int64),
        ("page_rows", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("levels", ctypes.c_void_p),
        ("before", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    ]
