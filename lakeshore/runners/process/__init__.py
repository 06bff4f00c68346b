"""Children as processes of this machine."""
