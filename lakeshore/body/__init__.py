"""Running one body: the call, its context, its keys, and the outcome."""
