"""What was seen of the containers, and what of it is not as it must be; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tools.images.play import Container

READ_ONLY = "Read-only file system"
"""The kernel's words; a root that is writable, but not for this user, answers others."""
LOOK = """\
cat /proc/1/status
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null | sed 's/^/MemoryLimit:\\t/'
LC_ALL=C sh -c ': > /written' 2>&1 | sed 's/^/Write:\\t/'
"""
"""Given to a shell in a container; `inside` reads what it prints."""
_NO_CAPABILITIES = ("CapPrm", "CapEff", "CapBnd")


@dataclass(frozen=True)
class Inside:
    """What a container's first process is, as seen from inside."""

    uids: tuple[int, ...]
    """Real, effective, saved, file system."""
    capabilities: Mapping[str, int]
    """Masks: permitted, effective, and the bound of both."""
    no_new_privileges: bool
    seccomp: bool
    """System calls are filtered."""
    memory: int | None
    """Limit of its cgroup in bytes."""
    write: str
    """What the shell said to a write into the root; empty when it was done."""


@dataclass(frozen=True)
class Ended:
    """How a container ended after it was told to."""

    seconds: float
    code: int


@dataclass
class Seen:
    """Everything that was observed of a run."""

    inside: dict[str, Inside] = field(default_factory=dict)
    """By a container's full name, as all the following."""
    restarts: dict[str, int] = field(default_factory=dict)
    unwell: dict[str, str] = field(default_factory=dict)
    """What its probes found at the end; empty when nothing."""
    ended: dict[str, Ended] = field(default_factory=dict)
    updates: int = 0
    versions: list[str] = field(default_factory=list)
    """Weight versions that an engine said it serves, in the order of their first sight."""


def inside(printed: str) -> Inside:
    """What `LOOK` printed; KeyError for anything else."""
    lines: dict[str, str] = {}
    for line in printed.splitlines():
        key, colon, value = line.partition(":\t")
        if colon:
            lines.setdefault(key, value.strip())
    limit = lines.get("MemoryLimit", "max")
    return Inside(
        uids=tuple(int(word) for word in lines["Uid"].split()),
        capabilities={name: int(lines[name], 16) for name in _NO_CAPABILITIES},
        no_new_privileges=lines["NoNewPrivs"] == "1",
        seccomp=lines["Seccomp"] == "2",
        memory=int(limit) if limit.isdigit() else None,
        write=lines.get("Write", ""),
    )


def of_inside(expected: Container, seen: Inside) -> list[str]:
    """What a container may that it must not."""
    found = []
    if 0 in seen.uids or (expected.uid is not None and set(seen.uids) != {expected.uid}):
        found.append(f"runs as uid {seen.uids[0]}, expected {expected.uid or 'one that is not 0'}")
    held = [f"{name} {mask:x}" for name, mask in seen.capabilities.items() if mask]
    if held:
        found.append(f"has capabilities ({', '.join(held)}), expected none")
    if not seen.no_new_privileges:
        found.append("may gain privileges (NoNewPrivs 0)")
    if not seen.seccomp:
        found.append("has no seccomp filter")
    if READ_ONLY not in seen.write:
        found.append(f"its root is not read-only: a write to / said {seen.write or 'nothing, and was done'!r}")
    if seen.memory != expected.memory:
        found.append(f"its memory is limited to {seen.memory}, expected {expected.memory}")
    return found


def problems(containers: Sequence[Container], seen: Seen, updates: int, grace_s: Mapping[str, float]) -> list[str]:
    """Everything that is not as it must be; `grace_s` is by pod."""
    found = [f"{one.full_name}: {text}" for one in containers for text in _of_container(one, seen, grace_s[one.pod])]
    if seen.updates < updates:
        found.append(f"the trainer made {seen.updates} updates, expected {updates}")
    if len(seen.versions) < 2:
        found.append(f"the engine served the versions {seen.versions}, expected more than one")
    return found


def _of_container(one: Container, seen: Seen, grace_s: float) -> Iterator[str]:
    name = one.full_name
    if name in seen.inside:
        yield from of_inside(one, seen.inside[name])
    else:
        yield "was never seen running"
    if one.init:
        return
    if seen.restarts.get(name, 0):
        yield f"was started again {seen.restarts[name]} times"
    if name not in seen.unwell:
        yield "was not asked whether it is well"
    elif seen.unwell[name]:
        yield seen.unwell[name]
    end = seen.ended.get(name)
    if end is None:
        yield "was not told to end"
    elif end.code != 0 or end.seconds > grace_s:
        yield f"ended with {end.code} after {end.seconds:.1f} s, expected 0 within {grace_s:g} s of SIGTERM"
