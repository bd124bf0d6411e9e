"""The operator's keys of encryption at rest, from the file that the settings name."""

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from services.catalog.encryption.keyring import Keyring, parse_keyring

_SETTING = "KVRECALL_ENCRYPTION__KEYS_FILE"


def load_keyring(settings: Settings) -> Keyring | None:
    """Return the operator's keys, None if no file of them is named. Raises CannotServe."""
    path = settings.encryption.keys_file
    if path is None:
        return None
    try:
        return parse_keyring(path.read_text("utf-8"))
    except OSError as error:
        raise CannotServe(
            f"{_SETTING}: {path} cannot be read: {error.strerror}; expected a file of keys that this "
            "process may read, as `kvrecall encryption new-key NAME` prints them"
        ) from error
    except UnicodeDecodeError as error:
        raise CannotServe(f"{_SETTING}: {path} is no text; expected a file of keys") from error
    except ValueError as error:
        raise CannotServe(f"{_SETTING}: {path}: {error}") from error
