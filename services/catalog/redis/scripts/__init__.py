"""The Lua scripts of the Redis catalog, each run by Redis in one step.

Unless a script's header says otherwise, KEYS are a session's keys in the order of `connection/keys.py`.
If Redis is out of memory, the first command of a script that may need more fails and nothing is
changed; after the first write of any kind a script runs to its end. So scripts that lead to a
deletion begin with a write that needs no memory. (Script flags say the same since Redis 7; 6.2 does
not know them.)
"""

from importlib.resources import files


def _load(*names: str) -> str:
    folder = files("services.catalog.redis.scripts")
    return "\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names)


REQUIRE_IDENTITY = _load("require_identity")
RUN_COMMAND = _load("run_command")
APPLY_COMMIT = _load("commit_log", "apply_commit")
DELETE_SESSION = _load("commit_log", "delete_session")
READ_COMMANDS = _load("read_commands")
READ_SESSION = _load("read_session")
READ_CALL = _load("read_call")
READ_SNAPSHOT = _load("read_snapshot")
CLAIM = _load("claim")
DELETE_IF_EQUAL = _load("delete_if_equal")
SET_IF_EQUAL = _load("set_if_equal")
CHANGE_USE = _load("change_use")
SET_EXPIRY = _load("set_expiry")
ADD_MEMBERS = _load("add_members")
LIST_WITHIN = _load("list_within")
ADD_ITEMS = _load("measure_items", "add_items")
READ_ITEMS = _load("measure_items", "read_items")
UPDATE_CONVERSATION = _load("update_conversation")
DELETE_ITEM = _load("measure_items", "delete_item")
PROPOSE_PAGES = _load("page_tree", "propose_pages")
DROP_PAGES = _load("page_tree", "drop_pages")
FIND_OLD_ENDS = _load("page_tree", "find_old_ends")
REPLACE_FIELD = _load("replace_field")
REMOVE_IF_SCORED = _load("remove_if_scored")
WRITE_FENCE = _load("write_fence")
