"""Examples: things built with sao, the way a user builds them."""
