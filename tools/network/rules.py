"""NetworkPolicies as iptables: a closed chain where a policy selects the pod, and an accept for each of its edges.

An edge needs its rule at both ends, as in Kubernetes. What answers an open connection passes, and what a pod says to
itself. Protocol, port and the other end's address are all that a rule knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tools.manifests.edges import ANY, NAMESPACE, Edge, matches, selects
from tools.manifests.render import Object
from tools.network.hosts import Host

Chain = Literal["INPUT", "OUTPUT"]
CHAINS: Mapping[str, Chain] = {"Ingress": "INPUT", "Egress": "OUTPUT"}
_OTHER_END: Mapping[Chain, str] = {"INPUT": "-s", "OUTPUT": "-d"}


@dataclass(frozen=True, order=True)
class Rule:
    """New connections that pass a chain."""

    host: str
    """Whose chain."""
    chain: Chain
    address: str
    """The other end."""
    port: str
    """`50051/TCP`, or `any`; of the end that listens."""

    def arguments(self) -> list[str]:
        """What comes after `iptables -A` or `-D`."""
        match = [self.chain, _OTHER_END[self.chain], f"{self.address}/32"]
        if self.port != ANY:
            number, _, protocol = self.port.partition("/")
            match += ["-p", protocol.lower(), "--dport", number]
        return [*match, "-j", "ACCEPT"]


@dataclass(frozen=True)
class Ruleset:
    """What an overlay's policies come to."""

    closed: frozenset[tuple[str, Chain]]
    """Chains of hosts that let nothing pass but what a rule accepts."""
    accepts: frozenset[Rule]

    def passes(self, source: Host, target: Host, port: str) -> bool:
        """Whether a new connection from one host reaches another's port."""
        return self._accepted(source, "OUTPUT", target, port) and self._accepted(target, "INPUT", source, port)

    def _accepted(self, host: Host, chain: Chain, other: Host, port: str) -> bool:
        if (host.name, chain) not in self.closed:
            return True
        return any(Rule(host.name, chain, other.address, one) in self.accepts for one in (port, ANY))

    def restore(self, host: Host) -> str:
        """The host's whole table, for iptables-restore."""
        policies = {chain: "DROP" if (host.name, chain) in self.closed else "ACCEPT" for chain in CHAINS.values()}
        lines = ["*filter", *(f":{chain} {policy} [0:0]" for chain, policy in policies.items()), ":FORWARD DROP [0:0]"]
        for chain, interface in (("INPUT", "-i"), ("OUTPUT", "-o")):
            lines.append(f"-A {chain} {interface} lo -j ACCEPT")
            lines.append(f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
        lines += [f"-A {' '.join(rule.arguments())}" for rule in sorted(self.accepts) if rule.host == host.name]
        return "\n".join([*lines, "COMMIT", ""])

    def of_edge(self, hosts: Sequence[Host], edge: Edge, chain: Chain) -> list[Rule]:
        """The rules at one end of an edge between roles: without them it is closed; none where that end is open."""
        near, far = (edge.source, edge.target) if chain == "OUTPUT" else (edge.target, edge.source)
        names = {host.name for host in hosts if near in host.peer.roles}
        addresses = {host.address for host in hosts if far in host.peer.roles}
        return sorted(
            rule
            for rule in self.accepts
            if rule.chain == chain and rule.port == edge.port and rule.host in names and rule.address in addresses
        )


def translate(objects: Sequence[Object], hosts: Sequence[Host]) -> Ruleset:
    """The rules of every host; hosts outside the namespace have none, their namespaces' policies are not ours."""
    closed, accepts = set(), set()
    for policy in (one["spec"] for one in objects if one["kind"] == "NetworkPolicy"):
        for host in hosts:
            if host.peer.namespace != NAMESPACE or not selects(policy["podSelector"], host.peer.labels):
                continue
            for way in policy["policyTypes"]:
                closed.add((host.name, CHAINS[way]))
                accepts |= set(_accepts(policy.get(way.lower()) or [], way, host, hosts))
    return Ruleset(frozenset(closed), frozenset(accepts))


def _accepts(terms: Iterable[Mapping[str, Any]], way: str, host: Host, hosts: Sequence[Host]) -> Iterator[Rule]:
    for term in terms:
        whom = term.get("to" if way == "Egress" else "from")
        ports = [f"{one['port']}/{one.get('protocol', 'TCP')}" for one in term.get("ports") or []] or [ANY]
        for other in hosts:
            if other != host and (whom is None or any(matches(one, other.peer) for one in whom)):
                yield from (Rule(host.name, CHAINS[way], other.address, port) for port in ports)
