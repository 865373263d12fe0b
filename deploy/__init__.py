"""How SAO is deployed; the Python in here makes what is checked in beside it."""
