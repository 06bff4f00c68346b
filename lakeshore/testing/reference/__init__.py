"""The reference model that `check_plane` compares a store with. Only tests use it."""
