"""Lua scripts of the Redis tier, each atomic on the server; see the head of each `.lua` file.

`session_index.lua` has the functions that all scripts on a session's index use. A script that has
begun to write may continue when Redis is out of memory, but its first write must not need any.
"""

from importlib.resources import files


def _load(name: str, *, uses_index: bool = True) -> str:
    """Text of the script `name`, after the functions of the session index if it uses them."""
    texts = [files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")]
    if uses_index:
        texts.insert(0, files(__name__).joinpath("session_index.lua").read_text(encoding="utf-8"))
    return "\n".join(texts)


COMMIT = _load("commit")
DELETE = _load("delete")
FENCE = _load("fence")
TOUCH = _load("touch")
HEADERS = _load("headers")
AUDIT = _load("audit")
REGISTER = _load("register", uses_index=False)
UNREGISTER = _load("unregister", uses_index=False)
