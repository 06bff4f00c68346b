"""Where the children of `worker.child` run: one module for each kind of engine."""
