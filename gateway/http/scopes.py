"""The scopes that each route needs, in one table; an application with a route outside it is refused."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.routing import BaseRoute

from gateway.observation.identity import get_path
from services.access.principals import ALL_SCOPES, Scope


@dataclass(frozen=True)
class Rule:
    """Routes by path, and the scopes of which a key needs one; none: no key is needed.

    `computes`: a POST takes tokens of the model, and so counts for the rates of tokens. `monitors`:
    it is served while the catalog is away.
    """

    paths: re.Pattern[str]
    scopes: frozenset[Scope]
    computes: bool = False
    monitors: bool = False


def _rule(paths: str, *scopes: Scope, computes: bool = False, monitors: bool = False) -> Rule:
    return Rule(re.compile(paths), frozenset(scopes), computes, monitors)


# The first that matches the whole path counts.
RULES = (
    _rule(r"/|/healthz|/readyz|/health|/openapi\.json|/docs|/console(/.*)?"),
    _rule(r"/metrics", Scope.ADMIN, monitors=True),
    _rule(r"/v1/workers", Scope.ADMIN),
    _rule(r"/version|/v1/(methods|worker|models(/.*)?)", *Scope),
    _rule(r"/v1/((chat/)?completions|responses|messages)", Scope.INFER, computes=True),
    _rule(r"/v1/(chat|responses|conversations|messages)(/.*)?", Scope.INFER),
    _rule(r"/(de)?tokenize", Scope.INFER),
    _rule(r"/v1/sessions/[^/]+/(turns|fork)", Scope.SESSIONS, computes=True),
    _rule(r"/v1/(sessions(/.*)?|stream|overview)", Scope.SESSIONS),
)
# A path without a rule is no route: any valid key gets a 404.
_NO_ROUTE = Rule(re.compile(""), ALL_SCOPES)


def get_rule(path: str) -> Rule:
    """Return the rule of a path, as it is matched by the routes."""
    return next((rule for rule in RULES if rule.paths.fullmatch(path)), _NO_ROUTE)


def require_rules(routes: Iterable[BaseRoute]) -> None:
    """Check that each route has a rule. Raises ValueError."""
    unknown = [path for route in routes if get_rule(path := get_path(route)) is _NO_ROUTE]
    if unknown:
        raise ValueError(f"gateway/http/scopes.py has no rule for {', '.join(unknown)}")
