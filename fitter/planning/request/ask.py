"""The checked parameters of a call, before libllama is needed: load, machine and objective. Bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

from fitter.errors import UsageError
from fitter.llama.types import Params, VirtualDevice
from fitter.machine.gpu import virtual_devices
from fitter.machine.machine import speed_of_host
from fitter.model.header import Model
from fitter.parameters.table import (
    DEFAULTS,
    DRAFT,
    DRAFTING,
    MAX_SEQUENCES,
    NEEDS,
    PARAMETERS,
    PROJECTOR,
    SPECULATION,
    Fitting,
    LoadKeywords,
    Measuring,
    ServerKeywords,
    taken_by,
)
from fitter.planning.request.constraints import (
    check_choices,
    check_paging,
    check_pins,
    check_profile,
    check_split_mode,
    check_split_tensors,
    levers,
    params_of,
)
from fitter.planning.request.session import Session, session_of
from fitter.planning.request.shared import DRAFT_MAX, parse_reserve
from fitter.programs import PROGRAMS, Asked, Facts, Program, facts


@dataclass(frozen=True)
class Sharing:
    """Models and memory that share the devices with the model; named as the keywords of ``fit``.

    Attributes:
        more: Keywords for drafting without a model that the user sets, with the tokens at a time.
    """

    reserve: Mapping[str, int] | tuple[str, ...] = DEFAULTS["reserve"]
    beside: tuple[str, ...] = DEFAULTS["beside"]
    model_draft: str | None = DEFAULTS["model_draft"]
    devices_draft: tuple[str, ...] | None = DEFAULTS["devices_draft"]
    n_gpu_layers_draft: int | None = DEFAULTS["n_gpu_layers_draft"]
    type_k_draft: str | None = DEFAULTS["type_k_draft"]
    type_v_draft: str | None = DEFAULTS["type_v_draft"]
    n_ubatch_draft: int | None = DEFAULTS["n_ubatch_draft"]
    mtp: bool = DEFAULTS["mtp"]
    draft_max: int | None = DEFAULTS["draft_max"]
    acceptance: float | None = DEFAULTS["acceptance"]
    mmproj: str | None = DEFAULTS["mmproj"]
    mmproj_device: str | None = DEFAULTS["mmproj_device"]
    image_min_tokens: int | None = DEFAULTS["image_min_tokens"]
    image_max_tokens: int | None = DEFAULTS["image_max_tokens"]
    spec_type: tuple[str, ...] = DEFAULTS["spec_type"]
    more: tuple[tuple[str, int], ...] = ()

    def check(self) -> None:
        """Raise ``UsageError`` if the parameters contradict each other on any machine."""
        parse_reserve(self.reserve)
        if self.model_draft is not None and self.mtp:
            raise UsageError(f"-md and {self.mtp_word} exclude each other: leave one of them out")
        if len(set(named := self.named_for_draft or ())) != len(named):
            raise UsageError("a device of the draft model is named twice: leave one out")
        for word in self.spec_type:
            if word not in SPECULATION:
                raise UsageError(
                    f"no plan can be made for drafting with '{word}' (--spec-type): choose from "
                    f"{', '.join(SPECULATION)}"
                )
        if "draft-simple" in self.spec_type and self.model_draft is None:
            raise UsageError("--spec-type draft-simple drafts with a model: name it with -md, or leave it out")
        there = {DRAFT: self.model_draft, DRAFTING: self.drafts_with_a_model, PROJECTOR: self.mmproj}
        for name, value in {**vars(self), **dict(self.more)}.items():
            needs = PARAMETERS[name].needs if name != "more" and value is not None else ""
            if needs and not there.get(needs, needs in self.spec_type):
                option = PARAMETERS[name].options[0]
                raise UsageError(f"{option} is about {needs}: {NEEDS[needs]}, or leave it out")
        if self.acceptance is not None and self.acceptance > 1:
            raise UsageError(f"--acceptance is {self.acceptance:g}: give a share from 0 to 1, such as 0.7 or 70%")

    @property
    def ngrams(self) -> dict[str, tuple[str, ...]]:
        """The ways to draft without a model, with llama-server's arguments for each."""
        ways = (way for way in self.spec_type if way in _NGRAMS)
        return {way: ("--spec-type", way, *(str(word) for pair in self._set_of(way) for word in pair)) for way in ways}

    def _set_of(self, way: str) -> list[tuple[str, int]]:
        """Return the options of a way to draft that the user sets, with their values."""
        return [(each.option, value) for name, value in self.more if (each := PARAMETERS[name]).needs == way]

    @property
    def mtp_word(self) -> str:
        """The user's own words for drafting with the model's own layers."""
        return "--spec-type draft-mtp" if "draft-mtp" in self.spec_type else "--mtp"

    @property
    def drafts_with_a_model(self) -> bool:
        """Whether a draft model or the model's own layers draft."""
        return self.mtp or self.model_draft is not None

    def drafted(self, program_facts: Facts) -> int:
        """Return the most tokens that a program drafts at a time (``common_speculative_n_max``)."""
        most = [(self.draft_max or program_facts.draft_n_max) if self.drafts_with_a_model else 0]
        for way in self.ngrams:
            most.append(max(dict(self._set_of(way)).values(), default=program_facts.draft_tokens[way]))
        return max(most)

    @property
    def n_rs_seq(self) -> int:
        """Recurrent states that llama-server keeps to take drafted tokens back."""
        return (self.draft_max or DRAFT_MAX) if self.mtp else 0

    @property
    def named_for_draft(self) -> tuple[str, ...] | None:
        """Devices of the draft model, empty for the host; ``None`` if the fit chooses them."""
        return _device_names(self.devices_draft)

    @property
    def named_for_projector(self) -> tuple[str, ...] | None:
        """The device of the projector, empty for the host; ``None`` if the fit chooses it."""
        return None if self.mmproj_device is None else _device_names((self.mmproj_device,))

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that the user names for the draft model or the projector."""
        return tuple(dict.fromkeys((*(self.named_for_draft or ()), *(self.named_for_projector or ()))))

    @property
    def may_be_anywhere(self) -> bool:
        """Whether a draft model or projector may use any device of the machine."""
        return self.model_draft is not None or bool(self.mmproj)


@dataclass(frozen=True)
class Ask:
    """The checked parameters of one call, without callbacks and worker; fields are named as the keywords.

    Attributes:
        load: Parameters of the load that need no model. A fit chooses ``devices`` and ``main_gpu`` later.
        given: Names of the keywords that the user set.
        sharing: Models and memory that share the devices.
        split_poolings: The program's (``Facts.split_poolings``).
        words: The keywords as the user set them.
    """

    load: Params = field(default_factory=Params)
    program: str = "any"
    given: frozenset[str] = frozenset()
    sharing: Sharing = field(default_factory=Sharing)
    gpus: tuple[str | VirtualDevice, ...] = DEFAULTS["gpus"]
    profile: str | None = DEFAULTS["profile"]
    llama_cpp: str | None = DEFAULTS["llama_cpp"]
    rpc: tuple[str, ...] = DEFAULTS["rpc"]
    timeout: float = DEFAULTS["timeout"]
    time_limit: float | None = DEFAULTS["time_limit"]
    host_memory: int | None = DEFAULTS["host_memory"]
    host_margin: int = DEFAULTS["host_margin"]
    margin: int | str | tuple[int, ...] | None = DEFAULTS["margin"]
    fit_ctx: int = DEFAULTS["fit_ctx"]
    allow: tuple[str, ...] = DEFAULTS["allow"]
    skeleton: bool = DEFAULTS["skeleton"]
    devices: tuple[str, ...] | None = DEFAULTS["devices"]
    main_gpu: int = DEFAULTS["main_gpu"]
    cpu_moe: bool = DEFAULTS["cpu_moe"]
    n_cpu_moe: int | None = DEFAULTS["n_cpu_moe"]
    n_cpu_ffn: int | None = DEFAULTS["n_cpu_ffn"]
    prompt: int | None = DEFAULTS["prompt"]
    generate: int | None = DEFAULTS["generate"]
    workload: str | None = DEFAULTS["workload"]
    users: int | None = DEFAULTS["users"]
    at_least: float | None = DEFAULTS["at_least"]
    host_bandwidth: float | str | None = DEFAULTS["host_bandwidth"]
    rpc_bandwidth: float | str | tuple[float | str, ...] | None = DEFAULTS["rpc_bandwidth"]
    objective: str = DEFAULTS["objective"]
    context_cost: float = DEFAULTS["context_cost"]
    strategy: str = DEFAULTS["strategy"]
    split_poolings: tuple[str, ...] = ()
    words: Fitting = field(default_factory=lambda: Fitting(), compare=False, repr=False)

    @classmethod
    def of(cls, checked: Fitting) -> Ask:
        """Build the parameters of ``fit`` from keywords that are each checked; ``None`` is not set.

        Raises:
            UsageError: Keywords contradict each other on any machine.
        """
        sharing = Sharing(**_set(Sharing, checked), more=_ngram_words(checked))
        if sharing.spec_type == ("none",):
            sharing = replace(sharing, spec_type=())
        if "draft-mtp" in sharing.spec_type:
            sharing = replace(sharing, mtp=True)
        program = PROGRAMS[checked.get("program") or "any"]
        known = facts(program.name)
        ask = cls(
            load=_initial_params(checked, sharing, program, known),
            given=_user_set(checked),
            sharing=sharing,
            split_poolings=tuple(known.split_poolings),
            words=checked,
            **_set(cls, checked),
        )
        ask.check()
        return ask

    def with_facts(self, program_facts: Facts) -> Ask:
        """Return the parameters as a version of the program, with these facts loads them."""
        program = PROGRAMS[self.program]
        program.check_facts(self.given, program_facts)
        sharing = self.sharing
        if program_facts.draft_n_max != DRAFT_MAX and sharing.draft_max is None and sharing.drafts_with_a_model:
            # this version's default differs, so the arguments must name it
            sharing = replace(sharing, draft_max=program_facts.draft_n_max)
        # keep the local files of adapters, which may have addresses
        load = replace(_initial_params(self.words, sharing, program, program_facts), lora=self.load.lora)
        return replace(self, sharing=sharing, load=load, split_poolings=tuple(program_facts.split_poolings))

    def having(self, words: Mapping[str, Any], program_facts: Facts) -> Ask:
        """Return the parameters with other ``words``, as ``with_facts`` does. Raises ``UsageError`` as ``of`` does."""
        changed = cast(Fitting, {**self.words, **words})
        sharing = replace(self.sharing, **_set(Sharing, words), more=_ngram_words(changed))
        given = self.given | _user_set(words)
        ask = replace(self, words=changed, given=given, sharing=sharing, **_set(Ask, words))
        ask = ask.with_facts(program_facts)
        ask.check()
        return ask

    def for_model(self, model: Model, program_facts: Facts) -> Ask:
        """Return the parameters as the program loads ``model``. Raises ``UsageError`` where it changes the user's."""
        words = PROGRAMS[self.program].of_model(model, self.set_words)
        return self.having(words, program_facts) if words else self

    @property
    def set_words(self) -> Mapping[str, Any]:
        """The keywords that are set."""
        words: Mapping[str, Any] = self.words
        return {name: words[name] for name in self.given}

    def for_texts(self, model: Model) -> tuple[Ask, tuple[str, ...]]:
        """Return the parameters with what an embedder or reranker needs, and a note on it.

        With ``--embedding`` or ``--reranking`` where the header pools. With a pooling where it does not, and the user
        embeds: llama-server's ``/v1/embeddings`` refuses a model without, and elsewhere each token gets an embedding.
        """
        if not model.pooling and self.words.get("embedding") and "pooling_type" not in self.given:
            if not PROGRAMS[self.program].is_server:
                return self, ()
            pooling = "last" if model.is_causal else "mean"
            note = f"planned with --pooling {pooling}: the header has none, and /v1/embeddings refuses --pooling none"
            return replace(self, words=cast(Fitting, {**self.words, "pooling_type": pooling})), (note,)
        is_set = {"embedding", "reranking"} & self.given or self.sharing.drafts_with_a_model or self.sharing.ngrams
        if not model.pooling or is_set:
            return self, ()
        ranks = model.pooling == "rank" and "reranking" in PROGRAMS[self.program].knows
        name = "reranking" if ranks else "embedding"
        note = f"planned with --{name}: {model.architecture}.pooling_type of the header is {model.pooling}"
        return replace(self, words=cast(Fitting, {**self.words, name: True})), (note,)

    def with_one_slot(self, program_facts: Facts) -> Params | None:
        """Return the parameters with one sequence (``-np 1``); ``None`` where their number is the user's."""
        if self.given & {"n_seq_max", "kv_unified_per_slot"} or (self.session and self.session.users > 1):
            return None
        words = cast(Fitting, {**self.words, "n_seq_max": 1})
        return replace(self, words=words).with_facts(program_facts).load

    @classmethod
    def of_a_load(cls, checked: Measuring) -> Ask:
        """Build the parameters of exactly one load. Raises ``UsageError`` as ``of`` does."""
        load = params_of(None, **_shaped(checked))
        ask = cls(load=load, given=_user_set(checked), **_set(cls, checked))
        ask.check_machine()
        check_split_tensors(ask.load)
        return replace(ask, load=replace(ask.load, devices=ask.named))

    def check(self) -> None:
        """Raise ``UsageError`` if the parameters contradict each other on any machine."""
        check_split_mode(self.load.split_mode)
        sharing = self.sharing
        drafts = sharing.mtp_word if sharing.mtp else "-md" if sharing.model_draft is not None else None
        if self.load.split_mode != "auto":
            # auto becomes two fits, with layer and tensor, which are checked themselves
            check_split_tensors(self.load, "--mmproj" if drafts is None and sharing.mmproj else drafts)
        check_choices(self.objective, self.strategy)
        check_pins(self.load.n_gpu_layers, self.load.tensor_split)
        levers(self.allow)
        check_paging(self.load, self.allow)
        self.sharing.check()
        PROGRAMS[self.program].check(self.set_words)
        self._check_work()
        self.check_machine()

    def _check_work(self) -> None:
        for option, value in (("--prompt", self.prompt), ("--generate", self.generate)):
            if value is not None and self.workload is not None:
                raise UsageError(f"--workload says how long prompts and answers are: leave {option} out")
        if self.at_least is not None and self.session is None:
            raise UsageError("--at-least is about users: say how many with --users, or leave it out")

    def check_machine(self) -> None:
        """Raise ``UsageError`` if the described machine is impossible."""
        if self.host_bandwidth is not None:
            speed_of_host(self.host_bandwidth, is_described=True)
        if self.rpc_bandwidth is not None and not self.rpc:
            raise UsageError("--rpc-bandwidth is given without an rpc-server: name one with --rpc")
        _ = self.remote_bandwidths
        check_profile(self.profile, self.virtual)
        if self.is_without_devices and self.devices:
            raise UsageError(f"unknown device '{self.devices[0]}': --gpu none means a machine without a GPU")
        if self.host_memory is not None and self.host_memory < 1:
            raise UsageError(f"--host-memory is {self.host_memory} bytes: give more than 0")

    @cached_property
    def virtual(self) -> tuple[VirtualDevice, ...]:
        """The described devices. Raises ``UsageError``."""
        return virtual_devices(self.gpus)

    @property
    def is_described(self) -> bool:
        """Whether the user describes a machine instead of using this one."""
        return bool(self.gpus)

    @property
    def is_for_one_process(self) -> bool:
        """Whether only one process may use the devices.

        Each process takes some memory of a real device, and an rpc-server has one client.
        """
        return not self.is_described or bool(self.rpc)

    @property
    def is_without_devices(self) -> bool:
        """Whether the machine has no device."""
        return self.is_described and not self.virtual and not self.rpc

    @property
    def named(self) -> tuple[str, ...] | None:
        """Devices that the user names for the model; ``None`` without any."""
        return () if self.is_without_devices else self.devices

    @property
    def remote_bandwidths(self) -> tuple[float, ...]:
        """Bytes per second of remote devices that the user sets: one for all, or one for each."""
        if self.rpc_bandwidth is None:
            return ()
        from fitter.machine.bandwidth import parse_bandwidths

        return parse_bandwidths(self.rpc_bandwidth)

    @property
    def batches(self) -> dict[str, int]:
        """The user's ``n_batch`` and ``n_ubatch``, as far as they are set."""
        words: Mapping[str, Any] = self.words
        return {name: words[name] for name in ("n_batch", "n_ubatch") if name in self.given}

    @property
    def is_workload_given(self) -> bool:
        """Whether the user sets the request, so that a context must hold it."""
        return self.prompt is not None or self.generate is not None or self.workload is not None

    @cached_property
    def session(self) -> Session | None:
        """The work that the user describes, if any. Raises ``UsageError``."""
        return session_of(self.workload, self.users)

    @property
    def is_placed(self) -> bool:
        """Whether the user decides anything about the model's place, or the layers to load."""
        has_overrides = bool(self.load.tensor_buft_overrides or self.cpu_moe or self.n_cpu_moe or self.n_cpu_ffn)
        is_split = self.load.split_mode != Params.split_mode
        return has_overrides or "n_gpu_layers" in self.given or self.named is not None or is_split or self.sharing.mtp


def _user_set(checked: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in checked.items() if value is not None)


def _set(kind: type[Ask] | type[Sharing], checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are set and have a field in ``kind``."""
    return {each.name: checked[each.name] for each in fields(kind) if checked.get(each.name) is not None}


def _ngram_words(checked: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    names = (each.name for each in taken_by(ServerKeywords) if each.needs)
    return tuple((name, checked[name]) for name in names if checked.get(name) is not None)


_NGRAMS = tuple(way for way in SPECULATION if way.startswith("ngram-"))
"""Ways to draft without a model."""


def _program_keywords(checked: Mapping[str, Any], drafted: int, slots: int | None = None) -> Asked:
    """Collect the keywords that a program reads; ``slots`` is the number of sequences where the user sets none."""
    embedding, reranking = bool(checked.get("embedding")), bool(checked.get("reranking"))
    pooling = checked.get("pooling_type") or "model"
    return Asked(
        n_seq_max=checked.get("n_seq_max") or slots,
        kv_unified=checked.get("kv_unified"),
        n_batch=checked.get("n_batch"),
        n_ubatch=checked.get("n_ubatch"),
        reads_texts=embedding or reranking,
        is_pooled=pooling not in ("model", "none"),
        logits_all=bool(checked.get("logits_all")),
        drafted=drafted,
    )


def _initial_params(checked: Fitting, sharing: Sharing, program: Program, program_facts: Facts) -> Params:
    """Build the parameters with which a fit begins; it chooses devices later."""
    session = session_of(checked.get("workload"), checked.get("users"))
    slots = min(session.users, MAX_SEQUENCES) if session and program.has_slots else None
    asked = _program_keywords(checked, sharing.drafted(program_facts), slots)
    if asked.reads_texts and (sharing.mtp or sharing.model_draft is not None or sharing.ngrams):
        what = "--reranking" if checked.get("reranking") else "--embedding"
        drafts = sharing.mtp_word if sharing.mtp else "-md" if sharing.model_draft is not None else "--spec-type"
        raise UsageError(f"{what} is for texts that are only read, and {drafts} drafts tokens: leave one of them out")
    load: dict[str, Any] = {each.name: checked.get(each.name) for each in taken_by(LoadKeywords)}
    load |= vars(program.shape(asked, program_facts))
    load |= {"devices": None, "main_gpu": None}
    if program.is_server and checked.get("flash_attn") is None:
        load["flash_attn"] = program_facts.flash_attn
    if checked.get("reranking"):
        load |= {"embedding": True, "pooling_type": "rank"}
    words: Mapping[str, Any] = checked
    more = {name: words[name] for name in _OF_A_PROGRAM if words.get(name) is not None}
    if slots is not None and load["n_seq_max"] > 1 and program_facts.cache_idle_slots:
        # each turn would wait until the other users' conversations are copied
        more.setdefault("cache_idle_slots", False)
    begun = params_of(None, **load).having(more)
    return replace(begun, load_mtp=sharing.mtp, n_rs_seq=sharing.n_rs_seq)


_OF_A_PROGRAM = tuple(each.name for each in taken_by(ServerKeywords) if each.struct and each.key)
"""Keywords of single programs that are parameters of a plan."""


def _shaped(checked: Measuring) -> Measuring:
    """Add the defaults of the ``program``, if one is set, to keywords of one load."""
    if (name := checked.get("program")) is None:
        return checked
    program = PROGRAMS[name]
    shape = vars(program.shape(_program_keywords(checked, 0), facts(name)))
    both = {**shape, **{key: value for key, value in checked.items() if value is not None}}
    return cast(Measuring, both)


def _device_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return () if [name.lower() for name in names] == ["none"] else tuple(names)
