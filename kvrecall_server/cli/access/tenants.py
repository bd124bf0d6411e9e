"""Names of tenants on the command line."""

from kvrecall_server.app.errors import CliError
from services.access.principals import is_tenant_name


class BadTenantName(CliError):
    """A name that no tenant may have."""


def require_tenant_name(name: str) -> None:
    """Raise BadTenantName unless a tenant may have this name, or it is the default tenant's: empty."""
    if name and not is_tenant_name(name):
        raise BadTenantName("a tenant's name has 1 to 64 letters, digits and . _ -")
