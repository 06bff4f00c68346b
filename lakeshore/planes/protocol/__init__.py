"""The HTTP protocol, for both ends: routes, messages and errors."""
