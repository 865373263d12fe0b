"""Where the weights service learns which engines there are."""
