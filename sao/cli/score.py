"""`sao score FILE`: what texts or trajectories are worth, under the current preference of a run or one of your own."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.cli.answers import answered, unreachable
from sao.cli.runs import find_run, refuse
from sao.config import RunConfig
from sao.preference import MissingComponentError, PreferenceDocument
from sao.tasks import TaskLoadError, load_task
from sao.tasks.base import Task, UnscorableError
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.texts import NoTrajectoryError, trajectory_of_text
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory

TIMEOUT_S = 300.0
"""Judges take their time; each has its own deadline in the service."""
PATH = "/v1/score"


class _Item(BaseModel):
    """One thing to score, as a line of the file has it and as the service takes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: Annotated[str, Field(min_length=1)] | None = None
    prompt: str | None = None
    task_payload: dict[str, JsonValue] | None = None
    trajectory: str | None = None
    trajectory_id: str | None = None

    @model_validator(mode="after")
    def _one_of_three(self) -> _Item:
        if sum(one is not None for one in (self.text, self.trajectory, self.trajectory_id)) != 1:
            msg = "expected one of text, trajectory (base64) and trajectory_id"
            raise ValueError(msg)
        return self


@dataclass(frozen=True)
class _Result:
    name: str
    answer: dict[str, Any]
    """As POST /v1/score answers."""


Ask = Callable[[_Item], dict[str, Any]]


def score(  # noqa: PLR0917  # typer reads the signature
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .json, .jsonl or .pb file.")],
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Ask this run; a run file will do.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask the reward service here.")] = None,
    task: Annotated[str | None, typer.Option(help="Ask nobody: compute this task's components here.")] = None,
    preference: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Score under this document, not the current one.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="With --task: the checkpoint whose tokenizer reads texts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, nothing else.")] = False,
) -> None:
    """Score what a file holds; nothing is trained, stored or changed by it.

    A **.jsonl** file has one object a line, a **.json** file one object or a list of them:
    `{"text": "a cute moon <eos>", "prompt": "moon"}` (with `task_payload` where the task needs more than the prompt),
    `{"trajectory_id": "..."}` or `{"trajectory": "<base64>"}`. A **.pb** file is one `sao.v1.Trajectory`, as a worker's
    spool has them.

    Say who computes, in one way: **--run-dir** or **--url** asks the reward service, judges included (its token comes
    from the run file or SAO__AUTH__TOKEN); **--task** needs no service and knows the task's own components only.

    Exit 0: everything was scored; 1: something was not (the outcome says why); 2: the file or an option is wrong.

    Examples: `sao score texts.jsonl --run-dir runs/mine`, `sao score texts.jsonl --task writing`,
    `sao score 0190-....pb --url http://127.0.0.1:8080 --preference cute.json --json`.
    """
    if [run_dir, url, task].count(None) != 2:
        refuse("say who computes, in one way: --run-dir RUN, --url URL or --task NAME")
    if model is not None and task is None:
        refuse("--model goes with --task: a service has its own tokenizer")
    items = _items(file)
    document = _document(preference)
    ask = _here(task, model, document) if task is not None else _remote(run_dir, url, document)
    results = [_Result(f"{file.name}:{number}", ask(item)) for number, item in enumerate(items, start=1)]
    if as_json:
        for result in results:
            typer.echo(json.dumps({"name": result.name, **result.answer}))
    else:
        Console().print(_table(results))
    raise typer.Exit(0 if all(result.answer["outcome"]["kind"] == "scored" for result in results) else 1)


def _items(file: Path) -> list[_Item]:
    try:
        content = file.read_bytes()
    except OSError as error:
        refuse(f"{file}: {error.strerror}")
    if file.suffix == ".pb":
        return [_Item(trajectory=base64.b64encode(content).decode())]
    lines = [line for line in content.split(b"\n") if line.strip()] if file.suffix == ".jsonl" else None
    try:
        found = json.loads(content) if lines is None else [json.loads(line) for line in lines]
    except ValueError as error:
        refuse(f"{file}: not JSON: {error}; a file of one object a line is called .jsonl, a protobuf .pb")
    objects = found if isinstance(found, list) else [found]
    if not objects:
        refuse(f"{file} holds nothing to score")
    return [_item(file, number, one) for number, one in enumerate(objects, start=1)]


def _item(file: Path, number: int, found: object) -> _Item:
    try:
        return _Item.model_validate({"text": found} if isinstance(found, str) else found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        refuse(f"{file}:{number}: {where + ': ' if where else ''}{first['msg']}; `sao score --help` has the forms")


def _document(file: Path | None) -> PreferenceDocument | None:
    if file is None:
        return None
    try:
        return PreferenceDocument.model_validate_json(file.read_bytes())
    except OSError as error:
        refuse(f"{file}: {error.strerror}")
    except ValidationError as error:
        first = error.errors()[0]
        refuse(f"{file}: no preference document: {'.'.join(map(str, first['loc']))}: {first['msg']}")


# --- asking a service ------------------------------------------------------------------------------------------


def _remote(run_dir: Path | None, url: str | None, document: PreferenceDocument | None) -> Ask:
    token = os.environ.get("SAO__AUTH__TOKEN")
    if run_dir is not None:
        config = _config(run_dir)
        host = "127.0.0.1" if config.reward.bind in {"0.0.0.0", "::"} else config.reward.bind  # noqa: S104  # compared
        url = f"http://{f'[{host}]' if ':' in host else host}:{config.reward.port}"
        token = config.auth.token.get_secret_value() if config.auth.token is not None else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    target = f"{str(url).rstrip('/')}{PATH}"
    under = {"preference": document.model_dump(mode="json")} if document is not None else {}

    def ask(item: _Item) -> dict[str, Any]:
        body = {**item.model_dump(exclude_none=True), **under}
        try:
            with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as http:
                return answered(http.post(target, json=body))
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise unreachable(target, error, otherwise="--task NAME needs no service.") from None

    return ask


def _config(run_dir: Path) -> RunConfig:
    found = find_run(run_dir)
    file, config = found.file, found.config
    if config.reward.port == 0:
        refuse(f"{file} leaves reward.port open: name the folder of a run that was started")
    return config


# --- with the task alone ---------------------------------------------------------------------------------------


def _here(name: str, model: Path | None, document: PreferenceDocument | None) -> Ask:
    try:
        task = load_task(name)
        tokenizer = tokenizer_of_run(model, task)
    except (TaskLoadError, VocabularyError) as error:
        refuse(str(error))
    under = document or task.default_preference

    def ask(item: _Item) -> dict[str, Any]:
        trajectory = _trajectory(task, tokenizer, item)
        found = {"trajectory_id": trajectory.id, "preference": under.name, "version": None}
        return {**found, "outcome": _outcome(task, tokenizer, trajectory, under)}

    return ask


def _trajectory(task: Task, tokenizer: Tokenizer, item: _Item) -> Trajectory:
    if item.trajectory_id is not None:
        refuse(f"{item.trajectory_id}: only a service finds a trajectory by its id; use --run-dir or --url")
    try:
        if item.text is not None:
            return trajectory_of_text(task, tokenizer, item.text, prompt=item.prompt, payload=item.task_payload)
        return Trajectory.from_bytes(base64.b64decode(item.trajectory or "", validate=True))
    except NoTrajectoryError as error:
        refuse(str(error))
    except (ValueError, DecodeError) as error:
        refuse(f"not a sao.v1.Trajectory: {error}")


def _outcome(
    task: Task, tokenizer: Tokenizer, trajectory: Trajectory, document: PreferenceDocument
) -> dict[str, object]:
    try:
        components = {name: float(value) for name, value in task.score(trajectory, tokenizer).items()}
        if bad := sorted(name for name, value in components.items() if not math.isfinite(value)):
            return {"kind": "infra_failed", "component": bad[0], "reason": f"{bad[0]} is {components[bad[0]]}"}
        value = document.value(components)
    except UnscorableError as error:
        return {"kind": "invalid", "reason": f"score: {error}"}
    except MissingComponentError as error:
        reason = f"task {task.name} alone does not compute {', '.join(error.missing)}; ask a service (--run-dir, --url)"
        return {"kind": "infra_failed", "component": "preference", "reason": reason}
    except Exception as error:  # noqa: BLE001 - the task is the user's; what it raises is the outcome
        return {"kind": "infra_failed", "component": "score", "reason": f"{type(error).__name__}: {error}"}
    return {"kind": "scored", "components": components, "judged": {}, "value": value}


# --- showing ---------------------------------------------------------------------------------------------------


def _table(results: Sequence[_Result]) -> Table:
    under = {_under(result.answer) for result in results}
    table = Table("", "outcome", "reward", "components, or why", box=None, title_justify="left")
    table.title = ", ".join(sorted(under))
    table.columns[0].overflow = "fold"
    for result in results:
        outcome = result.answer["outcome"]
        good = outcome["kind"] == "scored"
        reward = f"{outcome['value']:.4f}" if good else "-"
        kind = Text(outcome["kind"], style="green" if good else "bold red")
        table.add_row(Text(result.name), kind, Text(reward, style="bold"), Text(_parts(outcome) or _why(outcome)))
    return table


def _parts(outcome: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(outcome.get("components", {}).items()))


def _under(answer: Mapping[str, Any]) -> str:
    version = answer["version"]
    return f"preference {answer['preference']}" + (f", version {version}" if version is not None else "")


def _why(outcome: Mapping[str, Any]) -> str:
    if outcome["kind"] == "timeout":
        return f"{outcome['component']} took longer than {outcome['after_s']:g} s"
    where = f"{outcome['component']}: " if "component" in outcome else ""
    return f"{where}{outcome['reason']}" if "reason" in outcome else ""
