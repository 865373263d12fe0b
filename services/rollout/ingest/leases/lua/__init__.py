"""Lua scripts, each one atomic step; the module that runs them says what they keep."""
