"""Where the two networks live and are differentiated: the contract in base.py, plain torch, and DeepSpeed."""
