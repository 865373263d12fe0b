"""An overlay's pods as network namespaces whose iptables are its NetworkPolicies: for `make network-check` and tests.

`hosts`, `rules`, `names` and `containers` are pure: rendered objects in, addresses, rules and command lines out.
`namespaces` and `stack` act, as root; `check` asks `sao doctor`.
"""
