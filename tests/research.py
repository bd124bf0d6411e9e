"""Settings of sessions as one writes them in tests, with those of research in their place."""

from collections.abc import Mapping
from typing import Any

from gateway.rest.schemas.research import ResearchBody


def nest_research(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a new session with all that belong there in its member `research`."""
    research = {k: v for k, v in settings.items() if k in ResearchBody.model_fields}
    others = {k: v for k, v in settings.items() if k not in research}
    return {**others, "research": research} if research else others
