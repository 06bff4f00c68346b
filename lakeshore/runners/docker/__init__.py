"""Children in containers of docker or podman."""
