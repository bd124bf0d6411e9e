"""A session's stored rows of one layer, as the native code reads them."""

import ctypes
from typing import ClassVar


class Searched(ctypes.Structure):
    """Structure `Searched` of attend.cpp; all zero for a session that retrieves nothing."""

    _fields_: ClassVar = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]
