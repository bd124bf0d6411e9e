"""A session's stored rows of one layer, as the native code reads them."""

import ctypes
from typing import ClassVar


class Searched(ctypes.Structure):
    """Structure `Searched` of rows.h; all zero for a session that retrieves nothing."""

    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_int64),
        ("coded", ctypes.c_int64),
        ("summaries", ctypes.c_void_p),
        ("levels", ctypes.c_int64),
        ("top", ctypes.c_int64),
        ("nodes", ctypes.c_int64),
        ("level_rotation", ctypes.c_int64),
        ("ranks", ctypes.c_void_p),
        ("page_rows", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("turned", ctypes.c_void_p),
        ("segment_step", ctypes.c_int64),
        ("head_step", ctypes.c_int64),
    ]
