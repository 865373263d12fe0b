"""`sao prefer`: look at what is rewarded, try a change, make it, take it back, time it, hold it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from sao.cli.answers import answered, unreachable
from sao.cli.runs import find_run, refuse
from sao.preference import Preference, PreferenceDocument

TIMEOUT_S = 60.0
PATH = "/v1/preferences"
BAR = 24
CONFLICT = "Somebody changed it meanwhile: look with --history, then repeat, or --force."
_AHEAD = re.compile(r"\+(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN NAME=VALUE", help="A run's folder or run file; weights to change."),
]
Url = Annotated[str | None, typer.Option(metavar="URL", help="The reward service, instead of RUN.")]
Token = Annotated[str | None, typer.Option(envvar="SAO__AUTH__TOKEN", help="Its auth.token, with --url.")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="A whole document in JSON; weights on top.")]
Name = Annotated[str | None, typer.Option(help="The new version's name; default: what was changed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what it would change for trained trajectories.")]
Last = Annotated[int, typer.Option(help="With --dry-run: how many trajectories, the newest.")]
Rollback = Annotated[bool, typer.Option("--rollback", help="Repeat the version before, or version V: --rollback V.")]
At = Annotated[str | None, typer.Option(metavar="WHEN", help="+10m, 2030-01-31T14:00, 14:00, or update:500.")]
Scheduled = Annotated[bool, typer.Option("--scheduled", help="List the switches that wait.")]
Cancel = Annotated[int | None, typer.Option(metavar="ID", help="Forget a switch that waits.")]
History = Annotated[bool, typer.Option("--history", help="List the newest versions: when, by whom, why.")]
Hold = Annotated[bool, typer.Option("--hold", help="Refuse every change until --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Let changes go on.")]
Author = Annotated[str, typer.Option(envvar="USER", help="Who asks; kept with the change.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the change.")]
Force = Annotated[bool, typer.Option("--force", help="Also when somebody has changed it meanwhile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]


def prefer(  # noqa: PLR0917  # typer reads the signature
    words: Words = None,
    url: Url = None,
    token: Token = None,
    file: File = None,
    name: Name = None,
    dry_run: DryRun = False,
    last: Last = 200,
    rollback: Rollback = False,
    at: At = None,
    scheduled: Scheduled = False,
    cancel: Cancel = None,
    history: History = False,
    hold: Hold = False,
    resume: Resume = False,
    author: Author = "",
    reason: Reason = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Change what is rewarded while the run goes on; without a change, show it.

    NAME=VALUE sets one weight of the current preference and leaves the others; a component's last part is enough
    (`cute=1` for `style_cute`). The change is refused when somebody else was faster since it was read (exit 1).

    Try: `sao prefer runs/mine cute=1 classical=0 --dry-run`.

    Switch: `sao prefer runs/mine cute=1 classical=0 --reason "release 4"`; later: `--at +10m` or `--at update:500`.

    Take it back: `sao prefer runs/mine --rollback`. Let nobody change it: `--hold`, until `--resume`.

    Every change is a line of RUN/preferences/audit.jsonl.
    """
    version = next((int(word) for word in words or [] if rollback and word.isdigit()), None)
    run, weights = _sorted([word for word in words or [] if not (rollback and word.isdigit())], url)
    actions = {"--history": history, "--scheduled": scheduled, "--hold": hold, "--resume": resume}
    actions |= {"--rollback": rollback, "--cancel": cancel is not None}
    named = [flag for flag, given in actions.items() if given]
    change = bool(weights) or file is not None
    if len(named) + change > 1:
        what = [*named, *(["a change"] if change else [])]
        refuse(f"{' and '.join(what)} do not go together: ask for one")
    if (dry_run or at is not None or name is not None) and not change:
        refuse("--dry-run, --at and --name are about a change: give NAME=VALUE or --file")
    service = Service(run, url, token, {"author": author[:64], "reason": reason}, as_json=as_json)
    if change:
        _change(service, file, weights, name, at=at, last=last if dry_run else None, force=force)
    elif rollback:
        _roll_back(service, version, force=force)
    elif cancel is not None:
        service.ask("DELETE", f"{PATH}/schedule/{cancel}", signed=True)
        service.show(None, f"switch {cancel} is cancelled")
    elif named:
        _look(service, named[0])
    else:
        _show_current(service)


class Service:
    """The reward service of a run, asked once or twice; its refusals end the command with 1."""

    def __init__(
        self, run: Path | None, url: str | None, token: str | None, signature: Mapping[str, str], *, as_json: bool
    ) -> None:
        self._as_json = as_json
        self._signature = {key: value for key, value in signature.items() if value}
        self.url, found = (url.rstrip("/"), token) if url is not None else _service_of(run)
        self._headers = {"Authorization": f"Bearer {found}"} if found else {}
        self.console = Console(highlight=False, markup=False, emoji=False)  # names and reasons are people's

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
        if_match: int | None = None,
        signed: bool = False,
    ) -> Any:  # noqa: ANN401 - JSON
        """The answer's JSON; `signed`: with author and reason."""
        headers = {"If-Match": f'"{if_match}"'} if if_match is not None else {}
        params: dict[str, Any] = {**(query or {}), **(self._signature if signed else {})}
        try:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=self._headers) as http:
                response = http.request(method, f"{self.url}{path}", json=body, params=params, headers=headers)
        except httpx.RequestError as error:
            raise unreachable(self.url, error, otherwise="`sao up --run-dir RUN` starts it again.") from None
        return self._answered(response)

    def _answered(self, response: httpx.Response) -> Any:  # noqa: ANN401
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        conflict = response.status_code == httpx.codes.PRECONDITION_FAILED
        return answered(response, advice=CONFLICT if conflict else "")

    def show(self, answer: object, *shown: object) -> None:
        """The answer as JSON when that was asked for, else what is shown for people."""
        if self._as_json:
            typer.echo(json.dumps(answer, indent=2))
            return
        for one in shown:
            self.console.print(one)


def _sorted(words: Sequence[str], url: str | None) -> tuple[Path | None, dict[str, float]]:
    runs = [word for word in words if "=" not in word]
    if url is None and len(runs) != 1:
        refuse(f"name one run (its folder or run file), or --url; found {' '.join(runs) or 'none'}")
    if url is not None and runs:
        refuse(f"{runs[0]} is no NAME=VALUE, and the run is named by --url already")
    weights = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            try:
                weights[name] = float(value)
            except ValueError:
                refuse(f"{word}: {value!r} is no number")
    return Path(runs[0]) if runs else None, weights


def _service_of(run: Path | None) -> tuple[str, str | None]:
    assert run is not None
    found = find_run(run)
    config = found.config
    if config.reward.port == 0:
        refuse(f"{found.file} leaves reward.port open: name the folder of a run that was started, it has the port")
    host = "127.0.0.1" if config.reward.bind in {"0.0.0.0", "::"} else config.reward.bind  # noqa: S104  # compared
    token = config.auth.token
    address = f"http://{f'[{host}]' if ':' in host else host}:{config.reward.port}"
    return address, token.get_secret_value() if token is not None else None


def _change(
    service: Service,
    file: Path | None,
    weights: Mapping[str, float],
    name: str | None,
    *,
    at: str | None,
    last: int | None,
    force: bool,
) -> None:
    when = _moment(at) if at is not None else None
    current = Preference.model_validate(service.ask("GET", PATH))
    document = _proposed(service, current.document, file, weights, name).model_dump(mode="json")
    if_match = None if force else current.version
    if last is not None:
        found = service.ask("POST", f"{PATH}:dry-run", body=document, query={"last": last})
        service.show(found, *_dry_run_views(found))
    elif when is not None:
        body = {"document": document, **when}
        waits = service.ask("POST", f"{PATH}/schedule", body=body, if_match=if_match, signed=True)
        service.show(waits, f"switch {waits['id']} waits for {_when(waits)}; take it back: --cancel {waits['id']}")
    else:
        stored = service.ask("PUT", PATH, body=document, if_match=if_match, signed=True)
        back = f"take it back: --rollback {current.version}"
        service.show(stored, f"version {stored['version']} is rewarded from now on; {back}", _document_view(stored))


def _proposed(
    service: Service, current: PreferenceDocument, file: Path | None, weights: Mapping[str, float], name: str | None
) -> PreferenceDocument:
    document = current
    if file is not None:
        try:
            document = PreferenceDocument.model_validate_json(file.read_bytes())
        except OSError as error:
            refuse(f"{file}: {error.strerror or error}")
        except ValidationError as error:
            refuse(f"{file} is no preference document: {error}")
    if not weights:
        return document if name is None else _with(document, name=name)
    known = set(service.ask("GET", "/").get("components", []))
    changed = {_component(word, known): value for word, value in weights.items()}
    called = " ".join(f"{word}={value:g}" for word, value in weights.items())
    return _with(document, name=name or called[:64], weights={**document.weights, **changed})


def _with(document: PreferenceDocument, **members: object) -> PreferenceDocument:
    try:
        return PreferenceDocument.model_validate(document.model_dump() | members)
    except ValidationError as error:
        problem = error.errors()[0]
        refuse(f"{'.'.join(map(str, problem['loc'])) or 'document'}: {problem['msg']}")


def _component(word: str, known: set[str]) -> str:
    if word in known:
        return word
    ends = sorted(name for name in known if name.endswith(f"_{word}"))
    if len(ends) != 1:
        found = f"{word!r} could be {' or '.join(ends)}" if ends else f"there is no component {word!r}"
        refuse(f"{found}; there are {', '.join(sorted(known))}")
    return ends[0]


def _moment(text: str) -> dict[str, float | int]:
    """`at_s` or `at_update` of what stands behind --at."""
    if text.startswith("update:") and text[7:].isdigit():
        return {"at_update": int(text[7:])}
    if match := _AHEAD.fullmatch(text):
        return {"at_s": time.time() + timedelta(**{_UNITS[match[2]]: float(match[1])}).total_seconds()}
    now = datetime.now().astimezone()
    try:
        clock = datetime.strptime(text, "%H:%M").time()  # noqa: DTZ007 - today's, or tomorrow's, by the local clock
        moment = datetime.combine(now.date(), clock).astimezone()
        return {"at_s": (moment if moment > now else moment + timedelta(days=1)).timestamp()}
    except ValueError:
        pass
    try:
        return {"at_s": datetime.fromisoformat(text).astimezone().timestamp()}
    except ValueError:
        refuse(f"--at {text}: give +10m, 14:00, 2030-01-31T14:00, or update:500")


def _roll_back(service: Service, to: int | None, *, force: bool) -> None:
    current = service.ask("GET", PATH)["version"]
    version = to if to is not None else current - 1
    if version < 1:
        refuse(f"version {current} is the first: there is nothing before it")
    if_match = None if force else current
    stored = service.ask("POST", f"{PATH}/{version}:rollback", if_match=if_match, signed=True)
    told = f"version {stored['version']} repeats version {version}, it is rewarded from now on"
    service.show(stored, told, _document_view(stored))


def _look(service: Service, what: str) -> None:
    if what == "--history":
        found = service.ask("GET", f"{PATH}/history", query={"limit": 20})
        service.show(found, _history_view(found["preferences"]))
    elif what == "--scheduled":
        found = service.ask("GET", f"{PATH}/schedule")
        lines = [f"{one['id']}: {one['document']['name']} at {_when(one)}{_by(one)}" for one in found["scheduled"]]
        service.show(found, "\n".join(lines) or "no switch waits")
    else:
        found = service.ask("POST", f"{PATH}:{what.removeprefix('--')}", signed=True)
        service.show(found, _hold_view(found))


def _show_current(service: Service) -> None:
    current, held = service.ask("GET", PATH), service.ask("GET", f"{PATH}/hold")
    title = f"version {current['version']}, {_time(current['stored_s'])}{_by(current)}"
    service.show(current, title, _document_view(current), *([_hold_view(held)] if held["held"] else []))


def _document_view(preference: Mapping[str, Any]) -> Table:
    document = preference["document"]
    table = Table(title=document["name"], title_justify="left", box=None)
    table.add_column("component")
    table.add_column("weight", justify="right")
    table.add_column("beside", justify="left")
    names = dict.fromkeys([*document["weights"], *document["gates"], *document["thresholds"]])
    for component in names:
        weight = document["weights"].get(component)
        least = document["thresholds"].get(component)
        beside = ["gate"] if component in document["gates"] else []
        beside += [f"at least {least:g}"] if least is not None else []
        table.add_row(component, "" if weight is None else f"{weight:g}", ", ".join(beside))
    table.add_row("offset", f"{document['offset']:g}", f"clipped to {document['low']:g} .. {document['high']:g}")
    return table


def _history_view(preferences: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("version", "when", "how", "name", "who", "why", box=None)
    for one in preferences:
        how = f"rollback to {one['restores']}" if one["restores"] else one["origin"]
        who = one["author"] or one["client"]
        table.add_row(str(one["version"]), _time(one["stored_s"]), how, one["document"]["name"], who, one["reason"])
    return table


def _dry_run_views(found: Mapping[str, Any]) -> list[object]:
    if not found["compared"]:
        why = f"{found['trajectories']} trained trajectories found, none has every component of both preferences"
        return [why, *_gaps(found)]
    table = Table("reward", "now", "", "then", "", box=None)
    edges, most = found["edges"], max([*found["now"]["histogram"], *found["then"]["histogram"]])
    rows = zip(edges, edges[1:], found["now"]["histogram"], found["then"]["histogram"], strict=False)
    for low, high, now, then in rows:
        before, after = ("█" * round(BAR * count / most) for count in (now, then))
        table.add_row(f"{low:.3g} .. {high:.3g}", before, str(now or ""), after, str(then or ""))
    flips = found["flips"]
    movers = Table("biggest movers", "update", "now", "then", "", box=None)
    for one in found["examples"]:
        flip = "changes side" if one["flips"] else ""
        movers.add_row(one["id"], str(one["update"]), f"{one['now']:.3g}", f"{one['then']:.3g}", flip)
    compared, there = found["compared"], found["trajectories"]
    views: list[object] = [
        f"{compared} of the newest {there} trained trajectories, now under version {found['version']}",
        table,
        "; ".join(_summary(side, found[side]) for side in ("now", "then")),
        f"change side of the mean: {flips['up']} up, {flips['down']} down",
    ]
    if found["then"]["std"] == 0:
        views.append("every reward would be the same: nothing would be learnt from these")
    return [*views, *([movers] if found["examples"] else []), *_gaps(found)]


def _summary(side: str, rewards: Mapping[str, Any]) -> str:
    return f"{side}: mean {rewards['mean']:.3g}, median {rewards['deciles'][5]:.3g}, std {rewards['std']:.3g}"


def _gaps(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{count} lack {name}: they would be scored again" for name, count in found["missing"].items()]
    beside = {"missing_now": "lack a component of the present preference", "not_finite": "would have no finite reward"}
    lines += [f"{found[key]} {told}" for key, told in beside.items() if found[key]]
    return [*lines, *([f"{found['unreadable']} archived updates are unreadable"] if found["unreadable"] else [])]


def _hold_view(held: Mapping[str, Any]) -> str:
    return f"changes are held since {_time(held['since_s'])}{_by(held)}" if held["held"] else "changes go on"


def _by(signed: Mapping[str, Any]) -> str:
    who = signed["author"] or signed["client"]
    return (f" by {who}" if who else "") + (f": {signed['reason']}" if signed["reason"] else "")


def _when(switch: Mapping[str, Any]) -> str:
    return f"update {switch['at_update']}" if switch["at_update"] is not None else _time(switch["at_s"])


def _time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if unix_s else "before times were kept"
