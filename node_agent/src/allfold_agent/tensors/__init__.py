"""The HTTP tensor endpoints and their client."""
