"""Keys of a page that the native code encodes."""

import ctypes
from typing import ClassVar


class Encode(ctypes.Structure):
    """Structure `Encode` of attend.cpp."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("page_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
    ]
