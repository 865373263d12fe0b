"""What can go wrong, in one table: name, which kind of process it hits, how it is injected, how it heals.

`inject` returns what it did, in words. Between it and `heal` lie `hold_s` seconds; most faults need no healing, because
the keeper starts again what ended.
"""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.proxy import Mode
from tests.chaos.system import ENGINE, System

STOPPED_S = 10.0
"""Longer than a lease, a claim and every deadline of system.SETTINGS."""
CUT_S = 8.0
FIND_S = 5.0
"""Longest look for something to damage."""
FULL_AT_BYTES = 1 << 18
"""More than an archived update has, less than a version or a checkpoint."""
NO_SUCH_SPACE_MB = 10**9

Inject = Callable[[System, Random], str]
Heal = Callable[[System], None]


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    kind: str
    times: int
    """How often in a hundred rounds; 0: only where it is asked for, since something may be lost."""
    inject: Inject
    heal: Heal = lambda _system: None
    hold_s: float = 0.0


def kill(process: str) -> Inject:
    """SIGKILL; the keeper starts it again."""

    def inject(system: System, _random: Random) -> str:
        return "killed" if system.fleet.signal(process, signal.SIGKILL) else "was down already"

    return inject


def stop(process: str) -> Inject:
    """SIGSTOP to everything in its session: it is there, it listens, it does nothing."""

    def inject(system: System, _random: Random) -> str:
        return "stopped" if system.fleet.signal(process, signal.SIGSTOP, all_of_it=True) else "was down already"

    return inject


def wake(process: str) -> Heal:
    """SIGCONT: it goes on in the middle of what it did, with leases and deliveries that are others' by now."""
    return lambda system: _ignore(system.fleet.signal(process, signal.SIGCONT, all_of_it=True))


def cut(links: str, mode: Mode) -> Inject:
    """Switch one of the links whose names have this in them into a mode."""

    def inject(system: System, random: Random) -> str:
        name = random.choice([name for name in sorted(system.links) if links in name])
        system.proxies.switch(system.links[name], mode)
        return f"{name}: {mode.value}"

    return inject


def mend(system: System) -> None:
    """Every link passes again."""
    for link in system.links.values():
        system.proxies.switch(link, Mode.PASS)


def restart_valkey(system: System, _random: Random) -> str:
    """In good order: it writes its file to the end, and reads it at the next start."""
    return "asked to end" if system.fleet.signal("valkey", signal.SIGTERM) else "was down already"


def empty_valkey(system: System, _random: Random) -> str:
    """Store a preference, kill the server and remove its file: it comes back with nothing."""
    number = system.put_preference_again()
    system.fleet.signal("valkey", signal.SIGKILL)
    shutil.rmtree(system.folder / "valkey" / "appendonlydir")
    return f"killed, and its file removed, after preference {number} was stored"


def fill_disk(process: str) -> Inject:
    """Let no file of the running process grow beyond a limit: the next larger write fails half done."""

    def inject(system: System, _random: Random) -> str:
        pid = system.fleet.pid(process)
        if pid is None:
            return "was down already"
        # An append-only file is far beyond what an archived update has; versions and checkpoints lie in between.
        written = [path.stat().st_size for path in (system.folder / process).rglob("*.aof")]
        limit = max([FULL_AT_BYTES, *(size + FULL_AT_BYTES // 64 for size in written)])
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
        return f"no file beyond {limit} bytes"

    return inject


def make_room(process: str) -> Heal:
    """Let files grow again, where the process is still there."""

    def heal(system: System) -> None:
        pid = system.fleet.pid(process)
        if pid is not None:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    return heal


def refuse_space(system: System, _random: Random) -> str:
    """Start the trainer with a free-space bound that no disk meets: it must refuse to write, again and again."""
    bound = system.config.checkpoint.model_copy(update={"free_space_mb": NO_SUCH_SPACE_MB})
    system.write_run_file("trainer", system.config.model_copy(update={"checkpoint": bound}))
    system.fleet.signal("trainer", signal.SIGKILL)
    return f"killed, and {NO_SUCH_SPACE_MB} MB free space asked of its disk"


def allow_space(system: System) -> None:
    """The bound is what it was."""
    system.write_run_file("trainer", system.config)


def damage_checkpoint(system: System, random: Random) -> str:
    """Turn one byte of the newest checkpoint round, while the trainer cannot write a newer one; then kill it."""
    system.fleet.signal("trainer", signal.SIGSTOP)
    checkpoints = sorted((system.folder / "checkpoints").glob("update-*"))
    done = "no checkpoint yet"
    if checkpoints:
        file = random.choice(sorted(path for path in checkpoints[-1].rglob("*") if path.is_file()))
        _turn_a_byte(file, random)
        done = f"damaged {file.relative_to(system.folder)}"
    system.fleet.signal("trainer", signal.SIGKILL)
    return f"{done}, killed"


def damage_payload(system: System, random: Random) -> str:
    """Cut a payload that nobody has trained on short, while the trainer cannot take it."""
    system.fleet.signal("trainer", signal.SIGSTOP)
    try:
        with system.valkey() as client:
            found: list[bytes] = []

            def waiting() -> bool:
                found[:] = client.smembers(system.keys.unconsumed)
                return bool(found)

            if not system.fleet.wait(waiting, FIND_S):
                return "nothing was waiting"
            trajectory_id = random.choice(sorted(found)).decode()
            key = system.keys.payload(trajectory_id)
            payload = client.get(key) or b""
            client.set(key, payload[: len(payload) // 2], xx=True)
            return f"payload of {trajectory_id} cut from {len(payload)} bytes to half"
    finally:
        system.fleet.signal("trainer", signal.SIGCONT)


def _turn_a_byte(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 0xFF
    file.write_bytes(content)


def _ignore(_value: object) -> None: ...


FAULTS = {
    fault.name: fault
    for fault in (
        #     name                    kind      of 100  inject                             heal, after
        Fault("kill engine",          "engine",   5, kill(ENGINE)),
        Fault("kill valkey",          "valkey",   5, kill("valkey")),
        Fault("kill ingest",          "ingest",   5, kill("ingest")),
        Fault("kill worker",          "worker",   5, kill("worker")),
        Fault("kill reward",          "reward",   5, kill("reward")),
        Fault("kill trainer",         "trainer",  5, kill("trainer")),
        Fault("kill weights",         "weights",  5, kill("weights")),
        Fault("stop engine",          "engine",   3, stop(ENGINE),                         wake(ENGINE), STOPPED_S),
        Fault("stop valkey",          "valkey",   3, stop("valkey"),                       wake("valkey"), STOPPED_S),
        Fault("stop ingest",          "ingest",   3, stop("ingest"),                       wake("ingest"), STOPPED_S),
        Fault("stop worker",          "worker",   3, stop("worker"),                       wake("worker"), STOPPED_S),
        Fault("stop reward",          "reward",   3, stop("reward"),                       wake("reward"), STOPPED_S),
        Fault("stop trainer",         "trainer",  3, stop("trainer"),                      wake("trainer"), STOPPED_S),
        Fault("stop weights",         "weights",  3, stop("weights"),                      wake("weights"), STOPPED_S),
        Fault("restart valkey",       "valkey",   3, restart_valkey),
        Fault("emptied valkey",       "valkey",   0, empty_valkey),
        Fault("full disk, valkey",    "valkey",   3, fill_disk("valkey"),                  make_room("valkey"), CUT_S),
        Fault("full disk, trainer",   "trainer",  3, fill_disk("trainer"),                 make_room("trainer"), CUT_S),
        Fault("no space for trainer", "trainer",  3, refuse_space,                         allow_space, STOPPED_S),
        Fault("damaged checkpoint",   "trainer",  3, damage_checkpoint),
        Fault("damaged payload",      "payload",  3, damage_payload),
        Fault("slow valkey",          "link",     2, cut("-valkey", Mode.LATENCY),         mend, CUT_S),
        Fault("reset valkey",         "link",     4, cut("-valkey", Mode.RESET),           mend, CUT_S),
        Fault("unreachable valkey",   "link",     4, cut("-valkey", Mode.BLACK_HOLE),      mend, CUT_S),
        Fault("slow ingest",          "link",     2, cut("-ingest", Mode.LATENCY),         mend, CUT_S),
        Fault("reset ingest",         "link",     3, cut("-ingest", Mode.RESET),           mend, CUT_S),
        Fault("unreachable ingest",   "link",     3, cut("-ingest", Mode.BLACK_HOLE),      mend, CUT_S),
        Fault("slow engine",          "link",     2, cut("-engine", Mode.LATENCY),         mend, CUT_S),
        Fault("reset engine",         "link",     3, cut("-engine", Mode.RESET),           mend, CUT_S),
        Fault("unreachable engine",   "link",     3, cut("-engine", Mode.BLACK_HOLE),      mend, CUT_S),
    )
}  # fmt: skip


def deck(seed: int, rounds: int) -> list[Fault]:
    """The faults of a run: each hundred holds every row `times` times, in an order that the seed alone decides."""
    faults: list[Fault] = []
    while len(faults) < rounds:
        hundred = [fault for fault in FAULTS.values() for _ in range(fault.times)]
        Random(f"{seed}/{len(faults)}").shuffle(hundred)
        faults += hundred
    return faults[:rounds]
