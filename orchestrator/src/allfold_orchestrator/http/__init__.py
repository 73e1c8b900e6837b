"""The REST API: routes, limits, errors, health."""
