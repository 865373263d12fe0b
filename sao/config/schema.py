"""Every setting of a run, with its default, its unit and its source.

[P] marks what the SAO paper (arXiv 2607.07508) states, [D] a default of ours where it is silent.
Unknown keys are refused everywhere: a setting that is accepted and ignored costs somebody a run. Types are strict: a
number in quotes or a true for a count is a mistake, not a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from sao.config.algorithms import ALGORITHM_DEFAULTS, ALGORITHMS, Algorithm, AlgorithmName, conflicts
from sao.preference import ComponentName, Finite, PreferenceDocument

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Hours = Positive | Literal["forever"]
"""How long text of one class is kept."""

UP_GRACE_S = 3.0
"""What `sao up` gives every process between SIGTERM and SIGKILL; Ctrl-C promises five seconds in all."""


FilePath = Annotated[Path, Field(strict=False)]
"""TOML writes a path as a string."""

SETTING_ERROR = "sao_setting"
"""Type of the errors by which a validator of a whole section names the one key that is wrong."""


def wrong_setting(key: str, reason: str) -> PydanticCustomError:
    """The error of a section's validator: `key` within the section, and what is wrong with it."""
    return PydanticCustomError(SETTING_ERROR, "{reason}", {"key": key, "reason": reason})


def _require_patterns(patterns: Sequence[str]) -> None:
    """The error of `frozen` when one of these is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            reason = f"{pattern!r} is no regular expression: {error}"
            raise wrong_setting(key="frozen", reason=reason) from error


class Section(BaseModel):
    """A table of the run file; unknown keys are errors, values are immutable, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "run"
    """Names the run on the stream, the board and in every artefact."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the prompt order, the initial model, the engines and everything else that draws."""
    updates: Annotated[int, Field(ge=1)] | None = None
    """Policy updates after which the run ends; none: until stopped."""
    dir: FilePath = Path("runs/run")
    """Holds everything the run writes: stream file, checkpoints, versions, archive, logs, report."""
    cache_dir: FilePath = Path("~/.cache/sao")
    """Warm starts are kept here, by the hash of what made them."""


class RedisSection(Section):
    url: str = "redis://127.0.0.1:6379/0"
    """Redis >= 7 or Valkey. A password in it is passed to child processes by the environment, not by file."""
    embedded: bool = False
    """`sao up` starts a Valkey of its own and fills in `url`."""
    maxmemory_mb: Count = 512
    """Memory bound of the embedded Valkey; with a store of your own, what it has."""
    back_pressure_at: Fraction = 0.8
    """Share of maxmemory above which ingest answers RESOURCE_EXHAUSTED."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Of the embedded Valkey. `everysec` may lose a second of work in a power cut, `always` nothing."""
    dead_letters_mb: Count = 64
    """Dead letters take at most this much, their payloads included; beyond it the oldest are forgotten, and counted."""
    timeout_s: Positive = 5.0
    """Longest wait for one command."""

    @model_validator(mode="after")
    def _url_is_a_url(self) -> RedisSection:
        if not re.match(r"(rediss?|valkeys?|unix)://\S", self.url):
            raise wrong_setting(key="url", reason="expected redis://host:port/db, rediss:// or unix://")
        return self


class ModelSection(Section):
    path: FilePath | None = None
    """Hugging Face checkpoint directory of the initial policy; none: the task's tiny warm start."""
    hidden_size: Count = 64
    """Of the tiny model; also the width of each expert."""
    layers: Count = 2
    """Of the tiny model."""
    experts: Count = 8
    """Of the tiny model, per layer."""
    experts_per_token: Count = 2
    """Of the tiny model. The four that shape it are refused beside `path`."""

    @model_validator(mode="after")
    def _tiny_shape_only_without_path(self) -> ModelSection:
        shape = {"hidden_size", "layers", "experts", "experts_per_token"} & self.model_fields_set
        if self.path is not None and shape:
            raise wrong_setting(min(shape), f"shapes the tiny model, but model.path names a checkpoint ({self.path})")
        return self


class HardwareSection(Section):
    """What `sao check` compares memory with; nothing else reads it."""

    gpu_memory_gib: Positive | None = None
    """Memory of one GPU; none: not compared."""
    gpus: Count | None = None
    """GPUs of trainer and engines together; none: not counted."""
    engines: Count = 1
    """Engines that share them."""
    engine_gpus: Count = 1
    """GPUs of one engine (SGLang's `--tp-size`)."""
    engine_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Of a GPU's memory, what an engine takes for weights and cache at most (SGLang's `--mem-fraction-static`)."""
    parameters: Count | None = None
    """Of the checkpoint at model.path, where it isn't on the machine that checks."""
    cache_bytes_per_token: Count | None = None
    """Keys and values of one token in the engine, likewise: 2 x layers x key-value heads x head size x bytes."""


class WarmStartSection(Section):
    steps: Count = 700
    """Supervised steps that teach the tiny model its language."""
    batch: Count = 32
    """Demonstrations per step."""
    lr: Positive = 3e-3
    """Peak learning rate; it rises over 30 steps, then falls along a cosine."""


class TaskSection(Section):
    name: str = "calculator"
    """A task of sao.tasks, or `package.module:ClassName` of your own."""
    prompts: FilePath | None = None
    """JSONL file of prompts; none: the file that comes with the task."""


class SamplingSection(Section):
    temperature: Positive = 1.0
    """Of every turn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Anything but 1.0 for either is refused: the trainer's log-probs would be another distribution's."""

    @model_validator(mode="after")
    def _trainable(self) -> SamplingSection:
        for key in ("temperature", "top_p"):
            found = getattr(self, key)
            if found != 1.0:
                reason = f"training needs 1.0 (the importance ratio compares whole distributions); found {found}"
                raise wrong_setting(key, reason)
        return self


class EngineSection(Section):
    urls: list[str] = []
    """Base URLs of the SGLang servers; `sao up` starts `count` of its own and fills this in."""
    discovery: Literal["static", "dns"] = "static"
    """Where the weights service learns which engines there are: `urls`, or the addresses of `dns`, asked every 3 s."""
    dns: str = ""
    """name:port; the name resolves to an address for each engine, as that of a headless service does."""
    count: Count = 1
    """Engines that `sao up` starts."""
    environment: FilePath = Path(".venv-engine")
    """Virtual environment that holds SGLang, for `sao up`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in the engine."""
    max_running_requests: Count = 32
    """Sequences an engine decodes at a time."""
    max_total_tokens: Count = 8192
    """Tokens an engine's cache holds."""
    api_key: SecretStr | None = None
    """Of /generate."""
    admin_key: SecretStr | None = None
    """Of the calls that change weights or state."""
    start_timeout_s: Positive = 300.0
    """Longest wait until an engine answers."""

    @model_validator(mode="after")
    def _urls_are_urls(self) -> EngineSection:
        for url in self.urls:
            if not re.match(r"https?://[^/\s]+", url):
                raise wrong_setting(key="urls", reason=f"expected http://host:port, found {url!r}")
        return self

    @model_validator(mode="after")
    def _one_discovery(self) -> EngineSection:
        if self.discovery == "static" and self.dns:
            raise wrong_setting(
                key="dns", reason=f"{self.dns!r} is not asked: engine.discovery is static, expected dns"
            )
        if self.discovery == "dns" and self.urls:
            raise wrong_setting(key="urls", reason="engine.discovery is dns, which finds the engines; expected none")
        if self.discovery == "dns" and not re.fullmatch(r"[^\s/:]+:[0-9]{1,5}", self.dns):
            raise wrong_setting(key="dns", reason=f"expected name:port, found {self.dns!r}")
        return self


class RolloutSection(Section):
    worker_id: str = "worker-0"
    """Names the worker in its trajectories and leases; stable across restarts."""
    concurrency: Count = 8
    """Episodes in flight per worker."""
    max_turns: Count = 4
    """Actions per episode."""
    max_new_tokens: Count = 24
    """Per turn."""
    max_tokens: Count = 96
    """Prompt, actions and observations of one trajectory together."""
    turn_timeout_s: Positive = 60.0
    """Longest wait for one turn of the engine."""
    publish_attempts: Count = 8
    """Tries to publish a trajectory before its episode's place goes to another; it is offered again from the spool."""
    spool_dir: FilePath | None = None
    """Finished trajectories lie in <spool_dir>/<worker_id> until ingest has them; none: <run.dir>/spool/<worker_id>."""
    drain_s: NonNegative = 2.0
    """Asked to stop, it leases no more and gives the episodes in flight this long to be finished and published; a
    second signal cuts it short."""
    spool_mb: Count = 1024
    """No prompt is leased while the spool holds this much; the episodes in flight may still add to it."""
    metrics_port: Port = 0
    """/metrics, /healthz, /readyz; 0: a free port."""


class IngestSection(Section):
    bind: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """gRPC; 0: a free port."""
    target: str = ""
    """host:port that workers dial; filled in by `sao up`."""
    max_message_mb: Count = 32
    """Longest gRPC message taken."""
    max_tokens: Count = 131072
    """Longest trajectory taken."""
    logprob_tolerance: NonNegative = 1e-5
    """A log-prob may exceed 0 by this much (rounding in the engine)."""
    seen_horizon_h: Count = 24
    """How long an id is remembered, so that a repeat is recognised."""
    lease_ttl_s: Positive = 30.0
    """A lease that is not renewed for this long is given again."""
    episode_deadline_s: Positive = 300.0
    """No renewal reaches past this."""
    metrics_port: Port = 0
    """/metrics, /healthz, /readyz; 0: a free port."""


ScorerName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class _ScorerSection(Section):
    components: Annotated[dict[ComponentName, str], Field(min_length=1)]
    """What it computes: a description for each component, which a judge reads too."""
    deadline_s: Positive = 10.0
    """Longest time for one trajectory, retries included."""
    concurrency: Count = 16
    """Trajectories it works on at a time."""


SCORER_ENTRY_POINTS = "sao.scorers"
"""Group in which a package offers its scorers by name."""


class PythonScorerSection(_ScorerSection):
    kind: Literal["python"]
    target: Annotated[str, Field(min_length=1)]
    """`package.module:attribute`, or the name of an entry point in the group `sao.scorers`."""


class _RemoteScorerSection(_ScorerSection):
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """Where it listens: of an http scorer the whole URL, of a judge the API's base, for example http://judge:8000/v1."""
    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable with the bearer token; none: no token is sent."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Repeats within the deadline of a call that was refused, cut off, or answered 429 or 5xx."""
    backoff_s: Positive = 0.2
    """Longest pause before the first repeat; it doubles each time, and half of it is drawn by chance."""

    @model_validator(mode="after")
    def _url_can_be_called(self) -> _RemoteScorerSection:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise wrong_setting(key="url", reason=f"no URL: {error}") from error
        if not host or port == 0:
            raise wrong_setting(key="url", reason="it names no host and port that can be called")
        if parts.username is not None or parts.password is not None:
            reason = "it holds a user or a password, which logs would show: give the secret in token_env"
            raise wrong_setting(key="url", reason=reason)
        return self


class HttpScorerSection(_RemoteScorerSection):
    kind: Literal["http"]


class JudgeScorerSection(_RemoteScorerSection):
    kind: Literal["judge"]
    model: Annotated[str, Field(min_length=1)]
    """Name of the model, as the endpoint knows it."""
    low: Finite = 0.0
    """The least a score may be; one outside the range is a failure ..."""
    high: Finite = 1.0
    """... and the most."""
    max_tokens: Count = 512
    """Bound of one answer."""

    @model_validator(mode="after")
    def _range(self) -> JudgeScorerSection:
        if not self.low < self.high:
            raise wrong_setting(key="low", reason=f"{self.low:g} must lie below high {self.high:g}")
        return self


ScorerSection = Annotated[PythonScorerSection | HttpScorerSection | JudgeScorerSection, Field(discriminator="kind")]


class AlarmsSection(Section):
    enabled: bool = True
    """Whether scored trajectories are watched for reward hacking (docs/scorers.md)."""
    window: Annotated[int, Field(ge=50)] = 200
    """Trajectories in each of the two windows that are compared; two more lie between them."""
    rise: Positive = 0.5
    """A rewarded component rises when its mean grew by so many standard deviations ..."""
    collapse: Positive = 1.0
    """... and another one, or the length, collapses when its mean fell by so many."""


class PreferenceBounds(Section):
    """What a preference may ask for; a PUT beyond it is refused with 422."""

    weight: Positive = 1000.0
    """Largest absolute weight."""
    offset: Positive = 1000.0
    """Largest absolute offset."""
    reward: Positive = 1000.0
    """Largest absolute `low` and `high`: no reward lies outside, and so no advantage far beyond."""

    def broken_by(self, document: PreferenceDocument) -> tuple[str, str] | None:
        """The key of the first bound that a document breaks and what breaks it; None: it keeps to all."""
        values = {f"weights.{name}": ("weight", weight) for name, weight in document.weights.items()}
        values |= {"offset": ("offset", document.offset)}
        values |= {"low": ("reward", document.low), "high": ("reward", document.high)}
        for what, (key, value) in values.items():
            most = getattr(self, key)
            if abs(value) > most:
                return f"reward.bounds.{key}", f"{what} is {value:g}, reward.bounds.{key} allows {-most:g} to {most:g}"
        return None


class FeedbackSection(Section):
    component: ComponentName = "feedback"
    """Its name in preferences; none of the task's own."""
    low: Finite = 0.0
    """The least a value may be ..."""
    high: Finite = 1.0
    """... and the most."""
    deadline_s: Positive = 600.0
    """A trajectory waits this long for its feedback."""
    waiting_max: Count = 1024
    """Trajectories that wait at a time; beyond it the oldest expire at once."""
    on_expiry: Literal["drop", "score_without"] = "drop"
    """What nobody answered in time: a dead letter, or scored without where the current preference does not read it."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the trajectories that feedback is asked for, chosen by a hash of the id."""
    unasked: Finite | None = None
    """The component of every other trajectory; needed when share is below 1."""

    @model_validator(mode="after")
    def _values_are_declared(self) -> FeedbackSection:
        if not self.low < self.high:
            raise wrong_setting(key="low", reason=f"{self.low:g} must lie below high {self.high:g}")
        if self.share < 1 and self.unasked is None:
            reason = f"none, and with share {self.share:g} most trajectories are not asked for: what is it then"
            raise wrong_setting(key="unasked", reason=reason)
        if self.unasked is not None and not self.low <= self.unasked <= self.high:
            raise wrong_setting(key="unasked", reason=f"{self.unasked:g} is not within {self.low:g} to {self.high:g}")
        return self


class RewardSection(Section):
    bind: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """REST, /metrics, /healthz, /readyz; 0: a free port."""
    consumer: str = "reward-0"
    """Name in the consumer group; stable across restarts, never a pid."""
    batch: Count = 16
    """Deliveries read at a time."""
    threads: Count = 4
    """Trajectories that one scorer works on at a time."""
    component_timeout_s: Positive = 10.0
    """Longest time one scorer may take for one trajectory."""
    claim_idle_s: Positive = 30.0
    """A delivery unacknowledged for this long is taken over: also the wait before a failed scoring is tried again."""
    max_deliveries: Count = 5
    """Deliveries after which a trajectory that cannot be scored goes to the dead letters."""
    scorers: dict[ScorerName, ScorerSection] = {}
    """Scorers beside the task's own, `[reward.scorers.NAME]` each (docs/scorers.md)."""
    alarms: AlarmsSection = AlarmsSection()
    """Watch for reward hacking, `[reward.alarms]`."""
    preference_min_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0
    """Versions of the preference are at least this far apart, on all replicas together; 0: no limit."""
    bounds: PreferenceBounds = PreferenceBounds()
    """What a preference may ask for: largest absolute `weight`, `offset` and `reward` (its `low` and `high`)."""
    feedback: FeedbackSection | None = None
    """A component that a person or a product supplies minutes later (docs/feedback.md); none: there is no such."""

    @model_validator(mode="after")
    def _components_are_told_apart(self) -> RewardSection:
        owner: dict[str, str] = {}
        for name, scorer in self.scorers.items():
            for component in scorer.components:
                if component in owner:
                    reason = f"{component!r} is computed by scorer {owner[component]!r} already; rename one of them"
                    raise wrong_setting(key=f"scorers.{name}.components", reason=reason)
                owner[component] = name
        return self

    @property
    def more_components(self) -> frozenset[str]:
        """What the run has beside the task's components."""
        supplied = {self.feedback.component} if self.feedback is not None else set[str]()
        return frozenset(component for scorer in self.scorers.values() for component in scorer.components) | supplied


class CriticSection(Section):
    lr: Positive = 5e-6  # [P]
    """Of the critic."""
    updates_per_policy_update: Count = 2  # [P] K
    """K: critic steps on the same trajectories before each policy step."""
    frozen: list[str] = [r"\.self_attn\.", r"\.mlp\.gate\.", r"norm", r"embed_tokens"]
    """Regular expressions over parameter names: attention as in the paper; router, norms and embeddings are ours."""
    pretrain_trajectories: Annotated[int, Field(ge=0)] = 1024  # [D]
    """Trajectories of the initial policy that the critic alone may train on first, at most; 0: no pre-training."""
    pretrain_explained_variance: Annotated[float, Field(le=1, allow_inf_nan=False)] = 0.2  # [D]
    """Gate: pre-training ends when the explained variance, over a full window, is at least this."""
    warmup_updates: Annotated[int, Field(ge=0)] = 10  # [D]
    """Critic-only updates after that, with a linear learning-rate ramp, before the policy moves."""
    explained_variance_window: Count = 64
    """Trajectories over which explained variance is computed."""

    @model_validator(mode="after")
    def _patterns_compile(self) -> CriticSection:
        _require_patterns(self.frozen)
        return self

    @model_validator(mode="after")
    def _gate_can_be_judged(self) -> CriticSection:
        most, window = self.pretrain_trajectories, self.explained_variance_window
        if 0 < most < window:
            reason = f"{most} never fill critic.explained_variance_window ({window}): the gate could not be judged"
            raise wrong_setting(key="pretrain_trajectories", reason=reason)
        return self


class TrainerSection(Section):
    algorithm: AlgorithmName = "sao"
    """What turns rewards into gradients (docs/algorithm.md)."""
    trajectories_per_update: Count = 1
    """Trajectories per optimiser step; 1 is pure streaming."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on cuda, else float32."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed: 1 shards the optimiser, 2 the gradients too, 3 the weights too."""
    ranks: Count = 1
    """Data-parallel processes."""
    lr: Positive | Literal["auto"] = 1e-6  # [P]
    """`auto`: lr_per_trajectory x trajectories_per_update, at most lr_max."""
    lr_per_trajectory: Positive = 1e-6
    """For lr = "auto"."""
    lr_max: Positive = 1e-6
    """For lr = "auto"."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.99)
    """Of AdamW."""
    weight_decay: NonNegative = 0.0
    """Of AdamW."""
    frozen: list[str] = []
    """Regular expressions over the policy's parameter names; what one finds does not train. None in the paper."""
    gradient_clip: Positive = 1.0
    """Largest norm of the gradient."""
    eps_low: Annotated[float, Field(gt=0, le=1)] = 0.3  # [P] math with tools
    """A token counts while its importance ratio is above 1 - eps_low ..."""
    eps_high: Positive = 5.0  # [P]
    """... and below 1 + eps_high."""
    gamma: Fraction = 1.0  # [P]
    """Discount per action token."""
    alpha: Positive = 1.5  # [P] length-adaptive lambda
    """Length-adaptive lambda of the policy: 1 - 1 / (alpha x action tokens)."""
    lambda_critic: Fraction = 1.0  # [P]
    """GAE lambda of the critic's targets."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"  # [D]
    """Mean over the update's action tokens, or over trajectories of their means."""
    advantage_norm: Literal["none", "whiten"] = "none"  # [D]
    """`whiten`: zero mean and unit variance over the update."""
    kl_coef: NonNegative = 0.0  # [P] the paper uses none
    """Weight of the k3 estimate of KL(policy || frozen initial policy)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    nll_coef: NonNegative = 0.0  # [D] VAPO's own: 0.1
    """Weight of the negative log-likelihood of rollouts with a reward of at least 1."""
    stale_policy: Literal["mask_tokens", "drop"] = "mask_tokens"  # [D]
    """Tokens older than max_lag carry no weight, or their whole trajectory is dropped."""
    max_lag: Annotated[int, Field(ge=0)] = 4  # [D] tau, in updates
    """tau: the oldest that may train, in updates."""
    publish_every: Count = 1
    """Updates between published versions."""
    publish_min_seconds: NonNegative = 0.0
    """And at least so many seconds; but after max_lag + 1 updates a version is published in any case."""
    preference_policy: Literal["keep", "rescore", "drop"] = "rescore"
    """What to do with an outcome scored under another preference than the update's."""
    routing_replay: bool = False
    """The trainer's policy sends each token to the experts that the engine chose when it sampled, as far as they are on
    record, instead of to its own router's choice; mixture-of-experts models only. Engines need
    `--enable-return-routed-experts`; those that `sao up` starts get it."""
    logprob_chunk: Count = 1024
    """Positions whose full-vocabulary logits are held at a time."""
    starvation_timeout_s: Positive = 600.0
    """No trajectory for this long while the run is not over: /healthz fails."""
    metrics_port: Port = 0
    """/metrics, /healthz, /readyz; 0: a free port."""

    @property
    def policy_lr(self) -> float:
        """The learning rate in force."""
        if self.lr == "auto":
            return min(self.lr_max, self.lr_per_trajectory * self.trajectories_per_update)
        return self.lr

    @model_validator(mode="after")
    def _patterns_compile(self) -> TrainerSection:
        _require_patterns(self.frozen)
        return self

    @model_validator(mode="after")
    def _publish_before_everything_is_stale(self) -> TrainerSection:
        if self.publish_every > self.max_lag + 1:
            reason = f"{self.publish_every} is more than max_lag + 1 = {self.max_lag + 1}: every token would be stale"
            raise wrong_setting(key="publish_every", reason=reason)
        return self


class GroupSection(Section):
    size: Annotated[int, Field(ge=2)] = 8  # [P] G
    """Rollouts of one prompt that are compared with each other."""
    timeout_s: Positive = 300.0  # [D]
    """Wait for missing members from a group's first on; then valid ones are repeated when more than half are there, or
    the group is dropped. Also the longest wait of grpo_sync for the engines."""


class PpoSection(Section):
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # [P]
    """A token with a negative advantage stops counting when its ratio to the old policy is below 1 - clip_low ..."""
    clip_high: Positive = 0.28  # [P]
    """... one with a positive advantage above 1 + clip_high."""
    old: Literal["batch_start", "rollout"] = "batch_start"  # [P]
    """The old policy: the trainer's own at the start of the update, or whatever sampled the token."""
    minibatches: Count = 1  # [P]
    """Policy steps per update; at 1 and `batch_start` every ratio is 1 and nothing is ever clipped."""


class MovingAverageSection(Section):
    scope: Literal["prompt", "global"] = "prompt"  # [P]
    """One average for each prompt, or one for all."""
    window: Count | Literal["auto"] = "auto"  # [P]
    """Rewards in it; `auto`: 8 for each prompt, 128 for all."""

    @property
    def rewards(self) -> int:
        """The window in force."""
        if self.window == "auto":
            return 8 if self.scope == "prompt" else 128
        return self.window


class SpoSection(Section):
    drift_half: Positive = 0.06
    """Policy drift (KL, nats per token) at which the tracker forgets half of what it knew."""
    rho_min: Annotated[float, Field(gt=0, le=1)] = 0.875
    """It keeps at least this share of it ..."""
    rho_max: Annotated[float, Field(gt=0, le=1)] = 0.96
    """... and at most this."""


class GuardsSection(Section):
    window: Annotated[int, Field(ge=2)] = 50
    """Policy updates that a guard looks at; none judges before that many were made."""
    entropy_slope: Positive | Literal["off"] = 0.05
    """Publishing is held while the entropy rises or falls faster than this, in nats per update ..."""
    rejected_share: Fraction | Literal["off"] = 0.3
    """... or more than this share of the action tokens that are not stale is rejected, on average ..."""
    mismatch_kl: Positive | Literal["off"] = 0.1
    """... or policy and rollout differ by more than this at lag 0, in nats (k3 estimate), on average ..."""
    explained_variance: Annotated[float, Field(le=1, allow_inf_nan=False)] | Literal["off"] = -1.0
    """... or the critic's explained variance is nowhere in the window as high as this."""


class CheckpointSection(Section):
    every_updates: Count = 25
    """Updates between checkpoints."""
    keep_last: Count = 3
    """Newest checkpoints that are kept."""
    keep_every: Annotated[int, Field(ge=0)] = 25
    """The first checkpoint of each stretch of so many updates is kept for ever, the first stretch left out; 0: none."""
    unacked_mb_max: Count = 64
    """Checkpoint early when the unacknowledged payloads exceed this."""
    starved_after_s: Positive = 5.0
    """Checkpoint early when nothing that trains has arrived for this long and work is unacknowledged."""
    free_space_mb: Count = 256
    """Refuse to write below this much free space."""


class WeightsSection(Section):
    bind: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """REST, /metrics, /healthz, /readyz; 0: a free port."""
    store_dir: FilePath | None = None
    """Where versions live, on a file system the engines can read; none: <run.dir>/versions."""
    keep_versions: Count = 4
    """Newest versions that are kept, beside those an engine holds."""
    step_timeout_s: Positive = 30.0
    """Deadline of each step of a round."""
    round_attempts: Count = 3
    """Tries to bring one engine to a version before it is quarantined."""
    mode: Literal["retract", "abort", "in_place"] = "retract"
    """What becomes of running turns when an engine takes new weights: they are computed again under them; they end, and
    their episodes begin anew; or they go on under them with the keys and values of the old ones. Not for algorithms
    that wait for the weights of every update: `in_place`."""
    engines_out_max: Count | None = None
    """Serving engines that may be out of rotation for a round at once; none: half of the engines, rounded up. The last
    one that serves stays while another is being brought up."""
    canary_tolerance: Positive = 1e-4
    """Largest |log-prob difference| of the canary in float32; in bfloat16 the largest mean that the first version may
    show, whose own mean and 99th percentile then bound the later ones (twice and three times)."""
    canary_drift_max: Positive | Literal["off"] = 2.0
    """A version is held when its canary's log-probs differ by more than this from those of the last version that was
    let through, on average, in nats."""
    poll_s: Positive = 0.05
    """Wait between looks at the board."""


class TracesSection(Section):
    endpoint: str = ""
    """OTLP/gRPC endpoint of a collector that takes the spans, http://host:4317 or https://...; empty: no traces. Needs
    `sao[traces]`."""
    sample: Fraction = 1.0
    """Share of the trajectories that is traced; their ids decide, so every service decides alike."""
    timeout_s: Positive = 5.0
    """Deadline of one export; what the collector has not taken by then is dropped, and counted."""
    queue_spans: Annotated[int, Field(ge=2)] = 4096
    """Spans that wait for the next export, in each process; beyond them they are dropped, and counted."""

    @model_validator(mode="after")
    def _endpoint_is_an_address(self) -> TracesSection:
        # Without a user or a password, which logs would show: the exporter takes headers from its own variables. With
        # a port: it would take 443, whatever the scheme.
        found = re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[^/\s@?#:\[\]]+):(\d{1,5})", self.endpoint)
        if self.endpoint and not (found and 0 < int(found[2]) < 2**16):
            raise wrong_setting(key="endpoint", reason=f"expected http://host:port, found {self.endpoint!r}")
        return self


class RetentionSection(Section):
    """Text that is older goes, ids and numbers stay: docs/privacy.md has who removes it and when."""

    archive_h: Hours = "forever"
    """Of what was trained on, from the beginning of its trajectory; what a kept checkpoint may train again stays
    whatever this says."""
    dead_letters_h: Hours = "forever"
    """In the store, from the burial; redis.dead_letters_mb bounds them too."""
    dead_folder_h: Hours = 720.0
    """Files of <run.dir>/dead, from the beginning of their trajectory."""
    set_aside_h: Hours = 168.0
    """Damaged files that were set aside in spools, likewise."""
    logs_h: Hours = "forever"
    """Lines of <run.dir>/logs, which `sao up` writes."""


class AuthSection(Section):
    token: SecretStr | None = None
    """Bearer token of gRPC and REST; none: no authentication (loopback and tests)."""


class RunConfig(Section):
    """A whole run file."""

    run: RunSection = RunSection()
    redis: RedisSection = RedisSection()
    model: ModelSection = ModelSection()
    hardware: HardwareSection = HardwareSection()
    warm_start: WarmStartSection = WarmStartSection()
    task: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    ingest: IngestSection = IngestSection()
    reward: RewardSection = RewardSection()
    preference: PreferenceDocument | None = None
    """The first preference; none: the task's own default."""
    trainer: TrainerSection = TrainerSection()
    critic: CriticSection = CriticSection()
    group: GroupSection = GroupSection()
    ppo: PpoSection = PpoSection()
    moving_average: MovingAverageSection = MovingAverageSection()
    spo: SpoSection = SpoSection()
    guards: GuardsSection = GuardsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    weights: WeightsSection = WeightsSection()
    traces: TracesSection = TracesSection()
    retention: RetentionSection = RetentionSection()
    auth: AuthSection = AuthSection()

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_does(cls, tables: Any) -> Any:  # noqa: ANN401 - whatever was given, checked after this
        trainer = tables.get("trainer") if isinstance(tables, Mapping) else None
        name = trainer.get("algorithm") if isinstance(trainer, Mapping) else getattr(trainer, "algorithm", None)
        defaults = ALGORITHM_DEFAULTS.get(name, {}) if isinstance(name, str) else {}  # type: ignore[call-overload]
        filled = {
            section: values | dict(tables.get(section, {}))
            for section, values in defaults.items()
            if isinstance(tables.get(section, {}), Mapping)
        }
        return {**tables, **filled} if filled else tables

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> RunConfig:
        for key, reason in conflicts(self):
            raise wrong_setting(key, reason)
        return self

    @model_validator(mode="after")
    def _archive_can_be_let_go(self) -> RunConfig:
        every = self.checkpoint.keep_every
        if self.retention.archive_h != "forever" and every > 0:
            reason = f"checkpoint.keep_every is {every}: what it keeps for ever may train again all that came after it"
            raise wrong_setting(key="retention.archive_h", reason=f"{reason}; expected checkpoint.keep_every = 0")
        return self

    @property
    def algorithm(self) -> Algorithm:
        """What the run's algorithm is made of."""
        return ALGORITHMS[self.trainer.algorithm]

    @property
    def samples(self) -> int:
        """Rollouts that the run wants of each prompt."""
        return self.group.size if self.algorithm.in_groups else 1

    @property
    def versions_dir(self) -> Path:
        """Where weight versions are stored."""
        return self.weights.store_dir or self.run.dir / "versions"

    @property
    def admission_limit(self) -> int:
        """The most trajectories leased, or durable and not yet consumed (docs/architecture.md, Leases)."""
        if self.algorithm.synchronous:
            return self.trainer.trajectories_per_update
        fresh = (self.trainer.max_lag + 2 - self.trainer.publish_every) * self.trainer.trajectories_per_update
        if self.trainer.stale_policy == "mask_tokens":
            return max(fresh, self.rollout.concurrency)
        return max(fresh, 1)
