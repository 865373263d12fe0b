"""The algorithm, pure: tensors and dataclasses in, tensors and dataclasses out; sao.py is the place to begin."""
