"""Children as Jobs of a Kubernetes cluster."""
