"""The supervised start: what it learns from, where it is cached, and that nothing half-made is ever found there."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from sao.config import load_run_config
from sao.tasks import load_task
from sao.tasks.base import WarmStartable
from sao.tasks.tiny_tokenizer import build_tokenizer_json
from sao.tokenizer import FileTokenizer
from services.trainer import warm_start as module
from services.trainer.warm_start import collate, encode_demonstration, learning_rate, main
from services.trainer.warm_start_key import warm_start_key, warm_start_path


def run_file(tmp_path: Path) -> Path:
    tables = {
        "run": {"cache_dir": str(tmp_path / "cache")},
        "warm_start": {"steps": 3, "batch": 4},
        "model": {"hidden_size": 32, "layers": 1, "experts": 2},
    }
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("name", ["calculator", "writing"])
def test_a_demonstration_teaches_what_the_policy_says_and_nothing_else(name: str, tmp_path: Path) -> None:
    task = load_task(name)
    assert isinstance(task, WarmStartable)
    (tmp_path / "tokenizer.json").write_text(build_tokenizer_json(task))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    demonstration = next(iter(task.demonstrations(random.Random(0))))
    ids, learn = encode_demonstration(demonstration, tokenizer)
    taught = tokenizer.decode([i for i, flag in zip(ids, learn, strict=True) if flag])
    said = [text for text, produced in demonstration.pieces if produced]
    assert taught.replace(" ", "") == "".join(said).replace(" ", "")
    tokens, present, weights = collate([(ids, learn), (ids[:3], learn[:3])])
    assert tokens[0].tolist() == ids
    assert present.sum(1).tolist() == [len(ids), 3]
    assert weights[0].bool().tolist() == learn


def test_the_learning_rate_ramps_up_and_falls_to_a_twentieth() -> None:
    rates = [learning_rate(step, 700, 1.0) for step in range(700)]
    assert rates[0] == pytest.approx(1 / 30, rel=0.01)
    assert max(rates) == pytest.approx(1.0, rel=0.01)
    assert rates[-1] == pytest.approx(0.05, rel=0.01)


def test_the_checkpoint_is_cached_whole_with_progress_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_file(tmp_path)
    config = load_run_config(path, env={})

    def diverges(*_: object) -> float:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", diverges)
        with pytest.raises(ArithmeticError):
            main(["--config", str(path)])
    assert list((tmp_path / "cache" / "warm-start").iterdir()) == []

    assert main(["--config", str(path), "--progress-json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[0]["step"], lines[0]["steps"]) == (3, 3)
    assert lines[-1] == {"done": str(warm_start_path(config))}
    stored = json.loads((warm_start_path(config) / "config.json").read_text())
    assert (stored["tie_word_embeddings"], stored["vocab_size"]) == (False, 32)

    assert main(["--config", str(path), "--progress-json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines[-1:]


@pytest.mark.parametrize("change", ["run.seed=1", "model.layers=3", "warm_start.steps=9", "task.name=writing"])
def test_whatever_shapes_the_warm_start_changes_its_key(change: str) -> None:
    plain = load_run_config(None, [], env={})
    assert warm_start_key(load_run_config(None, [change], env={})) != warm_start_key(plain)
    assert warm_start_key(load_run_config(None, ["trainer.lr=0.1"], env={})) == warm_start_key(plain)


def test_the_key_is_known_without_torch() -> None:
    code = "import sys, services.trainer.warm_start_key; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
