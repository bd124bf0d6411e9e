"""Names of the environment's variables: which settings they are, and refusal of unknown ones."""

import difflib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from kvrecall_server.app.errors import UnknownVariable
from kvrecall_server.app.settings import Settings

PREFIX = str(Settings.model_config["env_prefix"])
DELIMITER = str(Settings.model_config["env_nested_delimiter"])

# Variables that are no settings: the cache's folder, the address for commands that ask a server, and
# those of the fault injection's tools.
URL_VARIABLE = f"{PREFIX}URL"
_OTHERS = frozenset({f"{PREFIX}CACHE", URL_VARIABLE})
_TOOLS = f"{PREFIX}FAULTS_"
# Options of the command line, and variables of docker-compose.yml, whose names are not the setting's.
_FLAGS = MappingProxyType(
    {
        "BUDGET": "WORKER__MAX_BUDGET",
        "BLOCK": "WORKER__BLOCK_TOKENS",
        "RAM": "RAM_BYTES",
        "OPS": "SERVER__OPS_LISTEN",
        "LISTEN": "SERVER__LISTEN",
        "TOKEN": "WIRE__TOKEN",
        "WORKER_TOKEN": "WIRE__TOKEN",
        "REDIS_URL": "STORE__REDIS_URL",
    }
)
# What Kubernetes gives every container for each service of its namespace, also one named kvrecall.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_LIKENESS = 0.72


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise UnknownVariable for a variable that begins with KVRECALL_ and is no setting."""
    known = set(iter_variables())
    fields = Settings.model_fields.items()
    groups = {to_variable((name,)): group for name, field in fields if (group := get_group(field))}
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX) or _is_service_link(name, environment[name]):
            continue
        if name.upper() in groups and not environment[name].lstrip().startswith("{"):
            raise UnknownVariable(_describe_group(name.upper(), groups[name.upper()]))
        if _is_known(name.upper(), known | groups.keys()):
            continue
        nearest = find_nearest(name.upper(), known)
        hint = f"did you mean {nearest}?" if nearest else "`kvrecall config` lists all."
        raise UnknownVariable(f"{name} is no setting of kvrecall; {hint} Rename it, or unset it")


def iter_variables() -> Iterator[str]:
    """Names of all settings' variables, of the nested ones too, in the order of the settings."""
    for path, _ in iter_fields():
        yield to_variable(path)


def iter_fields() -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Paths and fields of all settings, in their order."""
    for name, field in Settings.model_fields.items():
        if group := get_group(field):
            yield from (((name, own), about) for own, about in group.model_fields.items())
        else:
            yield (name,), field


def get_group(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a group of settings; None for a single setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def to_variable(path: tuple[str, ...]) -> str:
    """The variable of a setting, `KVRECALL_WORKER__SLOTS` of `("worker", "slots")`."""
    return PREFIX + DELIMITER.join(path).upper()


def find_nearest(name: str, known: set[str]) -> str | None:
    """Find the variable that an unknown name most likely means; None if none is like it."""
    own = name.removeprefix(PREFIX)
    if flag := _FLAGS.get(own):
        return PREFIX + flag
    # By all its words, or by those behind the group's name.
    by_words = {_get_words(each.rpartition(DELIMITER)[2]): each for each in sorted(known)}
    by_words |= {_get_words(each): each for each in sorted(known)}
    found = difflib.get_close_matches(_get_words(name), by_words, 1, _LIKENESS)
    return by_words[found[0]] if found else None


def describe_invalid(error: ValidationError, environment: Mapping[str, str]) -> str:
    """Describe the first value that a setting refused, with the variable that has it."""
    first = error.errors()[0]
    path = tuple(map(str, first["loc"]))
    text = f"setting {'.'.join(path)}: {first['msg']}"
    if first["type"] == "tuple_type":
        text += ', in JSON: ["one", "another"]'
    values = {name.upper(): value for name, value in environment.items()}
    value = values.get(to_variable(path))
    if value is None:
        return text
    field = dict(iter_fields()).get(path)
    shown = "" if field is None or is_secret(field) else f"={value}"
    return f"{text}; set by {to_variable(path)}{shown}"


def describe_unparsable(error: SettingsError, environment: Mapping[str, str]) -> str:
    """Describe a variable of a list whose value is no JSON."""
    found = re.search(r'field "(\w+)"', str(error))
    names = {name.upper() for name in environment}
    for path, field in iter_fields():
        is_list = "tuple" in str(field.annotation)  # also of a list or None
        if found and path[0] == found[1] and is_list and to_variable(path) in names:
            name = to_variable(path)
            return f'{name} is a list, in JSON: expected {name}=["one", "another"]'
    return str(error)


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value is never shown."""
    return SecretStr in (field.annotation, *get_args(field.annotation))


def _get_words(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_", "")


def _describe_group(variable: str, group: type[BaseModel]) -> str:
    example = f"{variable}{DELIMITER}{next(iter(group.model_fields)).upper()}"
    return (
        f"{variable} is a group of settings and takes a JSON object; "
        f"expected the variable of a single setting, such as {example}"
    )


def _is_known(name: str, known: set[str]) -> bool:
    return name in known | _OTHERS or name.startswith(_TOOLS)


def _is_service_link(name: str, value: str) -> bool:
    address = name.endswith("_PORT") and "://" in value
    return address or _SERVICE_LINK.search(name) is not None
