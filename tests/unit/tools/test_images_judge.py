"""What the check of the images finds wrong; each of it alone is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.images.judge import Ended, Inside, Seen, inside, of_inside, problems
from tools.images.play import Container

STATUS = """\
Name:\tpython
Uid:\t10001\t10001\t10001\t10001
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
"""
PRINTED = STATUS + "MemoryLimit:\t67108864\nWrite:\tsh: 1: cannot create /written: Read-only file system\n"
EXPECTED = Container("store-0", "server", False, 10001, 67108864, {}, (), 0)
GRACE = {"store-0": 60.0}


def good() -> Seen:
    return Seen(
        inside={"store-0-server": inside(PRINTED)},
        restarts={"store-0-server": 0},
        unwell={"store-0-server": ""},
        ended={"store-0-server": Ended(1.5, 0)},
        updates=50,
        versions=["initial", "v00000001"],
    )


def found(seen: Seen, one: Container = EXPECTED) -> list[str]:
    return problems([one], seen, 50, GRACE)


def test_what_a_container_printed_of_itself_is_read() -> None:
    assert inside(PRINTED) == Inside(
        uids=(10001,) * 4,
        capabilities={"CapPrm": 0, "CapEff": 0, "CapBnd": 0},
        no_new_privileges=True,
        seccomp=True,
        memory=67108864,
        write="sh: 1: cannot create /written: Read-only file system",
    )
    assert inside(STATUS + "MemoryLimit:\tmax\n").memory is None
    with pytest.raises(KeyError):
        inside("sh: cat: not found\n")


def test_a_run_as_it_must_be_has_no_problem() -> None:
    assert found(good()) == []


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (PRINTED.replace("10001\t10001\t10001\t10001", "0\t0\t0\t0"), "runs as uid 0"),
        (PRINTED.replace("10001\t10001\t10001\t10001", "10001\t0\t10001\t10001"), "uid"),
        (PRINTED.replace("10001\t10001\t10001\t10001", "999\t999\t999\t999"), "runs as uid 999, expected 10001"),
        (PRINTED.replace("CapEff:\t0000000000000000", "CapEff:\t00000000a80425fb"), "CapEff a80425fb"),
        (PRINTED.replace("CapBnd:\t0000000000000000", "CapBnd:\t00000000a80425fb"), "CapBnd a80425fb"),
        (PRINTED.replace("NoNewPrivs:\t1", "NoNewPrivs:\t0"), "gain privileges"),
        (PRINTED.replace("Seccomp:\t2", "Seccomp:\t0"), "seccomp"),
        (STATUS + "MemoryLimit:\t67108864\n", "not read-only"),
        (PRINTED.replace("Read-only file system", "Permission denied"), "not read-only"),
        (PRINTED.replace("67108864", "max"), "memory is limited to None"),
        (PRINTED.replace("67108864", "134217728"), "memory is limited to 134217728"),
    ],
)
def test_a_container_that_may_more_than_it_must_is_named(printed: str, text: str) -> None:
    seen = good()
    seen.inside["store-0-server"] = inside(printed)
    (problem,) = found(seen)
    assert problem.startswith("store-0-server: ")
    assert text in problem


def test_a_manifest_that_asks_for_root_is_a_problem_though_it_gets_what_it_asks_for() -> None:
    as_root = inside(PRINTED.replace("10001", "0"))
    assert of_inside(replace(EXPECTED, uid=0), as_root)
    assert of_inside(replace(EXPECTED, uid=None), as_root)
    assert of_inside(replace(EXPECTED, uid=None), inside(PRINTED)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inside": {}}, "never seen running"),
        ({"restarts": {"store-0-server": 2}}, "started again 2 times"),
        ({"unwell": {}}, "not asked"),
        ({"unwell": {"store-0-server": "livenessProbe: /healthz answered 503"}}, "/healthz answered 503"),
        ({"ended": {}}, "not told to end"),
        ({"ended": {"store-0-server": Ended(60.2, 0)}}, "within 60 s"),
        ({"ended": {"store-0-server": Ended(3.0, 137)}}, "ended with 137"),
        ({"updates": 49}, "49 updates"),
        ({"versions": ["initial"]}, "more than one"),
    ],
)
def test_everything_else_that_is_not_as_it_must_be_is_named(change: dict[str, object], text: str) -> None:
    (problem,) = found(replace(good(), **change))  # type: ignore[arg-type]
    assert text in problem


def test_a_container_that_runs_first_is_looked_into_and_no_more() -> None:
    first = replace(EXPECTED, init=True)
    seen = replace(good(), restarts={}, unwell={}, ended={})
    assert found(seen, first) == []
    assert found(replace(seen, inside={}), first) == ["store-0-server: was never seen running"]
