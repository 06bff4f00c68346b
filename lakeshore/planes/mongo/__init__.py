"""The fleet plane: invocations in MongoDB, news through Redis."""
