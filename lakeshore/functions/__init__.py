"""How a callable travels: turned into a reference or a pickle, and back into a callable through the gates of a worker."""
