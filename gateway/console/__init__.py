"""The web console: static pages over the REST API, their headers, and checks of browsers' requests."""
