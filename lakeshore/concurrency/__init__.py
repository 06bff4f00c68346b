"""Event loops, the portal for blocking callers, and tasks that belong to no caller."""
